"""Only directories with our own marker, of a process that has certainly ended, are removed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.worker import orphans
from orchestrator.worker.orphans import remove_abandoned
from workloads.util.processes import (
    MARKER,
    ProcessIdentity,
    abandoned_directories,
    make_owned_directory,
    owned_directory,
    remove_unmarked,
    started_ticks,
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


names = st.one_of(
    st.sampled_from(["ng-2026-11-21-results", "ng-1-x", "ng-99999999-abc", "ng-", "ng-results"]),
    st.from_regex(r"ng-[0-9]{1,8}-[a-z0-9_]{1,8}", fullmatch=True),
    st.from_regex(r"[a-z.-]{1,12}", fullmatch=True).filter(lambda name: name not in (".", "..")),
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
broken_markers = st.one_of(
    st.none(),  # no marker at all
    st.binary(max_size=200),
    junk.map(lambda value: json.dumps(value).encode()),
    # one field of a good marker replaced or left out
    st.tuples(st.sampled_from([*asdict(DEAD), "format", "owner"]), junk).map(
        lambda change: json.dumps(marker_of(DEAD, **{change[0]: change[1]})).encode()
    ),
    st.sampled_from([*asdict(DEAD), "format", "owner"]).map(
        lambda name: json.dumps({k: v for k, v in marker_of(DEAD).items() if k != name}).encode()
    ),
    st.sampled_from(
        [
            json.dumps(marker_of(process)).encode()
            for process in (
                ME,
                replace(DEAD, pid_namespace="pid:[1]"),
                replace(DEAD, boot_id="00000000-0000-0000-0000-000000000000"),
                replace(DEAD, pid_namespace=""),
                replace(DEAD, pid=-1),
                replace(DEAD, pid=0),
                replace(DEAD, pid=2**31),
            )
        ]
        + [b"[" * 5000, json.dumps(marker_of(DEAD, more="x" * 5000)).encode()]
    ),
)


def vouches(content: bytes | None) -> bool:
    """Return whether a marker names a process of this boot and pid namespace that has ended."""
    try:
        values = json.loads(content or b"")
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict) or len(content or b"") > 4096:
        return False
    kinds = {"format": int, "pid": int, "started_ticks": int, "owner": str}
    if any(type(values.get(name)) is not kind for name, kind in kinds.items()):
        return False
    if (values["format"], values.get("boot_id")) != (1, ME.boot_id):
        return False
    pid, ticks = values["pid"], values["started_ticks"]
    possible = 0 < pid < 2**31 and ticks > 0 and values.get("pid_namespace") == ME.pid_namespace
    return possible and started_ticks(pid) != ticks


@settings(max_examples=40, deadline=None)  # of all kinds that are listed
@given(name=names, content=broken_markers)
@example(name="ng-2026-11-21-results", content=None)
@example(name="ng-1-x", content=b"")
@example(name="ng-results", content=json.dumps(marker_of(DEAD)).encode())
@example(name="results", content=json.dumps(marker_of(DEAD)).encode())
def test_only_what_a_whole_marker_vouches_for_is_removed(name: str, content: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as base:
        directory = Path(base) / name
        directory.mkdir()
        fill(directory)
        if content is not None:
            (directory / MARKER).write_bytes(content)
        remove_from(Path(base))
        if vouches(content) and name.startswith("ng-"):
            assert not directory.exists()
        else:
            assert (directory / "rows" / "part-0.parquet").read_bytes() == b"measured"


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
def test_what_was_killed_before_it_had_its_marker_is_removed(
    name: str, content: bytes | None, stays: bool, tmp_path: Path
) -> None:
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


def test_the_start_of_a_cluster_leaves_other_peoples_directories_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that were given a name like ours, and a directory of another container."""
    monkeypatch.setattr(orphans, "base_directories", lambda: [tmp_path])
    names = ("ng-2026-11-21-results", "ng-7-abcdefgh", "ng-8-abcdefgh")
    for name in names:
        fill(tmp_path / name)
    other_container = replace(DEAD, pid_namespace="pid:[4026532999]")
    for name, process in zip(names[1:], (other_container, DEAD), strict=True):
        (tmp_path / name / MARKER).write_text(json.dumps(marker_of(process)))
    remove_abandoned()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(names[:2])
    for name in names[:2]:
        assert (tmp_path / name / "rows" / "part-0.parquet").read_bytes() == b"measured"
