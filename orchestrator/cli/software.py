"""Commands on the software of a measured job: ``repro`` and ``bisect``."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchestrator.analysis.ratio import LEAST_NOISE, Ratio
from orchestrator.analysis.selection import newest_final
from orchestrator.cli import options as shared
from orchestrator.core.errors import NotComparable, OptionError, StoreError
from orchestrator.core.measurement import Measurement
from orchestrator.core.topology import Node, parse_emulation
from orchestrator.driver.plan import no_cards_text, own_nodes
from orchestrator.software.bisect import Bisector, measure_of
from orchestrator.software.repro import SCRIPT, rows_of_runs, write_folder
from orchestrator.store.store import find_run
from orchestrator.util import output
from orchestrator.worker.layers import available_versions
from workloads.base import BadConfiguration
from workloads.settings import DEFAULT_SOFTWARE


def _add_row_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN")
    parser.add_argument("job", metavar="JOB")
    shared.add_results_argument(parser)


def _row_of(args: argparse.Namespace) -> Measurement:
    """The newest final row of the job that the arguments name; StoreError if it is not one."""
    rows = newest_final(find_run(args.run_name, args.results).measurements(samples=False))
    matching = [row for row in rows if row.job_id.startswith(args.job)]
    if len(matching) != 1:
        many = ", ".join(row.job_id for row in matching[:5])
        raise StoreError(
            f"{args.run_name} has {f'several: {many}' if many else 'no job'} {args.job}"
        )
    return matching[0]


def add_repro_arguments(parser: argparse.ArgumentParser) -> None:
    """example:
      nightgrid repro smoke 3f2a81        writes repro-3f2a81…/; then, there: python repro.py

    JOB is a job's id or its beginning, as the report and `nightgrid query` show it.
    exit codes: 0; 4 no such run or job; 6 no measured row of one card
    """
    _add_row_arguments(parser)
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write (default: ./repro-JOB)"
    )
    shared.add(parser, "--json")


def run_repro(args: argparse.Namespace) -> int:
    """Write the folder."""
    row = _row_of(args)
    directory = args.output or Path(f"repro-{row.job_id}")
    results = find_run(args.run_name, args.results).path.parent
    files = write_folder(row, directory, rows_of_runs(results))
    report = {"directory": str(directory), "files": files}
    shared.print_answer(args, report, f"{directory}: {', '.join(files)}; there: python {SCRIPT}")
    return 0


def add_bisect_arguments(parser: argparse.ArgumentParser) -> None:
    """example:
      nightgrid bisect smoke 3f2a81 --package transformers --good 5.10.0 --bad 5.23.0

    It measures on this machine, on a card of the row's kind (of an emulated card's row: an emulated
    one), each version in fresh processes in turn with the good one; a version that cannot be
    installed or measured is passed over. On a host's processor speed is that of the fastest repeat
    by CPU time.
    exit codes: 0; 2 no such version; 4 no such run or job; 6 nothing to compare, or the bad version
    is not slower by the test of `nightgrid compare`
    """
    _add_row_arguments(parser)
    parser.add_argument("--good", required=True, metavar="A", help="a version before it was slower")
    parser.add_argument("--bad", required=True, metavar="B", help="a version that is slower")
    parser.add_argument(
        "--package", metavar="NAME", help="whose versions (default: the one that the job names)"
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=shared.whole_number,
        default=3,
        help="fresh processes of each of two versions at least; more follow, up to 10, where they "
        "do not decide (default: 3)",
    )
    parser.add_argument(
        "--noise",
        metavar="SHARE",
        type=shared.number(float, 0, 1, "between 0 and 1"),
        help="relative standard deviation between equals beyond that of their processes (default: "
        "0.005, as between runs on a quiet machine)",
    )
    shared.add(parser, "--json")


def run_bisect(args: argparse.Namespace) -> int:
    """Find the version and print it."""
    row = _row_of(args)
    if row.batch_size is None or row.cards > 1:
        raise NotComparable(f"{row.job_id} is no measured row of one card")
    package = args.package or _package_of(row)
    versions = _versions(package, args.good, args.bad)
    output.say_aside(f"{package}: {len(versions)} versions from {args.good} to {args.bad}")
    with measure_of(row.job, package, _node_of(row), row.threads or 1) as measure:
        bisector = Bisector(
            measure,
            noise=LEAST_NOISE if args.noise is None else args.noise,
            processes=args.processes,
            report=lambda step: output.say_aside(step.text(args.good)),
        )
        answer = bisector.find(versions)
    steps = [
        {"version": one.version, "slow": one.slow, "clear": one.clear, "reason": one.reason}
        | _ratio_json(one.ratio)
        for one in answer.steps
    ]
    report = {
        "package": package,
        "good": answer.good,
        "bad": answer.bad,
        "sure": answer.sure,
        "skipped": list(answer.skipped),
        "steps": steps,
    }
    shared.print_answer(args, report | _ratio_json(answer.change), f"{package} {answer.text}")
    return 0


def _ratio_json(ratio: Ratio | None) -> dict[str, float | None]:
    if ratio is None:
        return {"ratio": None, "low": None, "high": None}
    return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}


def _package_of(row: Measurement) -> str:
    software = str(row.parameters.get("software", DEFAULT_SOFTWARE))
    if software == DEFAULT_SOFTWARE or " " in software:
        raise OptionError(f"the job's software is {software}: name one by --package NAME")
    return software.partition("==")[0]


def _versions(package: str, good: str, bad: str) -> list[str]:
    """The versions from good to bad; OptionError if there is no such one."""
    try:
        versions = available_versions(package)
        if not {good, bad} <= set(versions):  # pre-releases are listed only if asked for
            versions = available_versions(package, pre=True)
    except (BadConfiguration, ImportError) as error:
        raise OptionError(str(error)) from error
    for version in (good, bad):
        if version not in versions:
            near = ", ".join(versions[-5:]) or "none"
            raise OptionError(f"{package} has no version {version} here; the newest are {near}")
    first, last = versions.index(good), versions.index(bad)
    if first == last:
        raise OptionError("--good and --bad are the same version")
    return versions[first : last + 1] if first < last else versions[last : first + 1][::-1]


def _node_of(row: Measurement) -> Node:
    """This machine with a card of the row's kind."""
    if row.emulated:
        return parse_emulation("1x1", [row.accelerator])[0]
    nodes = own_nodes([row.accelerator])
    if not nodes:
        raise NotComparable(no_cards_text([row.accelerator]))
    return nodes[0]
