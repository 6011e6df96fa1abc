"""The dress rehearsal of a night (`make rehearsal`): a grid of more than 200 jobs on three emulated
servers of eight cards, a fault about every twenty seconds, the driver killed once, and in the end
every job accounted for and the report complete.

    python tests/chaos/rehearsal.py [--seed N] [--output DIR] [--minutes M]

Writes ``rehearsal.json``, ``rehearsal.md`` and ``faults.json`` into the output directory, beside
the results; exit code 1 if anything does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos_cluster import ROOT, ChaosCluster, small_disk
from chaos_faults import plan
from chaos_grids import chaos_grid, jobs_of
from chaos_harness import RUN, Night, injected

EVERY_S = 20.0
#: Card-seconds of work for each second that the rehearsal should last: 24 cards, less what faults
#: and the starts of workers cost.
CARDS = 24
SECONDS = (60, 170)


def grid_counts(minutes: float) -> dict[str, int]:
    """How many jobs keep 24 cards busy for so long; never fewer than 200."""
    mean_s = sum(SECONDS) / 2
    pairs, nodes = 8, 3
    wide = (2 * pairs + 8 * nodes) * mean_s
    single = round((minutes * 60 * CARDS - wide) / mean_s)
    return {"single": max(single, 190), "pairs": pairs, "nodes": nodes}


def rehearse(seed: int, minutes: float, output: Path) -> dict[str, Any]:
    """Run it; the figures, with what does not hold under ``problems``."""
    counts = grid_counts(minutes)
    output.mkdir(parents=True, exist_ok=True)
    grid = output / "grid.yaml"
    grid.write_text(chaos_grid(seed=seed, seconds=SECONDS, **counts))
    faults = plan(seed, minutes * 60, EVERY_S)
    death = minutes * 60 * 0.45
    with ChaosCluster() as cluster, small_disk(output / "disk", 64) as disk:
        if disk is None:
            faults = [(at, kind) for at, kind in faults if kind != "fill the disk"]
        results = output / "disk" / "results"
        results.mkdir()
        night = Night(cluster=cluster, grid=grid, results=results, seed=seed, driver_deaths=[death])
        try:
            night.drive(faults, limit_s=minutes * 60 * 2 + 300)
            figures = night.check(jobs=jobs_of(**counts))
            figures["problems"] += report_problems(night, cluster, figures)
        finally:
            keep(night, cluster, output)
    figures["fault_every_s"] = round(figures["wall_s"] / max(1, figures["faults_total"]), 1)
    return figures


def report_problems(night: Night, cluster: ChaosCluster, figures: Mapping[str, Any]) -> list[str]:
    """What is wrong with the report that a user would look at in the morning."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator", "report", RUN),
            *("--results", str(night.results)),
        ],
        env=cluster.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode != 0:
        return [f"report ends with {done.returncode}: {done.stderr[-1000:]}"]
    page = (night.results / RUN / "report.html").read_text(encoding="utf-8")
    text = Text()
    text.feed(page)
    problems = [] if text.closed else ["the page is cut short"]
    problems += [
        f"the page does not say {state}" for state in figures["states"] if state not in page
    ]
    return problems


class Text(HTMLParser):
    """Reads a page to its end."""

    closed = False

    def handle_endtag(self, tag: str) -> None:
        self.closed = self.closed or tag == "html"


def keep(night: Night, cluster: ChaosCluster, output: Path) -> None:
    """Copy results and logs off the small disk before it goes."""
    faults = json.dumps(injected(night.injector.faults), indent=1)
    (output / "faults.json").write_text(faults)
    shutil.rmtree(output / "results", ignore_errors=True)
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(night.results, output / "results")
    for log in night.outputs:
        with contextlib.suppress(OSError):
            shutil.copy(log, output / log.name)


def markdown(figures: Mapping[str, Any]) -> str:
    """The figures as tables."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(figures["states"].items()))
    lines = [
        "| figure | value |",
        "|---|---|",
        f"| jobs, attempts | {figures['jobs']}, {figures['attempts']} |",
        f"| ended as | {states} |",
        f"| time | {figures['wall_s'] / 60:.1f} min |",
        f"| faults | {figures['faults_total']}, one every {figures['fault_every_s']:.0f} s |",
        f"| rows lost | {figures['rows_lost']} |",
        f"| rows duplicated | {figures['rows_duplicated']} |",
        f"| drivers | {figures['drivers']} |",
        f"| memory at most | {figures['peak_memory_mib'] / 1024:.1f} GiB |",
        "",
        "| fault | injected | until work went on there, median | longest |",
        "|---|---|---|---|",
    ]
    for kind, count in figures["faults"].items():
        times = figures["recovery_s"].get(kind)
        told = f"{times['median']:.1f} s | {times['max']:.1f} s" if times else "| "
        lines.append(f"| {kind} | {count} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rehearse, write the figures, say what does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--minutes", type=float, default=22.0, help="of work (default: 22)")
    parser.add_argument("--output", type=Path, default=Path("rehearsal"))
    args = parser.parse_args()
    began = time.time()
    figures = rehearse(args.seed, args.minutes, args.output.resolve())
    problems = figures["problems"]
    (args.output / "rehearsal.json").write_text(json.dumps(figures, indent=1) + "\n")
    (args.output / "rehearsal.md").write_text(markdown(figures))
    print(markdown(figures))
    for problem in problems:
        print(f"DOES NOT HOLD: {problem}")
    print(f"seed {args.seed}, {(time.time() - began) / 60:.1f} min; written to {args.output}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
