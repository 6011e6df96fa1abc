"""Replicates of a cell: an order drawn by a seed, fresh processes, and different cards.

What differs from one process to the next (memory layout, autotuned kernels, clocks) shows in no
repeat within a process, so ``replicates: N`` starts a job N times. Three rules keep replicates
independent. A process serves one replicate number only: it may run many cells of that replicate,
and keeps its model loaded for them, but never two replicates of a cell. The order of cells within a
loaded model, and of models, is drawn by a seed that the run keeps (a randomised block design: R. A.
Fisher, The Design of Experiments, 1935), so that a drift over the night falls on no cell alone. And
a cell goes to a card that it has not been on, where there is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from orchestrator.core.job import Job


def drawn(seed: int, name: str) -> float:
    """A number from 0 to 1 that follows from the seed and the name alone: a run that is resumed
    draws the same order for what is left of it."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def replicated_cells(jobs: Iterable[Job]) -> frozenset[str]:
    """Ids of the cells that have more than one replicate."""
    return frozenset(job.cell_id for job in jobs if job.replicate > 1)
