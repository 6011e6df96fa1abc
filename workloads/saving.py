"""The identity of what a job has saved under a name, as plans and workers compare it. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Saving(NamedTuple):
    """The attempt that saved what has a name now; empty where its note does not say."""

    saved_by: str = ""  # ids of the run and the job (``Request.saved_by``)
    attempt: int = 0  # its number; 0 in notes of earlier versions

    @property
    def identity(self) -> str:
        """No two savings have the same; "" where it is not known."""
        return f"{self.saved_by}-{self.attempt}" if self.saved_by and self.attempt else ""
