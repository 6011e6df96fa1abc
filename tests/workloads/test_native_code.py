"""C++ made into machine code on the node: once, kept, and never missed by a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import alive, until

from workloads import compiled_code, native_code
from workloads.native_code import COMPILER

_SOURCE = 'extern "C" int answer() { return 42; }\n'
_ASK = """
import sys
from pathlib import Path
from workloads.native_code import native_code
print(native_code(Path(sys.argv[1])).library.answer())
"""


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


def asked_elsewhere(path: Path) -> subprocess.Popen[str]:
    """Another process, which prints the answer of a file's code."""
    return subprocess.Popen(
        [sys.executable, "-c", _ASK, str(path)], stdout=subprocess.PIPE, text=True
    )


def compiler_of(path: Path, lines: str) -> str:
    """A compiler that does these lines, unless it is asked for its version."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo version && exit\n{lines}\n')
    path.chmod(0o755)
    return str(path)


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


def test_processes_that_start_together_compile_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One does, and the other takes what it has made."""
    calls = tmp_path / "calls"
    slow = compiler_of(tmp_path / "slow", f'echo call >> {calls}\nsleep 0.7\nexec g++ "$@"')
    monkeypatch.setenv(COMPILER, slow)
    path = source(tmp_path)
    processes = [asked_elsewhere(path) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["42\n", "42\n"]
    assert calls.read_text().count("call") == 1


def test_code_that_was_cut_off_is_made_anew(tmp_path: Path, root: Path) -> None:
    """As by a power cut; made by another process, since this one would find what it has opened."""
    path = source(tmp_path)
    assert asked_elsewhere(path).communicate()[0] == "42\n"
    (library,) = root.glob("*/library.so")
    library.write_bytes(b"")
    found = native_code.native_code(path)
    assert found.library is not None and found.library.answer() == 42 and found.compile_s > 0


@pytest.mark.parametrize(
    ("compiler", "text", "words"),
    [
        ("no-such-compiler", _SOURCE, "no compiler no-such-compiler"),
        ("g++", "no C++ at all", "g++ failed with 1"),
        ("g++ --no-such-option", _SOURCE, "no-such-option"),
        ("g++ '", _SOURCE, "CXX: No closing quotation"),
        ("sh -c 'printf \"\\351 is wrong\" >&2; exit 3'", _SOURCE, "3: \ufffd is wrong"),
    ],
)
def test_a_node_without_code_says_why(
    compiler: str, text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler, one that complains, also in no known letters, one that was asked for what it
    does not know, and one whose name is no words."""
    monkeypatch.setenv(COMPILER, compiler)
    found = native_code.native_code(source(tmp_path, text))
    assert found.library is None and words in found.lacking


def test_a_compiler_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it has started; a job goes on without its code after a limit."""
    child = tmp_path / "child"
    slow = compiler_of(tmp_path / "slow", f"sleep 60 &\necho $! > {child}\nwait")
    monkeypatch.setenv(COMPILER, slow)
    monkeypatch.setattr(native_code, "LIMIT_S", 1.0)
    found = native_code.native_code(source(tmp_path))
    assert found.library is None and "not done after 1 s" in found.lacking
    pid = int(child.read_text())
    assert until(lambda: not alive(pid), 5.0)


def test_code_is_there_where_no_directory_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compiled anew by each process, no more."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiled_code.DIRECTORY, str(tmp_path / "file" / "below"))
    found = native_code.native_code(source(tmp_path))
    assert found.library is not None and found.library.answer() == 42


def test_a_header_beside_the_source_is_part_of_it(tmp_path: Path) -> None:
    """Code is compiled anew when one changes."""
    header = tmp_path / "answer.h"
    header.write_text("constexpr int ANSWER = 42;\n")
    text = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    first = native_code.native_code(source(tmp_path, text))
    assert first.library is not None and first.library.answer() == 42
    header.write_text("constexpr int ANSWER = 43;\n")
    other = native_code.native_code(source(tmp_path, text))
    assert other.library is not None and other.library.answer() == 43
