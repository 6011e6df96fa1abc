"""Garbage collection while a run is driven: rarer, and not over what was there before.

A run keeps a few hundred objects a job, and none of them is garbage that only a collector finds.
By Python's own settings one full collection, over some 300,000 objects of imported modules, came
for each 1,500 short jobs and took 0.09 s, an eighth of the driver's time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: New objects until the youngest are looked at, and how many such looks make one at the next older.
RARELY = (10_000, 10, 10)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Leave what is there now out of all collections, and collect rarely, until the block ends.

    It is of the whole process: not for one that runs jobs itself, whose tensors may be garbage.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
