"""``python tests/night/replay.py SEED [--on-disk]``: one simulated night again, to the letter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "night")]


def main() -> None:
    """Run the night and print what it came to; a violation is a traceback."""
    from nights import Shape, run_night

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--on-disk", action="store_true", help="rows in the real store")
    args = parser.parse_args()
    print(Shape.of(args.seed, on_disk=args.on_disk))
    print(run_night(args.seed, on_disk=args.on_disk))


if __name__ == "__main__":
    main()
