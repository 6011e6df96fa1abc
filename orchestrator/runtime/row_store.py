"""The store as the driver's loop sees it."""

from __future__ import annotations

from typing import Protocol

from orchestrator.core.measurement import Measurement
from orchestrator.results.notes import Note


class RowStore(Protocol):
    """``Store`` as the loop sees it."""

    def begin(self, *notes: Note) -> object:
        """Note that attempts start, so that they have rows should this process die.

        Raises:
            StoreLocked: another driver has taken the run.
        """

    def append(self, *measurements: Measurement) -> object:
        """Write rows, all or none; they are durable on return.

        Raises:
            StoreFull: no space is left.
            StoreLocked: another driver has taken the run.
        """

    def to_parquet(self) -> object:
        """Put the rows that were appended where any reader finds them.

        Raises:
            StoreError: it cannot be done now; they are as safe as before.
        """

    def make_reserve(self) -> object:
        """See that there is room for more than a row; raises StoreFull if not."""

    def write_file(self, name: str, content: bytes) -> object:
        """Write a file beside the rows.

        Raises:
            StoreError: it cannot be written.
        """

    def spill(self, measurement: Measurement) -> object | None:
        """Write a row elsewhere on this host, and say where; None if it cannot be."""
