"""Products that jobs keep under a name for others: models, adapters, calibrations. No torch here.

A name may come to stand for something else, when a job saves it anew. What was loaded or measured
before that is of another product. The note beside a product tells by identity, not by moments,
which clocks and copies make wrong: a training of hours would be run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from workloads.models.saved import ATTEMPT, PRODUCT_ROOTS, SAVED_BY, origin_of, product_root


class Saving(NamedTuple):
    """The attempt that saved what has a name now; empty where its note does not say."""

    saved_by: str = ""  # ids of the run and the job (``Request.saved_by``)
    attempt: int = 0  # its number; 0 in notes of earlier versions

    @property
    def identity(self) -> str:
        """No two savings have the same; "" where it is not known."""
        return f"{self.saved_by}-{self.attempt}" if self.saved_by and self.attempt else ""


def saving_of(kind: str, name: object) -> Saving:
    """The saving of what has a name now, as far as anything of it is known on this machine."""
    if kind not in PRODUCT_ROOTS or not isinstance(name, str):
        return Saving()
    note = origin_of(product_root(kind) / Path(name).expanduser())
    attempt = note.get(ATTEMPT)
    return Saving(str(note.get(SAVED_BY, "")), attempt if isinstance(attempt, int) else 0)
