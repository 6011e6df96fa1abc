"""A million simulated events (part of `make rehearsal`): nights by their seeds, one after the other
on every core, until there are enough. Every eighth has the real store on a disk that fails.

    python tests/night/million.py [--events N] [--seed FIRST] [--output DIR]
    python tests/night/million.py --replay SEED [--on-disk]     # one night again, to the letter

Writes ``nights.json``; exit code 1 if a night broke, with the command that replays it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "night")]

_ON_DISK_EVERY = 8
_TOLD_EVERY = 200
_FEWEST_EVENTS = 100  # nights have some hundreds on average


def one_night(seed: int) -> tuple[int, Any, str]:
    """Seed, tally and, where it broke, what happened and how to see it again."""
    from nights import Tally, run_night

    from orchestrator.scheduler.invariants import InvariantViolated

    try:
        return seed, run_night(seed, on_disk=seed % _ON_DISK_EVERY == 0), ""
    except InvariantViolated as error:
        return seed, Tally(), str(error)


def simulate(events: int, first: int) -> tuple[Any, list[str]]:
    """Nights from seed ``first`` on until there were so many events; what they came to, and how
    those broke that did."""
    from nights import Tally

    total, broken = Tally(), []
    # What stores say of torn files, as they should, is not for here.
    quiet = {"initializer": logging.disable, "initargs": (logging.CRITICAL,)}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), **quiet) as pool:
        seeds = range(first, first + events // _FEWEST_EVENTS + _TOLD_EVERY)
        for _, tally, trouble in pool.imap_unordered(one_night, seeds, chunksize=4):
            total.add(tally)
            broken += [trouble] * bool(trouble)
            if total.nights % _TOLD_EVERY == 0:
                print(f"{total.nights} nights, {total.events} events, {len(broken)} broken")
            if total.events >= events or len(broken) >= 20:
                break
        pool.terminate()
    return total, broken


def main() -> int:
    """Simulate, write what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=100_000, help="of the first night")
    parser.add_argument("--output", type=Path, default=Path("rehearsal/events"))
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--on-disk", action="store_true", help="rows in the real store")
    args = parser.parse_args()
    if args.replay is not None:
        from nights import Shape, run_night

        print(Shape.of(args.replay, on_disk=args.on_disk))
        print(run_night(args.replay, on_disk=args.on_disk))  # a violation is a traceback
        return 0
    began = time.monotonic()
    total, broken = simulate(args.events, args.seed)
    told = {each.name: getattr(total, each.name) for each in dataclasses.fields(total)}
    figures = told | {
        "first_seed": args.seed,
        "wall_s": round(time.monotonic() - began, 1),
        "broken": broken,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures, indent=1)
    (args.output / "nights.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
