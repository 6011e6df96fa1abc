"""``nightgrid doctor``: check whether a cluster or this machine is ready, and how to fix it.

All nodes are examined in parallel: cards, versions, imports, clocks, huge pages, limits, disk
space, shared directory, token. With the dashboard's address a job on the head node does it, since a
workstation cannot join a cluster; without any address this machine is examined on a private Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from orchestrator.cli import options as shared
from orchestrator.core.errors import GridError, StoreError
from orchestrator.core.job import Job
from orchestrator.core.topology import Node, parse_emulation
from orchestrator.doctor import checks
from orchestrator.doctor.probe import NEEDED, examine
from orchestrator.driver.plan import own_machine, packages_lacking
from orchestrator.grid import grid_path
from orchestrator.grid.parser import load_grid
from orchestrator.on_ray.cluster import RayCluster, connect, described, local_address
from orchestrator.on_ray.examination import ClusterFacts, Examination
from orchestrator.on_ray.file_look import NodeRefusal, refused, with_absolute_paths
from orchestrator.on_ray.jobs import JobServer, is_job_address, nodes_at
from orchestrator.on_ray.local_cluster import emulate
from orchestrator.store.history import read_card_checks, slow_cards_of
from orchestrator.store.reader import runs
from orchestrator.util.host import load_problem
from orchestrator.worker.layers import layer_findings
from workloads.devices import Finding, Level


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid doctor                                      this machine, with its own cards
      nightgrid doctor --emulate 2x8                        this machine, with emulated cards
      nightgrid doctor --address http://127.0.0.1:8265      a cluster, through an SSH tunnel
      nightgrid doctor --grid night.yaml --emulate 2x8      and this grid's models and data
      nightgrid doctor --shared /shared --nodes 3           on a machine of the cluster

    exit codes:
      0    fit; notes at most
      12   warnings: a run works, and is slower or its figures doubtful
      13   errors: a run would fail, wholly or on some node
      3    no cluster can be joined;  5  the dashboard does not answer, or not in time
    """
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        metavar="ADDRESS",
        help="http://HEAD:8265 (the dashboard, from anywhere) or HOST:6379 (on a machine of the "
        "cluster); default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, else this machine",
    )
    where.add_argument(
        "--emulate", metavar="SPEC", help="start emulated nodes on this machine: 2x8, 1x2:GPU"
    )
    parser.add_argument(
        "--shared",
        metavar="DIR",
        help="a directory that all nodes should share: is it written and seen everywhere?",
    )
    parser.add_argument(
        "--grid",
        metavar="GRID",
        type=grid_path,
        help="look at this grid's models and data too: relative paths here, absolute ones on every "
        "node with cards",
    )
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=shared.whole_number,
        dest="expected_nodes",
        help="how many should be there",
    )
    parser.add_argument(
        "--import",
        metavar="NAME",
        action="append",
        dest="packages",
        help="import this on every node, in place of what jobs need (torch, transformers, …); "
        "may be repeated",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        action="append",
        dest="engines",
        help="this engine's packages must be there (default: those of --grid's jobs); those of "
        "other engines are imported where they are installed; may be repeated",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=shared.number(float, 5, 3600, "between 5 and 3600 seconds"),
        dest="timeout_s",
        default=120.0,
        help="a node that has not answered by then is silent (default: 120)",
    )
    shared.add_results_argument(parser, "where the driver would write rows")
    shared.add(parser, "--json")


def run_doctor(args: argparse.Namespace) -> int:
    """Examine the nodes and print the findings."""
    if not args.emulate and is_job_address(args.address):
        return _from_afar(args)
    facts, of_files = _examine(args)
    findings = [*checks.judge(facts), *of_files, *slow_card_findings(args.results)]
    if problem := load_problem():
        remedy = "measure on it when they have ended, or look at the flags of its rows"
        findings.append(Finding("load", problem, remedy, Level.NOTE, where="here"))
    shared.print_answer(
        args,
        checks.as_json(facts, findings),
        *checks.summary_lines(facts),
        *checks.finding_lines(findings),
    )
    return checks.exit_code(findings)


def slow_card_findings(results: Path) -> list[Finding]:
    """A finding for each card that was slow in the newest run with checks of its cards here."""
    remedy = (
        "look at its temperature, power limit and slot; leave it out of the run until it is as "
        "fast as the others"
    )
    with contextlib.suppress(StoreError):
        for name in runs(results):
            if checks := read_card_checks(results / name):
                level = Level.NOTE if any(one.emulated for one in checks) else Level.WARNING
                return [
                    Finding("slow-card", f"{slow} (run {name})", remedy, level, where=slow.card)
                    for slow in slow_cards_of(results / name)
                ]
    return []


def _grid_findings(
    grid: Path | None,
    refused: Callable[[Sequence[Job]], Sequence[NodeRefusal]],
    nodes: Callable[[], Sequence[Node]],
) -> list[Finding]:
    """Findings of the look at a grid's files, here and by ``refused`` on nodes, of packages that
    its jobs need and no node has, and of the software that it names, here."""
    if grid is None:
        return []
    findings: list[Finding] = []

    def error(check: str, message: str, remedy: str) -> None:
        findings.append(Finding(check, message, remedy, Level.ERROR, where=str(grid)))

    try:
        loaded = load_grid(grid, elsewhere=True)
        for one in refused(with_absolute_paths(loaded.jobs())):
            error("files", f"{one.setting}: {one.reason}", one.hint)
        for lacking in packages_lacking(loaded, nodes())[0]:
            error("packages", lacking, "run it on each node, or build it into their image")
        findings += layer_findings(loaded.jobs())
    except GridError as refusal:
        for problem in refusal.problems:
            error("files", f"line {problem.line}: {problem.message}", problem.hint)
    return findings


def _engines(args: argparse.Namespace) -> tuple[str, ...]:
    """Engines whose packages must be on the nodes: those named, else those of the grid's jobs."""
    if args.engines or args.grid is None:
        return tuple(args.engines or ())
    with contextlib.suppress(GridError):  # the look at its files names what is wrong
        return tuple(sorted({job.engine for job in load_grid(args.grid, elsewhere=True).jobs()}))
    return ()


def _examine(args: argparse.Namespace) -> tuple[ClusterFacts, list[Finding]]:
    examination = Examination(
        examine=examine,
        packages=tuple(args.packages or NEEDED),
        engines=_engines(args),
        shared_dir=args.shared,
        results_dir=str(args.results),
        expected_nodes=args.expected_nodes,
        timeout_s=args.timeout_s,
    )
    address = args.address or os.environ.get("RAY_ADDRESS")
    session: contextlib.AbstractContextManager[RayCluster]
    if args.emulate:
        session = emulate(parse_emulation(args.emulate, ()))
    elif not (address or local_address()):
        session = emulate(own_machine())
    else:
        session = connect(address or "auto")
    with session as cluster:
        facts = examination.of(cluster)
        findings = _grid_findings(
            args.grid,
            lambda jobs: refused(cluster.nodes(), jobs),
            lambda: described(cluster.nodes()),
        )
        return facts, findings


def _from_afar(args: argparse.Namespace) -> int:
    command = ["doctor", "--json", f"--timeout={args.timeout_s}"]
    command += [f"--shared={args.shared}"] if args.shared else []
    command += [f"--import={package}" for package in args.packages or ()]
    command += [f"--engine={engine}" for engine in _engines(args)]
    command += [f"--nodes={args.expected_nodes}"] if args.expected_nodes else []
    server = JobServer(args.address)
    answered = server.json_in(server.ask(command, timeout_s=args.timeout_s + 60, may_fail=True))
    findings = [checks.finding_of(finding) for finding in answered["findings"]]
    findings += _grid_findings(
        args.grid, partial(refused, server.address), partial(nodes_at, server.address)
    )
    value = answered | checks.findings_json(findings)
    shared.print_answer(args, value, *answered["summary"], *checks.finding_lines(findings))
    return checks.exit_code(findings)
