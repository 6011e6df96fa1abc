"""Things that may lie in the place of a file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.store import disk


def a_directory(path: Path) -> None:
    path.mkdir()
    (path / "x.parquet").write_bytes(b"x")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("this process may not make a device")


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_the_kernel(path: Path) -> None:
    path.symlink_to("/proc/kmsg")


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nothing")


def a_link_up(path: Path) -> None:
    path.symlink_to("..")


def nothing_readable(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


def no_entry(path: Path) -> None:
    a_directory(path)
    path.chmod(0)


def no_search(path: Path) -> None:
    a_directory(path)
    path.chmod(0o444)


def an_empty_file(path: Path) -> None:
    path.write_bytes(b"")


@contextlib.contextmanager
def unreadable(chosen: Callable[[Path], bool], code: int = errno.EMFILE) -> Iterator[None]:
    """Let the store's reads of the chosen files fail within the block."""
    read = disk.read

    def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
        if chosen(path):
            raise OSError(code, os.strerror(code))
        return read(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "read", fail)
        yield


def a_program(path: Path, script: str) -> None:
    """A program of this shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


FILES = (
    *(a_directory, a_pipe, a_socket, a_loop, a_dangling_link, a_link_to_a_device, a_link_up),
    *(a_link_to_the_kernel, nothing_readable, no_entry, no_search, an_empty_file, a_sparse_file),
)
