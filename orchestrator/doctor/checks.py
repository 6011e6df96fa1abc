"""Checks of an examination, each a function from facts to findings, and their text.

A finding has a place, a problem and a remedy. ERROR would make a run fail, at least on that node;
WARNING would slow it or make figures doubtful; NOTE is for the rest.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.core import errors
from orchestrator.core.job import Accelerator
from orchestrator.doctor.probe import NEEDED
from orchestrator.on_ray.examination import ClusterFacts, NodeFacts, Probe, Versions
from orchestrator.util.format import listed, plural
from orchestrator.util.host import HOME_REMEDY, MEMORY_REMEDY
from workloads.devices import Finding, Level, all_devices, release_of
from workloads.engines import ENGINES, engine_packages

#: Packages whose versions must match for rows of two nodes to be comparable.
_COMPARED = ("nightgrid", "torch", "deepspeed", "peft")  # and those of engines


def check_nodes(facts: ClusterFacts) -> Iterator[Finding]:
    """Check for missing nodes, and for cards."""
    alive = [node for node in facts.nodes if node.alive]
    if facts.expected_nodes is not None and len(alive) < facts.expected_nodes:
        message = f"{len(alive)} of {facts.expected_nodes} expected nodes are in the cluster"
        remedy = (
            "look at `ray monitor cluster.yaml`; on the missing server, at the container's logs: "
            "`docker exec -it nightgrid ls /tmp/ray/session_latest/logs`. A node with another Ray "
            "or Python version, or without the token, cannot join"
        )
        yield Finding("nodes", message, remedy, Level.ERROR)
    if not any(node.cards for node in alive):
        apart = [spec for spec in all_devices() if not spec.host]
        kinds = [spec.accelerator for spec in apart]
        message = f"no node has registered a {' or '.join(kinds)} card with Ray"
        remedy = "; ".join(filter(None, (spec.registration for spec in apart)))
        yield Finding("cards", message, remedy, Level.ERROR)


def check_token(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the cluster needs a token; otherwise anyone can run code on every node."""
    if not facts.token and not facts.emulated:
        message = "it asks for no token: anyone who reaches its ports can run code on all nodes"
        remedy = "RAY_AUTH_MODE=token on every node and workstation (docs/security.md)"
        yield Finding("token", message, remedy, Level.ERROR)


def check_dashboard(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the job interface is on loopback, to be reached through an SSH tunnel."""
    host = (facts.dashboard or "").rpartition(":")[0].strip("[]")
    if host and not host.startswith("127.") and host not in ("localhost", "::1"):
        message = f"the dashboard, with its job interface, listens on {facts.dashboard}"
        remedy = "start the head with --dashboard-host=127.0.0.1 and use an SSH tunnel"
        yield Finding("dashboard", message, remedy, Level.WARNING if facts.token else Level.ERROR)


def check_shared(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that driver and nodes see each other's files in the shared directory."""
    if facts.shared_dir is None:
        return
    if facts.shared_trouble:
        message = f"it cannot write to {facts.shared_dir}: {facts.shared_trouble}"
        remedy = "mount it read-write where the driver runs, for the user that Ray runs as"
        yield Finding("shared", message, remedy, Level.ERROR, where="driver")
        return
    for node in facts.nodes:
        shared = node.probe.shared if node.probe else None
        if shared is None or (shared.readable and shared.written):
            continue
        blind = "sees nothing of what the driver writes to"
        what = "cannot write to" if shared.readable else blind
        yield Finding(
            "shared",
            f"it {what} {facts.shared_dir}" + (f": {shared.trouble}" if shared.trouble else ""),
            f"mount the same file system at {facts.shared_dir} on every server, and into "
            "the container (-v in run_options); docker makes a missing directory, empty",
            Level.ERROR if not shared.readable else Level.WARNING,
            where=node.name,
        )


def check_versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that Python, Ray and packages match on all nodes with the same cards."""
    probes = [(node, node.probe) for node in facts.nodes if node.probe is not None]
    for node, probe in probes:
        here = Versions(ray=probe.versions.get("ray", "?"), python=probe.python)
        same = here.python.split(".")[:2] == facts.driver.python.split(".")[:2]
        if here != facts.driver:
            yield Finding(
                "ray-version",
                f"it has Ray {here.ray} and Python {here.python}, the driver "
                f"{facts.driver.ray} and {facts.driver.python}",
                "run every node from the same image, or environments made alike",
                Level.WARNING if same and here.ray == facts.driver.ray else Level.ERROR,
                where=node.name,
            )
    for package in (*_COMPARED, *engine_packages()):
        by_version: dict[str, list[str]] = defaultdict(list)
        kinds: dict[str, set[Accelerator]] = defaultdict(set)
        for node, probe in probes:
            if node.cards:
                version = probe.versions.get(package, "none")
                by_version[version].append(node.name)
                kinds[version] |= set(node.cards)
        if len(by_version) < 2:
            continue
        # Servers with different cards differ anyway; nodes of one kind should not.
        shared_kind = any(kinds[a] & kinds[b] for a in kinds for b in kinds if a < b)
        where = ", ".join(
            f"{version} on {listed(sorted(names))}" for version, names in sorted(by_version.items())
        )
        message = f"{package} is {where}"
        remedy = (
            "nodes of one kind should run the same image: their rows are compared"
            if shared_kind
            else ""
        )
        yield Finding("versions", message, remedy, Level.WARNING if shared_kind else Level.NOTE)


def _without(kind: Accelerator) -> str:
    option, resource = kind.spec.ray_option, kind.spec.ray_resource
    return f"--{option.replace('_', '-')} 0" if option else f'--resources without "{resource}"'


#: Rows of different nodes are compared to the second, leases to half of that.
CLOCK_LIMIT_S = 0.5
#: Ray's session logs and spilled objects; a full disk there looks like a job's crash.
RAY_SPACE_BYTES = 10 * 2**30
#: For checkpoints and adapters; rows are small.
RESULTS_SPACE_BYTES = 5 * 2**30
#: One 6-billion-parameter model in bf16 and its converted copy.
MODEL_SPACE_BYTES = 30 * 2**30
#: Ray's advice; eight workers with data loaders and sockets approach the usual 1,024.
OPEN_FILES = 65_536
#: Space in /dev/shm for collectives of eight processes and data loaders.
SHARED_MEMORY_BYTES = 8 * 2**30

_GIB = 2**30


def check_imports(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Check that the packages which jobs import are there, and import."""
    image = (
        "install it in the node's image or environment (clusters/gaudi.Dockerfile, "
        "clusters/gpu.Dockerfile); on Gaudi never let pip replace Habana's torch"
    )
    of_engines = {
        package.module: spec
        for spec in ENGINES.values()
        for package in spec.packages
        if package.module not in NEEDED
    }
    for package, error in probe.import_errors.items():
        engine = of_engines.get(package)
        message = f"{package} does not import: {error}"
        remedy = image if engine is None else f"for the engine {engine.name}: {engine.install}"
        yield Finding("imports", message, remedy, Level.ERROR if node.cards else Level.NOTE)
    versions = probe.versions
    for spec in ENGINES.values():
        for needed in spec.packages:
            for other, limit in needed.below.items():
                if needed.name not in versions or other not in versions:
                    continue
                if release_of(versions[other]) >= release_of(limit):
                    message = (
                        f"{other} {versions[other]} is too new for {needed.name} "
                        f"{versions[needed.name]}"
                    )
                    remedy = f"{spec.install} ({other} below {limit})"
                    yield Finding("imports", message, remedy, Level.ERROR)


def check_cards(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Check that Ray and the vendor's tool agree on cards, and that no process uses one."""
    if node.emulated:
        return
    for kind, count in node.cards.items():
        tool = kind.spec.tool
        if not tool:
            continue
        if not probe.cards:
            message = f"Ray has {count} {kind} cards, but {tool} shows none"
            yield Finding("cards", message, kind.spec.no_cards_remedy, Level.ERROR)
        elif len(probe.cards) != count:
            yield Finding(
                "cards",
                f"Ray has {count} {kind} cards, but {tool} shows {len(probe.cards)}",
                "start Ray with the number that is there; a card that has gone needs a "
                "reset or a reboot of the server",
                Level.ERROR if len(probe.cards) < count else Level.NOTE,
            )
        seen = {kind.spec.product(card.product) for card in probe.cards} - {""}
        named = kind.spec.product(node.device_name)
        if named and seen and seen != {named}:
            yield Finding(
                "cards",
                f"Ray calls its cards {node.device_name}, {tool} says {' and '.join(sorted(seen))}",
                "start Ray with the accelerator_type of the cards that are there",
            )
    for card in probe.cards:
        if card.lost:
            message = f"card {card.index} is lost: {card.lost}; a run leaves it out"
            remedy = "`sudo dmesg` on the server says why; a reset or a reboot may bring it back"
            yield Finding("cards", message, remedy)
        if card.temperature_c == 0:
            message = f"card {card.index} has 0 °C: it did not come up"
            remedy = 'reboot the server; Habana\'s "System Verifications" says so of `0C`'
            yield Finding("cards", message, remedy, Level.ERROR)
        if card.occupied:
            remedy = "end that process; a run waits half a minute, then leaves the card out"
            yield Finding("cards-free", card.occupied, remedy)


def check_accounts(node: NodeFacts) -> Iterator[Finding]:
    """Check that no other run holds the cards in Ray's accounts."""
    total = sum(node.cards.values())
    if node.cards_free < total:
        yield Finding(
            "cards-free",
            f"{total - node.cards_free} of {total} cards are held in Ray's accounts",
            "another run or actors hold them: `ray list actors`, `nightgrid status`; a run "
            "takes the free ones and leaves these alone",
        )


def check_clock(node: NodeFacts) -> Iterator[Finding]:
    """Check the clock against the driver's, within the error of a round trip."""
    clock = node.clock
    if clock is None or abs(clock.offset_s) - clock.bound_s <= CLOCK_LIMIT_S:
        return
    way = "ahead of" if clock.offset_s > 0 else "behind"
    yield Finding(
        "clock",
        f"its clock is {abs(clock.offset_s):.2f} s (±{clock.bound_s:.3f} s) {way} the driver's",
        "`timedatectl set-ntp true` on both servers: times in rows would be wrong by that",
    )


def check_limits(node: NodeFacts, probe: Probe) -> Iterator[Finding]:
    """Check open files, locked memory and shared memory for a full server."""
    if node.emulated or not node.cards:
        return
    if 0 <= probe.open_files < OPEN_FILES:
        remedy = (
            f"--ulimit=nofile=1048576:1048576 in run_options, or `ulimit -n {OPEN_FILES}` "
            "before `ray start`"
        )
        yield Finding("limits", f"a process may open {probe.open_files:,} files", remedy)
    if probe.locked_bytes >= 0 and any(kind.spec.can("pinned_memory") for kind in node.cards):
        yield Finding(
            "limits",
            f"a process may lock {probe.locked_bytes // 1024} KiB of memory; buffers of "
            "cards want to be locked",
            "--ulimit=memlock=-1:-1 in run_options, or `ulimit -l unlimited`",
        )
    if probe.shared_memory_bytes < SHARED_MEMORY_BYTES:
        message = f"/dev/shm has {probe.shared_memory_bytes / _GIB:.1f} GiB free"
        remedy = "--ipc=host in run_options (docker gives a container 64 MiB otherwise)"
        yield Finding("limits", message, remedy)


def check_host(probe: Probe) -> Iterator[Finding]:
    """Check for a home directory, and memory left before Ray's memory monitor kills."""
    if probe.home_problem:
        remedy = f"{HOME_REMEDY}, in the environment in which that node's Ray starts"
        yield Finding("home", probe.home_problem, remedy, Level.ERROR)
    if problem := probe.memory.problem:
        over = probe.memory.share >= probe.memory.killed_from
        yield Finding("memory", problem, MEMORY_REMEDY, Level.ERROR if over else Level.WARNING)


def check_space(probe: Probe) -> Iterator[Finding]:
    """Check free disk space; a full disk under Ray looks like a job's crash."""
    wanted = {
        "Ray's files": (RAY_SPACE_BYTES, "ray start --temp-dir"),
        "results": (RESULTS_SPACE_BYTES, "--results DIR or NIGHTGRID_RESULTS"),
        "models": (MODEL_SPACE_BYTES, "HF_HOME, NIGHTGRID_CACHE"),
    }
    for space in probe.spaces:
        limit, elsewhere = wanted[space.purpose]
        if space.unlocked:
            links = space.unlocked.startswith("link")
            message = (
                f"the file system of {space.path} has no "
                f"{'hard links' if links else 'locks'} ({space.unlocked}); "
                + (
                    "a run cannot be locked there"
                    if links
                    else "drivers started at one moment, and copied runs, are not told apart there"
                )
            )
            remedy = f"put {space.purpose} on a local disk or NFS: {elsewhere}"
            yield Finding("locks", message, remedy, Level.ERROR if links else Level.WARNING)
        if space.free_bytes < limit:
            yield Finding(
                "disk",
                f"{space.free_bytes / _GIB:.1f} GiB are free for {space.purpose} at "
                f"{space.path}, less than {limit / _GIB:.0f}",
                f"free some, or put it elsewhere: {elsewhere}",
                Level.ERROR if space.free_bytes < limit / 10 else Level.WARNING,
            )


def judge(facts: ClusterFacts) -> list[Finding]:
    """Return all findings, the worst first, then by node."""
    findings = [
        *check_nodes(facts),
        *check_token(facts),
        *check_dashboard(facts),
        *check_shared(facts),
        *check_versions(facts),
    ]
    for node in facts.nodes:
        findings += (replace(finding, where=node.name) for finding in check_node(node))
    return sorted(findings, key=lambda finding: (-finding.level, finding.where, finding.check))


def check_node(node: NodeFacts) -> Iterator[Finding]:
    """Yield the findings of one node."""
    if not node.alive:
        remedy = (
            "`ray up cluster.yaml` starts it again; its /tmp/ray/session_latest/logs (raylet.out) "
            "say why it died"
        )
        yield Finding("nodes", "it was in the cluster and is dead", remedy)
    if len(node.cards) > 1:
        both = " and ".join(sorted(node.cards))
        message = f"it has {both} cards; a run refuses a node of two kinds"
        remedy = f"start it with one kind: {', or '.join(map(_without, node.cards))}"
        yield Finding("cards", message, remedy, Level.ERROR)
    if (probe := node.probe) is not None:
        yield from check_imports(node, probe)
        yield from check_cards(node, probe)
        yield from check_accounts(node)
        for kind, count in () if node.emulated else node.cards.items():
            yield from kind.spec.examine(count, probe)
        yield from check_clock(node)
        yield from check_limits(node, probe)
        yield from check_host(probe)
        yield from check_space(probe)
    elif node.alive:
        remedy = (
            "is the server frozen or out of memory? `ray stop` and `ray start` there, or take it "
            "out of the cluster"
        )
        yield Finding("answer", node.trouble, remedy, Level.ERROR)


# ---------------------------------------------------------------- text and JSON

_MARKS = {Level.ERROR: "ERROR  ", Level.WARNING: "WARNING", Level.NOTE: "note   "}


def exit_code(findings: Sequence[Finding]) -> int:
    """Return the command's exit code, by the worst finding."""
    worst = max((finding.level for finding in findings), default=Level.NOTE)
    return {
        Level.NOTE: errors.OK,
        Level.WARNING: errors.CLUSTER_DOUBTFUL,
        Level.ERROR: errors.CLUSTER_UNFIT,
    }[worst]


def as_json(facts: ClusterFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    """Facts and findings as JSON values."""
    return {
        "emulated": facts.emulated,
        "address": facts.address,
        **findings_json(findings),
        "summary": summary_lines(facts),
        "facts": dataclasses.asdict(facts),
    }


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as JSON values, with the worst level."""
    return {
        "worst": str(max((f.level for f in findings), default="ok")),
        "findings": [dataclasses.asdict(f) | {"level": str(f.level)} for f in findings],
    }


def finding_of(values: Mapping[str, str]) -> Finding:
    """Parse a finding from its JSON values."""
    return Finding(**{**values, "level": Level[values["level"].upper()]})  # type: ignore[arg-type]


def summary_lines(facts: ClusterFacts) -> list[str]:
    """Return a line for the cluster and one per node."""
    nodes = plural(len(facts.nodes), "node")
    lines = [f"{nodes} at {facts.address}, Ray {facts.driver.ray}"]
    if facts.emulated:
        lines.append("emulated cards on this machine: what concerns real cards is not checked")
    return lines + [f"  {node_line(node)}" for node in facts.nodes]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings with remedies, then the verdict."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]} {finding.where}: {finding.message}")
        lines.append(f"        {finding.remedy}")
    counts = Counter(finding.level for finding in findings)
    parts = [plural(counts[level], str(level)) for level in reversed(Level) if counts[level]]
    return [*lines, ", ".join(parts) or "all is well"]


def node_line(node: NodeFacts) -> str:
    """Return a line about a node."""
    kinds = " + ".join(f"{count} {kind}" for kind, count in node.cards.items()) or "no cards"
    parts = [f"{node.name}{' (head)' * (node.head and node.name != 'head')}", kinds]
    if node.device_name:
        parts.append(node.device_name)
    if node.cards:
        parts.append(f"{node.cards_free} free")
    probe = node.probe
    if probe is None:
        return ", ".join([*parts, node.trouble or ("dead" if not node.alive else "no answer")])
    if probe.driver_version:
        parts.append(f"driver {probe.driver_version}")
    parts += [
        f"{name} {probe.versions[name]}"
        for name in ("torch", *engine_packages(), "deepspeed")
        if name in probe.versions
    ]
    parts.append(f"Python {probe.python}")
    parts.append(f"{probe.memory_bytes / _GIB:.0f} GiB")
    if node.clock is not None:
        parts.append(f"clock {node.clock.offset_s * 1000:+.0f} ms ±{node.clock.bound_s * 1000:.0f}")
    return ", ".join(parts)
