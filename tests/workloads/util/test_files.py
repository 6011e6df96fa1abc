"""Files from elsewhere: pipes, devices, kernel files, huge files and links are refused at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_files import a_directory, a_link_to_a_device, a_pipe, a_socket, a_sparse_file

from workloads.util import files

ODD: dict[str, Callable[[Path], None]] = {
    "a pipe": a_pipe,
    "a socket": a_socket,
    "a directory": a_directory,
    "a device": a_link_to_a_device,
    "larger than 16 MiB": a_sparse_file,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("linked", [False, True])
def test_readers_refuse_what_is_no_file_or_too_large(tmp_path, what, linked) -> None:
    path = tmp_path / "it"
    ODD[what](path)
    if linked:
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "it")
    with pytest.raises(OSError, match=what) as refused:
        files.read_bytes(path)
    assert refused.value.filename == str(path)
    if "larger" not in what:
        with pytest.raises(OSError, match=what), files.opened(path):
            pass


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["/proc/kmsg", "/proc/self/pagemap", "/proc/self/mem"])
def test_files_of_the_kernel_are_refused(name: str) -> None:
    """They call themselves ordinary and empty, and never end, or wait for messages."""
    if not os.path.exists(name):
        pytest.skip("not there on this system")
    with pytest.raises(OSError, match="file of the kernel"):
        files.read_bytes(name)


@given(content=st.binary(max_size=300), limit=st.integers(0, 300))
def test_a_file_is_read_whole_or_refused(tmp_path_factory, content, limit) -> None:
    path = tmp_path_factory.mktemp("files") / "it"
    path.write_bytes(content)
    if len(content) > limit:
        with pytest.raises(OSError, match="larger than"):
            files.read_bytes(path, limit_bytes=limit)
    else:
        assert files.read_bytes(path, limit_bytes=limit) == content


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is not a file name"):
        files.read_bytes(f"{tmp_path}/a\0b")


@pytest.mark.parametrize("how", [os.symlink, os.link])
def test_what_is_created_takes_a_planted_link_s_place(tmp_path, how) -> None:
    target, planted = tmp_path / "target", tmp_path / "planted"
    target.write_text("precious")
    how(target, planted)
    handle = files.create(planted)
    os.write(handle, b"ours")
    os.close(handle)
    assert target.read_text() == "precious"
    assert planted.read_text() == "ours" and not planted.is_symlink()


@pytest.mark.timeout(20)
def test_nothing_is_appended_to_a_link_or_a_pipe(tmp_path: Path) -> None:
    target, planted = tmp_path / "target", tmp_path / "planted"
    planted.symlink_to(target)
    for _ in range(2):
        with pytest.raises(OSError, match="a symbolic link"):
            files.open_to_append(planted)
        target.write_text("precious")
    assert target.read_text() == "precious"
    for reader in (None, threading.Thread(target=(tmp_path / "pipe").read_bytes, daemon=True)):
        if reader is None:
            os.mkfifo(tmp_path / "pipe")
        else:
            reader.start()
        with pytest.raises(OSError, match="a pipe"):
            files.open_to_append(tmp_path / "pipe")


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.open_to_append(tmp_path / "log", create=False)
    for _ in range(2):
        handle = files.open_to_append(tmp_path / "log")
        os.write(handle, b"line\n")
        os.close(handle)
    assert (tmp_path / "log").read_text() == "line\nline\n"
