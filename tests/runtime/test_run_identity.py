"""The id of a run belongs to one directory: a copy is another run, a move is the same."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_workload
from example_grids import GRID
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import row
from odd_files import a_pipe

from orchestrator.cli.main import main
from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.results import disk, identity, paths
from orchestrator.results.identity import Place, Relation, relation
from orchestrator.results.store import Store
from orchestrator.runtime.earlier import clear_up, owner_of

#: A driver as another program sees it: it holds a run, and starts a worker that outlives it.
DRIVER = """
import subprocess, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from measurements import row
from orchestrator.results.store import Store
from orchestrator.runtime.earlier import owner_of
with Store.open(Path(sys.argv[1]).parent, Path(sys.argv[1]).name) as store:
    with owner_of(store).marks_this_process():
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if store.spill(row(7)) is None:
        sys.exit("no room")
    print(worker.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of rows that find no room, instead of the directories of this host."""
    place = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(
        paths, "spill_directories", lambda run_id: [place / f".nightgrid-unsaved-{run_id}"]
    )
    return place


@contextlib.contextmanager
def working_driver(run: Path) -> Iterator[int]:
    """Another process drives the run and has a worker; the worker's process id."""
    command = [sys.executable, "-c", DRIVER, str(run), str(Path(__file__).parents[1]), *sys.path]
    driver = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdin is not None and driver.stdout is not None
    worker = int(driver.stdout.readline())
    try:
        yield worker
    finally:
        driver.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, 9)
        driver.wait(60)


def is_alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def drive(run: Path, *adopt: str) -> tuple[Store, list[str]]:
    """Do what every driver does before it starts anything; the store, and its words."""
    said: list[str] = []
    with (
        Store.open(run.parent, run.name).adopt(*adopt) as store,
        owner_of(store).marks_this_process(),
    ):
        clear_up(store, said.append)
    return store, said


def open_by_driver(run: Path) -> str:
    """Open the run as a driver does; its id."""
    with Store.open(run.parent, run.name) as store:
        return store.run_id


def copy(run: Path, name: str) -> Path:
    """A copy of a run's directory, of which somebody has deleted the lock."""
    target = run.with_name(name)
    shutil.copytree(run, target, symlinks=True)
    (target / paths.LOCK).unlink(missing_ok=True)
    return target


def spilled(elsewhere: Path) -> list[str]:
    """The run ids under which rows lie elsewhere."""
    found = elsewhere.glob(".nightgrid-unsaved-*/*.json")
    return sorted({path.parent.name.removeprefix(".nightgrid-unsaved-") for path in found})


def test_a_copy_leaves_the_processes_and_rows_of_the_original_alone(
    tmp_path: Path, elsewhere: Path
) -> None:
    """Its driver has an id of its own, and names the rows and the command that adopts them."""
    with working_driver(tmp_path / "night") as worker:
        (old,) = spilled(elsewhere)
        copied, said = drive(copy(tmp_path / "night", "copy"))
        assert is_alive(worker), said
        assert copied.run_id != old and copied.rescued == 0
        assert spilled(elsewhere) == [old]
        told = "\n".join(said)
        assert f"was copied from {tmp_path / 'night'}" in told
        assert f"1 rows of run id {old} found no room" in told
        assert f"--run copy --adopt {old}`" in told
    original, said = drive(tmp_path / "night")
    assert original.run_id == old and original.rescued == 1 and spilled(elsewhere) == []


def test_a_copy_of_a_run_that_is_driven_says_whose_lock_it_has(tmp_path: Path) -> None:
    """Copied with its lock, a run cannot be opened while the original's driver lives."""
    with working_driver(tmp_path / "night"):
        shutil.copytree(tmp_path / "night", tmp_path / "copy")
        with pytest.raises(StoreLocked, match=r"copied.*delete .*copy/driver\.lock"):
            open_by_driver(tmp_path / "copy")
        with pytest.raises(StoreLocked) as refusal:
            open_by_driver(tmp_path / "night")
        assert "copied" not in str(refusal.value)


def test_rows_of_a_directory_that_is_gone_are_adopted_by_its_copy(
    tmp_path: Path, elsewhere: Path
) -> None:
    """When told to, once; as long as the original is there, they are the original's."""
    with Store.open(tmp_path, "night") as store:
        assert store.spill(row(1)) and store.spill(row(2))
        old = store.run_id
    target = copy(tmp_path / "night", "copy")
    with pytest.raises(StoreError, match=f"belong to {tmp_path / 'night'}, which is there"):
        drive(target, old)
    shutil.rmtree(tmp_path / "night")
    assert any(old in note for note in drive(target)[1]), "told at every opening"
    adopted, _ = drive(target, old)
    assert adopted.rescued == 2 and spilled(elsewhere) == [] and adopted.run_id != old
    assert {each.attempt_id for each in adopted.measurements()} == {
        row(1).attempt_id,
        row(2).attempt_id,
    }
    with pytest.raises(StoreError, match=f"no rows of run id {old} on this host"):
        drive(target, old)


@pytest.mark.parametrize("text", ["", "../../etc", "0123456789AB", "0123456789ab\n", "*" * 12])
def test_what_is_no_run_id_is_not_adopted(tmp_path: Path, text: str) -> None:
    """It is refused before a path is made of it."""
    with pytest.raises(StoreError, match="is not a run id"):
        Store.open(tmp_path, "night").adopt(text)


def test_rows_of_another_run_are_not_adopted(tmp_path: Path, elsewhere: Path) -> None:
    """Neither a former id of this run nor rows that bear its name."""
    with Store.open(tmp_path, "other") as store:
        assert store.spill(replace(row(1), run="other"))
        old = store.run_id
    with pytest.raises(StoreError, match="holds a row of run 'other', not of night"):
        drive(tmp_path / "night", old)
    assert spilled(elsewhere) == [old]


@pytest.fixture
def nightgrid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a command in this process; the exit code and what was printed."""
    tiny_workload.register(monkeypatch)
    monkeypatch.delenv("NIGHTGRID_RESULTS", raising=False)
    (tmp_path / "grid.yaml").write_text(GRID)

    def call(*arguments: object) -> tuple[int, str]:
        code = main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


@pytest.mark.slow
def test_the_command_that_is_named_adopts_the_rows(
    nightgrid: Callable[..., tuple[int, str]], tmp_path: Path, elsewhere: Path
) -> None:
    """`nightgrid run --adopt` from the command line; a job whose row it adopts is not run again."""
    results = ("--results", tmp_path / "results", "--in-process")
    assert nightgrid("run", tmp_path / "grid.yaml", *results)[0] == 0
    done = Store.existing(tmp_path / "results", "tiny-run")
    rows = done.measurements()
    for path in done.tables_path.iterdir():
        path.unlink()
    with done:
        assert done.spill(rows[0])
        old = done.run_id
    _, said = drive(copy(done.path, "copy"))
    shutil.rmtree(done.path)
    command = said[-1].partition("`nightgrid ")[2].partition("`")[0].split()
    assert command[-2:] == ["--adopt", old]
    code, output = nightgrid(*command, "--in-process")
    assert code == 0 and spilled(elsewhere) == [], output
    after = Store.existing(tmp_path / "results", "copy").measurements()
    assert len(after) == 2 and rows[0].attempt_id in {
        each.attempt_id for each in after if each.invocation_id == rows[0].invocation_id
    }
    assert nightgrid("run", "--resume", *results, "--adopt", "no-id") == (
        4,
        "nightgrid run: 'no-id' is not a run id, which has 12 hexadecimal digits\n",
    )


# ---------------------------------------------------------------- what the same directory is

HERE = Place(path="/r/night", device=5, inode=77, filesystem=9, host="a", boot_id="b1")


@pytest.mark.parametrize(
    ("change", "there", "expected"),
    [
        pytest.param({}, False, Relation.SAME, id="as it was"),
        pytest.param({"path": "/r/other"}, False, Relation.MOVED, id="renamed"),
        pytest.param({"path": "/r/other"}, True, Relation.MOVED, id="renamed, copied back"),
        pytest.param({"boot_id": "b2"}, False, Relation.SAME, id="rebooted"),
        pytest.param({"device": 6}, False, Relation.SAME, id="remounted"),
        pytest.param(
            {"device": 6, "filesystem": 10, "boot_id": "b2"},
            False,
            Relation.REMOUNTED,
            id="rebooted, and the file system's id is made from its device number (XFS)",
        ),
        pytest.param({"device": 6, "path": "/m"}, False, Relation.MOVED, id="mounted elsewhere"),
        pytest.param({"device": 6, "path": "/m"}, True, Relation.COPIED, id="a snapshot"),
        pytest.param(
            {"device": 6, "filesystem": 10, "path": "/m"},
            False,
            Relation.COPIED,
            id="another file system, the same inode number by chance",
        ),
        pytest.param(
            {"device": 40, "host": "c", "boot_id": "x"}, False, Relation.OTHER_HOST, id="on NFS"
        ),
        pytest.param(
            {"device": 40, "host": "c", "boot_id": "x", "filesystem": 11},
            False,
            Relation.COPIED,
            id="copied to another host, the same inode number by chance",
        ),
        pytest.param({"inode": 78, "path": "/r/copy"}, True, Relation.COPIED, id="copied"),
        pytest.param({"inode": 78}, False, Relation.COPIED, id="restored in its place"),
        pytest.param({"inode": 78, "path": "/r/copy"}, False, Relation.COPIED, id="original gone"),
        pytest.param({"inode": 78, "device": 6}, False, Relation.COPIED, id="moved across disks"),
        pytest.param({"inode": 78, "host": "c"}, False, Relation.COPIED, id="copied by rsync"),
    ],
)
def test_how_a_directory_stands_to_the_recorded_one(
    change: dict[str, object], there: bool, expected: Relation
) -> None:
    """One line for each way in which a directory can be found again."""
    here = replace(HERE, **change)  # type: ignore[arg-type]
    assert relation(HERE, here, original_is_there=there) is expected


#: What people do to directories: open a run, copy, rename or delete it, under four names.
_NAMES = st.sampled_from(["a", "b", "c", "d"])
_DEEDS = st.lists(
    st.tuples(st.sampled_from(["open", "open", "copy", "move", "delete"]), _NAMES, _NAMES),
    min_size=3,
    max_size=14,
)


@settings(max_examples=60)
@given(deeds=_DEEDS)
def test_two_directories_never_have_one_id(deeds: list[tuple[str, str, str]]) -> None:
    """Whatever was copied and renamed before, and in whatever order they are opened; and a
    directory keeps its id under any name."""
    with tempfile.TemporaryDirectory() as root:
        ids: dict[int, str] = {}  # of directories that a driver has opened, by inode
        for deed, name, other in deeds:
            run, target = Path(root, name), Path(root, other)
            if deed == "open":
                found = open_by_driver(run)
                inode = run.stat().st_ino
                assert found == ids.get(inode, found), "it kept its id"
                assert found not in {known for at, known in ids.items() if at != inode}
                ids[inode] = found
            elif deed == "delete" and run.is_dir():
                ids.pop(run.stat().st_ino, None)
                shutil.rmtree(run)
            elif run.is_dir() and not target.exists():
                shutil.copytree(run, target) if deed == "copy" else run.rename(target)
            there = {each.stat().st_ino for each in Path(root).iterdir()}
            ids = {inode: known for inode, known in ids.items() if inode in there}


def test_a_moved_run_keeps_its_id_and_gets_its_rows(tmp_path: Path, elsewhere: Path) -> None:
    """Renamed, or with another device number after a reboot, it is the same run."""
    with Store.open(tmp_path, "night") as store:
        old = store.run_id
        assert store.spill(row(1))
    (tmp_path / "further").mkdir()
    moved = (tmp_path / "night").rename(tmp_path / "further" / "renamed")
    id_file = moved / "run.id"
    head, record = id_file.read_text().splitlines()
    detail = json.loads(record)
    detail["place"] |= {"device": detail["place"]["device"] + 1, "boot_id": "before"}
    id_file.write_text(f"{head}\n{json.dumps(detail)}\n")
    found, said = drive(moved)
    assert found.run_id == old and found.rescued == 1 and spilled(elsewhere) == []
    assert found.notes == () and said == ["recovered 1 row spilled to another disk"]
    assert json.loads(id_file.read_text().splitlines()[1])["place"]["path"] == str(moved)


def test_a_run_on_another_file_system_has_its_rows_named(tmp_path: Path, elsewhere: Path) -> None:
    """It cannot be told from a copy: one command brings its rows."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    with Store.open(tmp_path, "night") as store:
        old = store.run_id
        assert store.spill(row(1))
    with tempfile.TemporaryDirectory(dir=memory) as other:
        moved = Path(shutil.move(tmp_path / "night", other))
        found, said = drive(moved)
        assert found.run_id != old and any(f"--adopt {old}`" in line for line in said)
        assert drive(moved, old)[0].rescued == 1


# ---------------------------------------------------------------- what lies in the place of an id


def _link(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_text("0123456789ab\n")
    path.symlink_to(outside)


def _with_record(**changes: object) -> Callable[[Path], None]:
    place = {"path": "/r", "device": 1, "inode": 1, "filesystem": 1, "host": "h", "boot_id": "b"}
    detail = {"place": place | changes, "former": []}
    return lambda path: path.write_text("0123456789ab\n" + json.dumps(detail)) and None


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: p.write_text("../.."), id="leads out"),
        pytest.param(lambda p: p.write_text("/etc"), id="a path"),
        pytest.param(lambda p: p.write_text(""), id="empty"),
        pytest.param(lambda p: p.write_text("\n\n"), id="blank"),
        pytest.param(lambda p: p.write_text("0"), id="short: would match others' ids"),
        pytest.param(lambda p: p.write_text("."), id="a pattern that matches all"),
        pytest.param(lambda p: p.write_text("0123456789AB"), id="upper case"),
        pytest.param(lambda p: p.write_bytes(bytes(range(256)) * 4), id="binary"),
        pytest.param(lambda p: p.write_text("ab" * 2**20), id="huge"),
        pytest.param(lambda p: p.touch() or os.truncate(p, 2**40), id="a terabyte of zeros"),
        pytest.param(lambda p: p.write_text("0123456789ab\n" + "[" * 40_000), id="deep JSON"),
        pytest.param(lambda p: p.write_text("0123456789ab\n{}"), id="an empty record"),
        pytest.param(lambda p: p.write_text("0123456789ab\n\x1b[2J"), id="escape sequences"),
        pytest.param(_with_record(inode=10**400), id="an inode of 400 digits"),
        pytest.param(_with_record(inode=True), id="an inode of another type"),
        pytest.param(_with_record(path="/a\0b"), id="a path that no system call takes"),
        pytest.param(_with_record(path="x" * 5000), id="a long path"),
        pytest.param(lambda p: p.mkdir(), id="a directory"),
        pytest.param(a_pipe, id="a pipe"),
        pytest.param(_link, id="a link"),
        pytest.param(lambda p: p.symlink_to("/dev/zero"), id="a link to a device"),
        pytest.param(lambda p: p.symlink_to(p), id="a link to itself"),
    ],
)
def test_what_is_no_id_is_set_aside(
    tmp_path: Path, elsewhere: Path, make: Callable[[Path], object]
) -> None:
    """The run gets an id, and says what it found; nothing is read from or written to elsewhere."""
    run = tmp_path / "night"
    run.mkdir()
    make(run / "run.id")
    found, said = drive(run)
    assert identity.is_run_id(found.run_id)
    assert [path.name for path in found.quarantine_path.iterdir()] == ["run.id"]
    assert len(said) == 1 and f"{run / 'run.id'} held no run id" in said[0]
    assert said[0].isprintable() and len(said[0]) < 1000
    again, said = drive(run)
    assert again.run_id == found.run_id and said == []
    assert list(elsewhere.iterdir()) == []
    if (outside := tmp_path / "outside").exists():
        assert outside.read_text() == "0123456789ab\n"


def test_an_id_that_cannot_be_read_for_a_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new one the run would find neither its spilled rows nor the processes it left."""
    with Store.open(tmp_path, "night") as store:
        before = store.run_id
        assert store.spill(row(3)) is not None
    read = disk.read

    def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
        if path.name == paths.RUN_ID:
            raise OSError(errno.EMFILE, "Too many open files")
        return read(path, *arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(disk, "read", fail)
        with pytest.raises(StoreError, match=r"run\.id cannot be read now: Too many open files"):
            store.__enter__()
    with store:
        assert store.run_id == before and store.rescued == 1


def test_a_record_that_names_a_hostile_place_is_only_a_copy(tmp_path: Path) -> None:
    """The path in it is looked at and shown, and nothing else is done with it."""
    run = tmp_path / "night"
    run.mkdir()
    for path in ("/dev/zero", "/proc/self/fd/0", "\x1b[2Jpath", "relative", "", "x" * 4000):
        _with_record(path=path, host=identity.place_of(run).host)(run / "run.id")
        found, said = drive(run)
        assert identity.is_run_id(found.run_id) and found.run_id != "0123456789ab"
        assert all(line.isprintable() and len(line) < 1000 for line in said)


# ---------------------------------------------------------------- version 0.1.0


def plain(run: Path) -> Path:
    """Make the run one of version 0.1.0, whose id had no record of its directory."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.id").write_text("0123456789ab\n")
    return run


def test_the_plain_id_of_an_older_version_is_bound_when_it_is_opened(
    tmp_path: Path, elsewhere: Path
) -> None:
    """It stays, its rows come home, and copies that are made from then on are recognised."""
    run = plain(tmp_path / "night")
    with Store.open(tmp_path, "scratch") as scratch:
        assert scratch.spill(row(1))
    (elsewhere / f".nightgrid-unsaved-{scratch.run_id}").rename(
        elsewhere / ".nightgrid-unsaved-0123456789ab"
    )
    found, _ = drive(run)
    assert found.run_id == "0123456789ab" and found.rescued == 1
    assert open_by_driver(copy(run, "copy")) != "0123456789ab"
    assert open_by_driver(run) == "0123456789ab"


def test_of_two_copies_of_an_older_version_one_gets_a_new_id(tmp_path: Path) -> None:
    """In one results directory, which of them is the copy cannot be told; the rows are named."""
    plain(tmp_path / "night"), plain(tmp_path / "copy")
    first, said = drive(tmp_path / "night")
    assert "runs night and copy have the same run id" in said[0]
    assert {first.run_id, open_by_driver(tmp_path / "copy")} == {first.run_id, "0123456789ab"}
    assert first.run_id != "0123456789ab"
