"""Compare the product with golden files of what must not change.

    python -m tools.oracles                     all oracles; exit code 1 and the differences if red
    python -m tools.oracles plans schema        these alone
    python -m tools.oracles --update plans      print the differences, then write this oracle anew
    python -m tools.oracles --list              the oracles and the sizes of their files

Regenerate an oracle only in the commit whose purpose changes it, and quote the differences there.
The golden files are in tests/oracles/. Nights use `simulate` over the schedule and not
tests/night: there a driver dies at some call of the store, so any change of the store would change
every command.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import islice
from typing import Any

_MOST_SHOWN = 40  # differences of an oracle
_MOST_OF_A_CASE = 6


_NO_CACHE = os.path.join(tempfile.gettempdir(), "oracles-no-cache")
#: Variables that hide what differs between machines: cards, caches, network, time zone, width.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": _NO_CACHE,
    "NIGHTGRID_CACHE": os.path.join(_NO_CACHE, "nightgrid"),
    "CUDA_VISIBLE_DEVICES": "none",
    "HABANA_VISIBLE_MODULES": "none",
    "HABANA_VISIBLE_DEVICES": "none",
    "COLUMNS": "200",
    "TZ": "UTC",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
}


def settle_environment() -> None:
    """Set ``ENVIRONMENT``, without what would override it; before the product is imported."""
    os.environ |= ENVIRONMENT
    for name in ("RAY_ADDRESS", "NIGHTGRID_RESULTS", "FORCE_COLOR", "HF_HUB_CACHE"):
        os.environ.pop(name, None)
    time.tzset()


def main() -> int:
    """Check or update; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("oracles", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--update", action="append", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    settle_environment()
    from tools.oracles.cases import ORACLES
    from tools.oracles.golden import path_of

    names = [*args.update, *args.oracles] or list(ORACLES)
    if unknown := [name for name in names if name not in ORACLES]:
        parser.error(f"no oracle {', '.join(unknown)}; there are {', '.join(ORACLES)}")
    if args.list:
        for name in names:
            size = path_of(name).stat().st_size if path_of(name).exists() else 0
            print(f"{name:12} {size:9,} bytes  {(ORACLES[name].__doc__ or '').splitlines()[0]}")
        return 0
    red = [name for name in names if not _check(name, update=name in args.update)]
    if red:
        print(f"RED: {', '.join(red)}. If it is meant: python -m tools.oracles --update NAME")
    return bool(red)


def _check(name: str, *, update: bool) -> bool:
    """Print how an oracle differs from its golden file; return whether it is as it should be."""
    from tools.oracles.cases import ORACLES
    from tools.oracles.golden import differences, load, save

    began = time.process_time()
    golden, values = load(name), {}
    shown = count = 0
    for case, compute in ORACLES[name]().items():
        values[case] = compute()
        if case in golden:
            found = list(differences(golden[case], values[case]))
            count += len(found)
            for line in islice(found, min(_MOST_OF_A_CASE, max(0, _MOST_SHOWN - shown))):
                print(f"{name} {case}: {line}")
                shown += 1
            if len(found) > _MOST_OF_A_CASE and shown < _MOST_SHOWN:
                print(f"{name} {case}: ... {len(found) - _MOST_OF_A_CASE} more")
    if changed := sorted({*golden} ^ {*values}):
        count += len(changed)
        print(f"{name}: cases that came or went: {_listed(changed)}")
    state = "green" if not count else f"{count} differences"
    if update:
        save(name, values)
        state += ", written"
    print(f"{name:12} {len(values):4} cases  {time.process_time() - began:5.1f} s CPU  {state}")
    return update or not count


def _listed(names: list[Any]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


if __name__ == "__main__":
    sys.exit(main())
