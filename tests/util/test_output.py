"""No output of ours ends anything: on full disks, closed descriptors, or with nobody reading."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_grids import GRID
from hypothesis import given
from hypothesis import strategies as st
from small_disks import fill, small_disk

from orchestrator.core.job import State
from orchestrator.store.store import Store
from orchestrator.util import output
from orchestrator.util.output import GuardedFile, OutputFailed, guarded, visible, visible_json
from orchestrator.watch.live import PlainView

ROOM = 64 * 1024
MAIN = """\
import sys, pytest, tiny_workload
from orchestrator.cli.main import main
tiny_workload.register(pytest.MonkeyPatch())
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", ROOM) as mounted:
        yield mounted


def nightgrid(
    *arguments: str, shell: str, cwd: Path, main: str = MAIN
) -> subprocess.CompletedProcess[str]:
    """Run the program with its output sent where a shell's redirection says."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", main, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=240,
    )


def test_what_is_lost_on_a_full_disk_is_told_once_there_is_room(disk: Path) -> None:
    log = disk / "log"
    with log.open("w") as stream:
        out = guarded(stream)
        print("first", file=out, flush=True)
        ballast = fill(disk)
        for number in range(2000):
            print(f"line {number} of those that find no room at all", file=out, flush=True)
        assert output.loss(out) is not None
        ballast.unlink()
        for number in range(3):
            print(f"after {number}", file=out, flush=True)
    lines = [line for line in log.read_text().splitlines() if "find no room" not in line]
    told = [line for line in lines if line.startswith("[")]
    assert lines[0] == "first" and lines[-3:] == ["after 0", "after 1", "after 2"]
    assert len(told) == 1 and "bytes of output lost from" in told[0]
    assert "No space left on device" in told[0]
    kept = sum(len(line) + 1 for line in log.read_text().splitlines() if "find no room" in line)
    whole = sum(len(f"line {n} of those that find no room at all\n") for n in range(2000))
    assert int(told[0][1:].split()[0].replace(",", "")) in range(
        whole - kept - 60, whole - kept + 2
    )


def test_a_reader_that_goes_and_one_that_stops_reading_cost_nothing() -> None:
    read, write = os.pipe()
    out = guarded(os.fdopen(write, "w"), patience_s=0.2)
    for _ in range(20_000):
        print("a line of a run that goes on while nobody reads", file=out, flush=True)
    lost = output.loss(out)
    assert lost is not None and lost.strerror == "its reader is too slow"
    seen = b""
    while b"bytes of output lost" not in seen:  # it reads again
        seen += os.read(read, 1 << 16)
        print("reading again", file=out, flush=True)
    os.close(read)
    for _ in range(3):
        print("nobody is there", file=out, flush=True)
    assert isinstance(output.loss(out), BrokenPipeError)


@pytest.mark.parametrize("working", [True, False])
def test_a_command_waits_for_its_reader_and_a_run_does_not(
    working: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "READER_S", 0.05)
    text = "x" * (1 << 18)  # more than a pipe holds
    seen: list[bytes] = []
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        late = threading.Timer(5 if working else 0.5, lambda: seen.append(reader.read(len(text))))
        late.start()
        with output.standard_streams(working=working):
            print(text, flush=True)
            lost = output.loss(sys.stdout)
        late.cancel()
        late.join()
    if working:
        assert lost is not None and lost.strerror == "its reader is too slow"
    else:
        assert lost is None and seen == [text.encode()]


def test_strict_output_says_so_once_and_is_silent_then() -> None:
    with open("/dev/full", "w") as full:
        out = guarded(full, strict=True)
        with pytest.raises(OutputFailed, match="No space left"):
            print("product", file=out, flush=True)
        print("more of it", file=out, flush=True)
        out.close()
        view = PlainView(full)  # ``nohup nightgrid run … > night.log`` on a full disk
        view.line("still measuring")


def test_no_write_ever_raises(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        out = guarded(stream)
        print("é ✓ \udcff", file=out, flush=True)
    assert (tmp_path / "log").read_text() == "\\xe9 \\u2713 \\udcff\n"
    raw = GuardedFile(os.fdopen(os.dup(1), "w", closefd=False))
    os.close(raw.fileno())
    assert raw.write(b"lost") == 4 and raw.lost_bytes == 4
    assert guarded(None).write("x") == 1
    text = io.StringIO()
    assert guarded(text) is text
    text.close()
    output.say("closed", text)


@given(pieces=st.lists(st.text(), max_size=8))
def test_a_guarded_stream_passes_on_every_byte(pieces: list[str]) -> None:
    expected = "".join(pieces).encode("utf-8", "backslashreplace")
    with tempfile.TemporaryFile("w", encoding="utf-8") as stream:
        out = guarded(stream)
        for piece in pieces:
            out.write(piece)
        out.flush()
        assert os.pread(stream.fileno(), len(expected) + 1, 0) == expected


@pytest.mark.slow
def test_a_run_measures_all_whatever_becomes_of_its_output(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    done = nightgrid("run", "grid.yaml", "--in-process", shell="<&- 2>&- > >(exit 0)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = Store.existing(tmp_path / "results", "tiny-run").measurements()
    assert [row.state for row in rows] == [State.SUCCEEDED] * 2
    assert (tmp_path / "results/tiny-run/report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shell", "code", "error"),
    [
        ("schema", "> /dev/full", 4, "standard output cannot be written: No space left on device"),
        ("schema --json results", "> /dev/full", 4, "No space left on device"),
        ("--help", "> /dev/full", 4, "No space left on device"),
        ("plan missing.yaml", "2> /dev/full", 2, ""),
        ("schema", ">&-", 0, ""),
        ("schema results", "> >(exit 0)", 0, ""),
    ],
)
def test_commands_whose_product_is_their_output_say_when_it_is_lost(
    tmp_path: Path, arguments: str, shell: str, code: int, error: str
) -> None:
    main = "import sys\nfrom orchestrator.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = nightgrid(*arguments.split(), shell=shell, cwd=tmp_path, main=main)
    assert done.returncode == code, done.stderr
    assert error in done.stderr
    assert len(done.stderr.splitlines()) == (1 if error else 0)


def test_nothing_is_printed_into_a_file_that_got_a_closed_descriptor(tmp_path: Path) -> None:
    """A file opened by a program without standard output would become its standard output."""
    code = (
        "import os, sys\nfrom orchestrator.util import output\n"
        "with output.standard_streams(working=True):\n"
        "    opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "    assert opened > 2\n"
        "    os.write(1, b'what a library prints')\n"
        "    print('and what we print', flush=True)\n"
    )
    done = nightgrid(str(tmp_path / "lock"), shell=">&- 2>&- <&-", cwd=tmp_path, main=code)
    assert done.returncode == 0
    assert (tmp_path / "lock").read_bytes() == b""


HOSTILE = "a\x1b[2J\x9b1m\x07\r\x00\x7f\u202eb\u2028\u2066\ufeff\U000e0041c"


@given(text=st.text() | st.text(alphabet=HOSTILE))
def test_visible_json_says_the_same(text: str) -> None:
    told = visible_json(json.dumps({text: [text]}, ensure_ascii=False, indent=1))
    assert json.loads(told) == {text: [text]}
    assert visible(told) == told


def test_what_python_and_libraries_say_of_errors_is_visible(tmp_path: Path) -> None:
    code = (
        "import logging, sys, threading\nfrom orchestrator.util import output\n"
        f"hostile = {HOSTILE!r}\n"
        "def fail():\n    raise ValueError(hostile)\n"
        "with output.standard_streams(working=True):\n"
        "    logging.getLogger('nightgrid.store').warning('not read: %s', hostile)\n"
        "    thread = threading.Thread(target=fail)\n    thread.start()\n    thread.join()\n"
        "    fail()\n"
    )
    done = nightgrid(shell="", cwd=tmp_path, main=code)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a\\x1b[2J") == 2 and "not read: a\\x1b" in done.stderr
    assert visible(done.stderr) == done.stderr


def test_tables_show_control_characters() -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = output.console(out, width=200, color_system=None)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(Text(HOSTILE))
    for each in (table, Text(HOSTILE), Panel(HOSTILE, title=HOSTILE), HOSTILE):
        console.print(each, markup=False)
    assert out.getvalue().count("\\x1b[2J") == 7
    assert visible(out.getvalue()) == out.getvalue()
