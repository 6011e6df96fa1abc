"""The files beside a run's rows that are only looked at, and room for the last of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from orchestrator.core.errors import StoreFull
from orchestrator.results import disk, fragments, paths

_RESERVE_BYTES = 64 * 2**10


class SideFiles:
    """Reports, status and such of one run: replaced in one step, and not synced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, content: str | bytes) -> Path:
        """Replace a file, if need be in the room that was reserved.

        Raises:
            StoreError: the name could lead out of the directory, or writing fails.
        """
        fragments.valid_name(name, "file name")
        data = content.encode() if isinstance(content, str) else content
        disk.make_directory(self._directory)
        try:
            return fragments.replace_file(self._directory, name, data)
        except StoreFull:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(self._reserve)
            return fragments.replace_file(self._directory, name, data)

    def make_reserve(self) -> None:
        """Reserve some space, so that ``status.json`` can still report a disk that gets full.

        Raises:
            StoreFull: there is none.
            StoreError: it cannot be written.
        """
        if not disk.is_there(self._reserve):
            fragments.replace_file(self._directory, self._reserve.name, bytes(_RESERVE_BYTES))

    def remove_reserve(self) -> None:
        """Give the space back."""
        with contextlib.suppress(OSError):
            disk.remove(self._reserve)

    @property
    def _reserve(self) -> Path:
        return self._directory / paths.RESERVE
