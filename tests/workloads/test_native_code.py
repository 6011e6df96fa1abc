"""C++ made into machine code on the node: once, kept, and never missed by a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from workloads import compiled_code, native_code
from workloads.native_code import COMPILER

_SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compiled_code.DIRECTORY, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def source(directory: Path, text: str = _SOURCE) -> Path:
    """A file of C++ that no process has asked for yet."""
    path = directory / "source.cpp"
    path.write_text(text)
    native_code.native_code.cache_clear()
    return path


def test_code_is_compiled_once_for_a_node(tmp_path: Path, root: Path) -> None:
    """The next process finds it; another source has a directory of its own, and nothing else is
    left behind."""
    first = native_code.native_code(source(tmp_path))
    assert first.library is not None and first.library.answer() == 42
    assert first.compile_s > 0 and not first.lacking
    again = native_code.native_code(source(tmp_path))
    assert again.library is not None and again.compile_s == 0
    other = native_code.native_code(source(tmp_path, _SOURCE.replace("42", "43")))
    assert other.library is not None and other.library.answer() == 43
    assert [[file.name for file in each.iterdir()] for each in root.iterdir()] == [
        ["library.so"],
        ["library.so"],
    ]


@pytest.mark.parametrize(
    ("compiler", "text", "words"),
    [
        ("no-such-compiler", _SOURCE, "no compiler no-such-compiler"),
        ("g++", "no C++ at all", "g++ failed with 1"),
        ("g++ --no-such-option", _SOURCE, "no-such-option"),
    ],
)
def test_a_node_without_code_says_why(
    compiler: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler, one that complains, and one that was asked for what it does not know."""
    monkeypatch.setenv(COMPILER, compiler)
    found = native_code.native_code(source(tmp_path, text))
    assert found.library is None and words in found.lacking


def test_a_compiler_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job goes on without its code after a limit."""
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slow && exit\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setenv(COMPILER, str(slow))
    monkeypatch.setattr(native_code, "LIMIT_S", 0.2)
    found = native_code.native_code(source(tmp_path))
    assert found.library is None and "not done after 0.2 s" in found.lacking


def test_code_is_there_where_no_directory_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compiled anew by each process, no more."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiled_code.DIRECTORY, str(tmp_path / "file" / "below"))
    found = native_code.native_code(source(tmp_path))
    assert found.library is not None and found.library.answer() == 42
