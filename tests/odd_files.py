"""Things that may lie in the place of a file."""

from __future__ import annotations

import os
from pathlib import Path


def a_directory(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_the_kernel(path: Path) -> None:
    path.symlink_to("/proc/kmsg")


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)
