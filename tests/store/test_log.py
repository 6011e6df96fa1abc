"""The log of rows and the attempt journal: what rots in them takes nothing else along."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import from_table, journal_row, numbers, row
from odd_files import unreadable
from patience import patience
from store_processes import CONTEXT, Killed, log_rows

from orchestrator.core.errors import SchemaMismatch, StoreError, StoreLocked
from orchestrator.store import disk, reader, schema
from orchestrator.store import files as run_files
from orchestrator.store.codec import row_of
from orchestrator.store.log import AttemptJournal, RowLog, line_with, lines_in, read_journal
from orchestrator.store.store import Store

LINES = [line_with(row_of(row(number))) for number in range(3)]
IDS = [row(number).attempt_id for number in range(3)]


def sound(data: bytes) -> list[str]:
    return [str(line.row["attempt_id"]) for line in lines_in(data) if line.row is not None]


def in_files(store: Store) -> list[int]:
    files = sorted(store.tables_path.glob("*.parquet"))
    sizes = [size for file in files for size in pq.read_table(file)["batch_size"].to_pylist()]
    return sorted(size - 1 for size in sizes)


def killed() -> None:
    raise Killed


def away(*_: object) -> None:
    raise OSError(errno.EIO, "away for a moment")


# ---------------------------------------------------------------- lines


def test_a_log_torn_at_any_byte_keeps_every_line_before_it() -> None:
    """A torn line is no damage: nobody was told that it is safe."""
    data = b"".join(LINES)
    ends = [0, *itertools.accumulate(map(len, LINES))]
    for length in range(0, len(data) + 1, 7):
        whole = sum(length >= end for end in ends) - 1
        assert sound(data[:length]) == IDS[:whole]
        assert all(line.row is not None for line in lines_in(data[:length]))


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_its_line(at: int, bit: int) -> None:
    data = bytearray(b"".join(LINES))
    data[at % len(data)] ^= 1 << bit
    found = sound(bytes(data))
    assert set(found) <= set(IDS) and len(found) >= 1
    torn = not bytes(data).endswith(b"\n")  # the end of the last line went
    assert torn or any(line.row is None for line in lines_in(bytes(data)))


@pytest.mark.parametrize(
    "text",
    [b"5", b"[]", b"{}", b"null", b"{", b"[" * 100_000, b'{"schema_version": "1"}', b"\xff"],
    ids=lambda text: text[:12].decode("ascii", "replace"),
)
def test_json_that_is_no_row_is_a_damaged_line(text: bytes) -> None:
    planted = b"%s %s\n" % (disk.digest(text).encode(), text)
    (first, odd, last) = lines_in(LINES[0] + planted + LINES[1])
    assert first.row is not None and last.row is not None
    assert odd.row is None and "line 2" in odd.reason


@pytest.mark.parametrize(
    "changes",
    [
        *({"cards": 10**30}, {"cards": "a"}, {"cards": 0}, {"state": "DONE"}, {"job_id": None}),
        *({"parameters": 5}, {"parameters": {"a": "{"}}, {"measure": 5}, {"image": "no base64"}),
        *({"samples": [5]}, {"samples": [{"rank": -1}]}, {"items": {"a": 1}}, {"reason": ["x"]}),
    ],
    ids=str,
)
def test_a_planted_line_costs_no_other(tmp_path: Path, changes: dict[str, Any]) -> None:
    store = Store(tmp_path, "night")
    store.tables_path.mkdir(parents=True)
    odd = line_with(row_of(row(1)) | changes)
    (store.tables_path / f".rows-{0:016x}-1.jsonl").write_bytes(LINES[0] + odd + LINES[2])
    contents = store.read()
    assert list(contents.measurements) == [row(0), row(2)]
    (damage,) = contents.damaged
    assert not damage.passing
    with store:
        assert store.measurements() == [row(0), row(2)]
    (aside,) = store.quarantine_path.iterdir()
    assert aside.name.startswith(row(1).attempt_id)
    assert store.attempts_set_aside([row(1).job_id]) == {row(1).job_id: 1}


def test_a_line_of_an_older_program_has_defaults(tmp_path: Path) -> None:
    older = row_of(row(1))
    for name in ("replicate", "items", "load_s"):
        older.pop(name, None)
    older["later"] = "unknown"
    del older["samples"][0]["step_s"]
    table, damaged = reader.table_of_lines(lines_in(line_with(older)))
    assert not damaged
    (read,) = from_table(table)
    assert (read.replicate, read.items, read.load_s) == (1, (), None)
    assert read.samples[0][1].step_s == ()


def test_a_line_of_a_newer_program_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="schema version 99"):
        list(lines_in(line_with(row_of(row(1)) | {"schema_version": 99})))


# ---------------------------------------------------------------- appending


def test_a_writer_whose_log_was_removed_says_so(tmp_path, caplog) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0)).unlink()
        with pytest.raises(StoreError, match="removed by somebody else"):
            store.append(row(1))
        assert not caplog.text
        store.append(row(1)).unlink()
    assert numbers(store) == [] and "removed by somebody else" in caplog.text


def test_no_name_of_a_log_comes_back(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with Store(tmp_path, "night") as store:
            for number in range(2):
                names.add(store.append(row(number)).name)
                store.to_parquet()
    assert len(names) == 4
    one, two = (RowLog(tmp_path, "0" * 16) for _ in range(2))
    path = one.append([row_of(row(0))])
    with pytest.raises(StoreError, match="File exists"):
        two.append([row_of(row(1))])
    assert sound(path.read_bytes()) == IDS[:1]


def test_a_writer_whose_lock_went_while_it_wrote_says_so(tmp_path, monkeypatch) -> None:
    """Its successor may have read the log before, so the row is not safe."""
    with Store(tmp_path, "night") as store:
        store.append(row(0))
        sync = disk.sync

        def taken_over(handle: int) -> None:
            sync(handle)
            (store.path / "driver.lock").unlink()

        monkeypatch.setattr(disk, "sync", taken_over)
        with pytest.raises(StoreLocked):
            store.append(row(1))
        monkeypatch.undo()


def test_a_stalled_writer_leaves_its_successors_log_alone(tmp_path, monkeypatch) -> None:
    """While it removes its own log, a driver on another host takes over."""
    first, second = Store(tmp_path, "night"), Store(tmp_path, "night")
    first.__enter__()
    first.append(row(1))
    remove = disk.remove

    def stalled(path: Path) -> None:
        monkeypatch.undo()
        (first.path / run_files.LOCK).unlink()
        second.__enter__()
        second.append(row(2))
        second.append(row(3))
        remove(path)

    monkeypatch.setattr(disk, "remove", stalled)
    with contextlib.suppress(OSError):
        first.to_parquet()
    assert numbers(first) == [1, 2, 3]
    with pytest.raises(StoreLocked):
        first.to_parquet()
    second.append(row(4))
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert numbers(first) == [1, 2, 3, 4] == in_files(first)


def test_a_stalled_writer_makes_no_file_after_its_successor(tmp_path, monkeypatch) -> None:
    """While it writes its file, another driver makes one of more rows."""
    first, second = Store(tmp_path, "night"), Store(tmp_path, "night")
    first.__enter__()
    first.append(row(1))
    first.begin(journal_row(2))  # its row is in the other one's file, too
    create = disk.create

    def stalled(path: Path) -> int:
        monkeypatch.undo()
        (first.path / run_files.LOCK).unlink()
        with second:
            assert len(second.interrupted) == 1
        return create(path)

    monkeypatch.setattr(disk, "create", stalled)
    with pytest.raises(StoreLocked):
        first.to_parquet()
    first.__exit__(None, None, None)
    assert in_files(first) == numbers(first) == [1, 2]


# ---------------------------------------------------------------- Parquet


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (disk, "read", OSError(errno.EMFILE, "Too many open files")),
        (reader, "table_of", pa.ArrowMemoryError("malloc failed")),
        (schema, "_column_fault", pa.ArrowMemoryError("malloc failed")),
    ],
    ids=["read", "table", "validate"],
)
def test_what_fails_for_a_moment_takes_no_row_out_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: Exception
) -> None:
    for number, failing in enumerate(([0], [1], [2], range(99))):
        calls, real = itertools.count(), getattr(place, name)

        def fail(*arguments: Any, **options: Any) -> Any:
            if next(calls) in failing:  # noqa: B023
                raise error
            return real(*arguments, **options)  # noqa: B023

        with Store(tmp_path, f"night{number}") as store:
            store.append(row(0), row(1))
            store.append(row(2))
            with monkeypatch.context() as broken, contextlib.suppress(Exception):
                broken.setattr(place, name, fail)
                store.to_parquet()
            assert numbers(store) == [0, 1, 2]
            store.append(row(3))
        assert numbers(store) == [0, 1, 2, 3] == in_files(store)
        assert not store.quarantine_path.exists()


@pytest.mark.parametrize("left", [False, True])
def test_a_log_that_cannot_be_read_keeps_no_other_from_parquet(tmp_path, monkeypatch, caplog, left):
    caplog.set_level(logging.WARNING, logger="nightgrid.store")  # a command may have raised it
    bad = ""
    with unreadable(lambda path: path.name == bad, errno.EIO):
        if left:
            with contextlib.suppress(Killed), Store(tmp_path, "night") as store:
                bad = store.append(row(0)).name
                monkeypatch.setattr(store, "to_parquet", killed)
        with Store(tmp_path, "night") as store:
            if not left:
                bad = store.append(row(0)).name
                assert store.to_parquet() is None
            for number in range(1, 4):
                store.append(row(number))
                assert store.to_parquet() is not None
            assert caplog.text.count("rows are not in Parquet") == 1
            bad = ""
            store.compact()
    assert numbers(store) == [0, 1, 2, 3] == in_files(store)


def test_files_that_do_not_read_back_are_one_cause(tmp_path, monkeypatch) -> None:
    read, messages = disk.read, set[str]()

    def rotten(path: Path, *arguments: Any, **options: Any) -> bytes:
        return read(path, *arguments, **options) + b"x" * (path.suffix == ".parquet")

    with Store(tmp_path, "night") as store:
        for number in range(2):
            store.append(row(number))
            with monkeypatch.context() as broken, pytest.raises(StoreError) as failure:
                broken.setattr(disk, "read", rotten)
                store.to_parquet()
            messages.add(str(failure.value))
        assert numbers(store) == [0, 1]
    (message,) = messages
    assert "does not read back as written" in message


@pytest.mark.slow
def test_plain_readers_follow_a_live_writer(tmp_path: Path) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    process = CONTEXT.Process(target=log_rows, args=(tmp_path, 30, 6))
    process.start()
    rows = tmp_path / "night" / "rows"
    deadline, seen, looks = time.monotonic() + patience(60), 0, 0
    while seen < 30 and time.monotonic() < deadline:
        assert process.exitcode in (None, 0)
        if not list(rows.glob("*.parquet")):
            time.sleep(0.01)
            continue
        query = f"select batch_size from '{rows}/*.parquet' where final and state = 'SUCCEEDED'"
        with duckdb.connect(config={"threads": 1}) as connection:
            by_duckdb = sorted(size for (size,) in connection.sql(query).fetchall())
        frame = polars.read_parquet(f"{rows}/*.parquet", columns=["batch_size"])
        by_polars = sorted(frame["batch_size"].to_list())
        ours = Store(tmp_path, "night").read(samples=looks % 2 == 0)
        assert ours.damaged == ()
        for sizes in (by_duckdb, by_polars, [one.batch_size for one in ours.measurements]):
            assert sizes == list(range(1, len(sizes) + 1)) and len(sizes) >= seen
            seen = len(sizes) if sizes is by_polars else seen
        looks += 1
    process.join(patience(60))
    assert seen == 30 and looks > 1


# ---------------------------------------------------------------- the attempt journal


def begun(path: Path) -> list[str]:
    return [str(line.row["attempt_id"]) for line in read_journal(path) if line.row is not None]


def test_attempts_without_a_row_get_one_from_the_next_driver(tmp_path, monkeypatch) -> None:
    with contextlib.suppress(Killed), Store(tmp_path, "night") as store:
        store.begin(*(journal_row(number) for number in range(3)))
        with monkeypatch.context() as dying:
            dying.setattr(AttemptJournal, "end", lambda *_: None)
            store.append(row(1))
        raise Killed
    for end in (Killed, None):  # one that dies before it has recovered anything, and the next
        with contextlib.suppress(Killed), Store(tmp_path, "night") as store:
            assert store.interrupted == tuple(sorted((IDS[0], IDS[2])))
            assert store.measurements() == [journal_row(0), row(1), journal_row(2)]
            if end is not None:
                raise end
            store.forget_interrupted()
    assert not (store.path / run_files.JOURNAL).exists()
    with Store(tmp_path, "night") as store:
        assert store.interrupted == () and len(store.measurements()) == 3


def test_an_attempt_whose_outcome_has_become_the_next_ones_row_is_not_recovered_again(
    tmp_path: Path,
) -> None:
    """The driver that wrote the row died before it removed the journal."""
    with contextlib.suppress(Killed), Store(tmp_path, "night") as store:
        store.begin(journal_row(0))
        raise Killed
    with contextlib.suppress(Killed), Store(tmp_path, "night") as store:
        assert store.interrupted == (IDS[0],)
        store.append(row(0, attempt_id=f"{row(0).job_id}-2", attempt_number=2))
        raise Killed
    with Store(tmp_path, "night") as store:
        assert store.interrupted == () and len(store.measurements()) == 2
    assert not (store.path / run_files.JOURNAL).exists()


def test_an_attempt_that_was_lost_while_its_driver_lived_is_not_interrupted(tmp_path: Path) -> None:
    with contextlib.suppress(Killed), Store(tmp_path, "night") as store:
        store.begin(journal_row(0))
        store.append(journal_row(0, recorded_at=2000.0, reason="its node died"))
        raise Killed
    with Store(tmp_path, "night") as store:
        assert store.interrupted == () and len(store.measurements()) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-9] + b"!" + data[-8:], lambda _: b"\xff\n"])
def test_a_damaged_line_of_the_journal_costs_no_other(tmp_path, damage) -> None:
    path = tmp_path / "night" / run_files.JOURNAL
    path.parent.mkdir()
    path.write_bytes(LINES[0] + damage(LINES[1]))
    with Store(tmp_path, "night") as store:
        assert store.interrupted == (IDS[0],)
    assert not path.exists() and len(store.read().damaged) == 1


def test_the_journal_has_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = AttemptJournal(tmp_path / "begun.log")
    for number in range(3):
        with monkeypatch.context() as full, contextlib.suppress(StoreError):
            if number == 1:
                full.setattr(disk, "write", away)
            journal.begin([row_of(row(number))])
        assert begun(journal.path) == IDS[:1] if number < 2 else IDS
    journal.end(IDS[:2])
    journal.close(ours=True)
    assert journal.path.exists()
    journal.begin([])
    assert begun(journal.path) == IDS[2:]
    journal.end(IDS)
    journal.close(ours=True)
    assert not journal.path.exists()


def test_a_journal_that_is_another_writers_is_left(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path / "begun.log")
    journal.begin([row_of(row(0))])
    journal.end([IDS[0]])
    journal.close(ours=False)
    assert begun(journal.path) == IDS[:1]
