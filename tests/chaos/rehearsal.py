"""The dress rehearsal of a night (`make rehearsal`): a grid of hundreds of jobs on three emulated
servers of eight cards, a fault about every twenty seconds, each kind at least five times, and in
the end every job accounted for and the report complete.

    python tests/chaos/rehearsal.py [--seed N] [--output DIR] [--minutes M] [--least N]
                                    [--kinds KIND,KIND,…]

Writes ``rehearsal.json``, ``rehearsal.md`` and ``faults.json`` into the output directory, beside
the results, and keeps them up to date meanwhile (``"complete": false``), so that one that is broken
off tells what it saw; exit code 1 if anything does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # helpers of all tests
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos_clock import stepped_clock
from chaos_cluster import ChaosCluster
from chaos_drivers import RUN
from chaos_harness import Night, missing
from chaos_plan import KINDS, NEED_SMALL_DISKS, chaos_grid, counts, injected, jobs_of, plan
from small_disks import mounted_disk

MINUTES = 60.0
EVERY_S = 19.0
LEAST = 5
#: Share of the time in which faults are planned, and after which none is injected any more.
FAULTS_UNTIL, NO_MORE_FROM = 0.85, 0.95
#: Card-seconds of work for each second that the rehearsal should last: 24 cards, less what faults
#: and the starts of workers cost at the least. What is left over is done in a hurry.
CARDS, AT_WORK = 24, 0.8
SECONDS = (40, 110)
_DISK_BYTES, _LOG_BYTES = 192 * 2**20, 64 * 2**20


def grid_counts(minutes: float) -> dict[str, int]:
    """Count the jobs that keep the cards busy for so long."""
    mean_s = sum(SECONDS) / 2
    pairs, nodes = 8, 3
    wide = (2 * pairs + 8 * nodes) * mean_s
    single = round((minutes * 60 * CARDS * AT_WORK - wide) / mean_s)
    return {"single": max(single, 40), "pairs": pairs, "nodes": nodes}


def rehearse(
    seed: int, minutes: float, least: int, kinds: Collection[str], output: Path
) -> dict[str, Any]:
    """Run it; the figures, with what does not hold under ``problems``."""
    shape = grid_counts(minutes)
    output.mkdir(parents=True, exist_ok=True)
    grid = output / "grid.yaml"
    grid.write_text(chaos_grid(seed=seed, seconds=SECONDS, **shape))
    shutil.rmtree(output / "aside", ignore_errors=True)
    (output / "aside").mkdir()
    with (
        mounted_disk(output / "disk", _DISK_BYTES) as disk,
        mounted_disk(output / "logs", _LOG_BYTES) as log_disk,
        ChaosCluster() as cluster,
    ):
        clock = stepped_clock(output / "aside")
        left_out = []
        if disk is None or log_disk is None:
            left_out += NEED_SMALL_DISKS  # nobody but root may mount one
        if clock is None:
            left_out.append("step the clock")  # no C compiler
        chosen = [kind for kind in kinds if kind not in left_out]
        faults = plan(seed, minutes * 60 * FAULTS_UNTIL, EVERY_S, least=least, kinds=chosen)
        of_kinds = counts(kind for _, kind in faults)
        print(f"{len(faults)} faults: {of_kinds}; left out: {left_out or 'none'}", flush=True)
        results = output / "disk" / "results"
        results.mkdir(exist_ok=True)
        night = Night(
            cluster=cluster,
            grid=grid,
            results=results,
            log_dir=output / "logs",
            aside=output / "aside",
            seed=seed,
            clock=clock,
        )
        night.say = _teller(night, output)
        limits = {"limit_s": minutes * 60 * 2 + 300, "faults_until_s": minutes * 60 * NO_MORE_FROM}
        try:
            night.drive(faults, **limits)
            figures = night.check(jobs=jobs_of(**shape))
            figures["problems"] += report_problems(night, figures)
            figures["problems"] += missing(
                figures, least, [kind for kind in KINDS if kind not in chosen]
            )
        finally:
            keep(night, output)
    figures["left_out"] = left_out
    figures["fault_every_s"] = round(figures["wall_s"] / max(1, figures["faults_total"]), 1)
    return figures


def _teller(night: Night, output: Path) -> Callable[[str], None]:
    def tell(text: str) -> None:
        load = os.getloadavg()[0]
        print(f"{time.strftime('%H:%M:%S')} load {load:4.1f} {text}", flush=True)
        partial = night.figures() | {"complete": False, "problems": night.problems}
        _write(output / "rehearsal.json", partial)
        _write(output / "faults.json", injected(night.injector.faults))

    return tell


def report_problems(night: Night, figures: Mapping[str, Any]) -> list[str]:
    """Faults of the report that a user would look at in the morning."""
    asked = ("report", RUN, "--results", str(night.results))
    done = night.drivers.nightgrid(*asked, timeout_s=300)
    if done.returncode != 0:
        return [f"report ends with {done.returncode}: {done.stderr[-1000:]}"]
    page = (night.results / RUN / "report.html").read_text(encoding="utf-8")
    problems = [] if page.rstrip().endswith("</html>") else ["the page is cut short"]
    problems += [
        f"the page does not say {state}" for state in figures["states"] if state not in page
    ]
    return problems + night.canaries.harmed()


def keep(night: Night, output: Path) -> None:
    """Copy results and logs off the small disks before they go."""
    _write(output / "faults.json", injected(night.injector.faults))
    for name, source in (("results", night.results), ("kept-logs", night.log_dir)):
        shutil.rmtree(output / name, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(source, output / name, symlinks=True)


def markdown(figures: Mapping[str, Any]) -> str:
    states = ", ".join(f"{count} {state}" for state, count in sorted(figures["states"].items()))
    lines = [
        "| figure | value |",
        "|---|---|",
        f"| jobs, attempts, attempts lost | {figures['jobs']}, {figures['attempts']}, "
        f"{figures['attempts_lost']} |",
        f"| ended as | {states} |",
        f"| time | {figures['wall_s'] / 60:.1f} min |",
        f"| faults, kinds | {figures['faults_total']}, {len(figures['faults'])}; one every "
        f"{figures['fault_every_s']:.0f} s |",
        f"| drivers started, that ended by themselves | {figures['drivers']}, "
        f"{figures['drivers_that_died']} |",
        f"| rows lost, duplicated | {figures['rows_lost']}, {figures['rows_duplicated']} |",
        f"| row files that rotted, set aside and named | {figures['files_rotted']}, "
        f"{figures['files_set_aside']} |",
        f"| processes, ports or cards left behind | {figures['left_behind']} |",
        f"| what did not hold | {len(figures['problems'])} |",
        f"| memory at most, all processes | {figures['peak_memory_mib'] / 1024:.1f} GiB |",
        "",
        "| fault | injected | until the next attempt started there, median | longest |",
        "|---|---|---|---|",
    ]
    for kind, count in figures["faults"].items():
        times = figures["recovery_s"].get(kind)
        told = f"{times['median']:.1f} s | {times['max']:.0f} s" if times else "| "
        lines.append(f"| {kind} | {count} | {told} |")
    return "\n".join(lines) + "\n"


def _write(path: Path, value: Any) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="(default: %(default)g)")
    parser.add_argument("--least", type=int, help="of each kind (default: 5 an hour)")
    parser.add_argument("--kinds", help="only these, separated by commas (default: all)")
    parser.add_argument("--output", type=Path, default=Path("rehearsal"))
    args = parser.parse_args()
    least = args.least if args.least is not None else round(LEAST * args.minutes / MINUTES)
    kinds = args.kinds.split(",") if args.kinds else list(KINDS)
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"no such kinds: {sorted(unknown)}")
    began = time.time()
    output = args.output.resolve()
    figures = rehearse(args.seed, args.minutes, least, kinds, output) | {"complete": True}
    _write(output / "rehearsal.json", figures)
    (output / "rehearsal.md").write_text(markdown(figures))
    print(markdown(figures))
    for problem in figures["problems"]:
        print(f"DOES NOT HOLD: {problem}")
    print(f"seed {args.seed}, {(time.time() - began) / 60:.1f} min; written to {args.output}")
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
