"""Only directories with our own marker, of a process that has certainly ended, are removed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from workloads.util.processes import (
    MARKER,
    ProcessIdentity,
    abandoned_directories,
    make_owned_directory,
    owned_directory,
    remove_unmarked,
)

ME = ProcessIdentity.of_this_process()
ROOT = Path(__file__).resolve().parents[3]


def ended_process() -> ProcessIdentity:
    code = (
        "import json; from dataclasses import asdict\n"
        "from workloads.util.processes import ProcessIdentity\n"
        "print(json.dumps(asdict(ProcessIdentity.of_this_process())))"
    )
    told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    return ProcessIdentity(**json.loads(told))


DEAD = ended_process()


def marker_of(process: ProcessIdentity, **other: Any) -> dict[str, Any]:
    return {"format": 1, **asdict(process), "owner": "run.i"} | other


def remove_from(base: Path) -> None:
    for directory in abandoned_directories("ng-", base):
        directory.remove()
    remove_unmarked("ng-", base)


def fill(directory: Path) -> None:
    (directory / "rows" / "deep").mkdir(parents=True)
    (directory / "rows" / "part-0.parquet").write_bytes(b"measured")


GOOD = marker_of(DEAD)
#: Markers that vouch for nothing: absent, broken, of a process that may live, or of another host.
BROKEN: dict[str, bytes | None] = {
    "none": None,
    "empty": b"",
    "no text": b"\xff\xfe",
    "too deep": b"[" * 5000,
    "too long": json.dumps(GOOD | {"more": "x" * 5000}).encode(),
    **{f"value {value}": json.dumps(value).encode() for value in (None, 7, [], "x", {})},
    **{
        f"without {gone}": json.dumps({k: v for k, v in GOOD.items() if k != gone}).encode()
        for gone in GOOD
    },
    **{
        f"{name} {value!r}": json.dumps(GOOD | {name: value}).encode()
        for name in GOOD
        for value in (None, True, [1], {"a": 1}, 1.5, -1, 0, *([2**31] if name == "pid" else []))
    },
    "boot of another time": json.dumps(GOOD | {"boot_id": "0" * 36}).encode(),
    "another container": json.dumps(GOOD | {"pid_namespace": "pid:[1]"}).encode(),
    "no container": json.dumps(GOOD | {"pid_namespace": ""}).encode(),
    "alive": json.dumps(marker_of(ME)).encode(),
}


@pytest.mark.parametrize("name", ["ng-2026-11-21-results", "ng-99999999-abc", "ng-", "ng-results"])
def test_only_what_a_whole_marker_vouches_for_is_removed(name: str, tmp_path: Path) -> None:
    for number, content in enumerate([*BROKEN.values(), json.dumps(GOOD).encode()]):
        directory = tmp_path / str(number) / name
        directory.mkdir(parents=True)
        fill(directory)
        if content is not None:
            (directory / MARKER).write_bytes(content)
        remove_from(directory.parent)
    removed = [path for path in tmp_path.iterdir() if not (path / name).exists()]
    assert removed == [tmp_path / str(len(BROKEN))]
    assert len(list(tmp_path.rglob("part-0.parquet"))) == len(BROKEN)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / MARKER).write_text(json.dumps(GOOD))
    remove_from(tmp_path)
    assert (tmp_path / "results").exists()


def test_a_dead_processs_directory_is_removed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from workloads.util.processes import make_owned_directory\n"
        "print(make_owned_directory('ng-', Path(sys.argv[1]), 'run.i').path, flush=True)\n"
        "sys.stdin.read()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    maker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, **pipes)
    with maker:
        assert maker.stdout is not None
        path = Path(maker.stdout.readline().strip())
        fill(path)
        mine = make_owned_directory("ng-", tmp_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        remove_from(tmp_path)
        assert (path / "rows" / "part-0.parquet").exists()  # its maker lives
        maker.kill()
        maker.wait()
    (found,) = abandoned_directories("ng-", tmp_path)
    assert found.path == path and found.owner == "run.i"
    assert abandoned_directories("checkpoints-", tmp_path) == []
    remove_from(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [mine.path.name]
    mine.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "stays"),
    [
        (f"ng-{DEAD.pid}-ab12_xyz", None, False),
        (f"ng-{DEAD.pid}-ab12_xyz", b'{"format": 1, "pid', False),
        (f"ng-{os.getpid()}-ab12_xyz", None, True),
        (f"ng-{DEAD.pid}-results", None, True),
        ("ng-2026-11-21-results", None, True),
    ],
    ids=["empty", "half a marker", "being made", "another name", "a date"],
)
def test_what_was_killed_before_it_had_its_marker_is_removed(name, content, stays, tmp_path):
    (tmp_path / name).mkdir()
    if content is not None:
        (tmp_path / name / MARKER).write_bytes(content)
    remove_from(tmp_path)
    assert (tmp_path / name).exists() == stays


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """Neither a link with our name, nor one in the place of the marker, nor one within."""
    base, theirs = tmp_path / "base", tmp_path / "theirs"
    fill(theirs)
    marker = json.dumps(marker_of(DEAD))
    (theirs / MARKER).write_text(marker)
    for name in ("ng-2-marker", "ng-3-ours"):
        (base / name).mkdir(parents=True)
    (base / "ng-1-link").symlink_to(theirs)
    (base / "ng-2-marker" / MARKER).symlink_to(theirs / MARKER)
    (base / "ng-3-ours" / MARKER).write_text(marker)
    (base / "ng-3-ours" / "rows").symlink_to(theirs)
    remove_from(base)
    assert (theirs / "rows" / "part-0.parquet").read_bytes() == b"measured"
    assert sorted(entry.name for entry in base.iterdir()) == ["ng-1-link", "ng-2-marker"]


def test_a_pipe_as_marker_hangs_nobody(tmp_path: Path) -> None:
    """Opening it would wait for a writer."""
    directory = tmp_path / "ng-1-pipe"
    directory.mkdir()
    os.mkfifo(directory / MARKER)
    assert owned_directory(directory) is None
    assert owned_directory(tmp_path / "none") is None


def test_what_cannot_be_removed_keeps_its_marker(tmp_path: Path) -> None:
    """So that the next one goes on; a removal that was cut short did not lose it either."""
    directory = make_owned_directory("ng-", tmp_path).path
    fill(directory)
    (directory / MARKER).write_text(json.dumps(marker_of(DEAD)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        remove_from(tmp_path)
    assert (directory / MARKER).exists()
    remove_from(tmp_path)
    assert list(tmp_path.iterdir()) == []
