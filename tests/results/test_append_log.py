"""The log of rows: what is torn or rots in it takes nothing else along, and no row is two."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import note, row
from patience import patience
from store_processes import CONTEXT, log_rows

from orchestrator.core.errors import StoreError, StoreLocked
from orchestrator.results import compaction, disk, fragments, paths, record, scan, validation
from orchestrator.results.append_log import AppendLog, is_log, parts_of
from orchestrator.results.bulk import raw_batches, read_lean, with_raw
from orchestrator.results.parcels import Receiver, digests, lines_of, what_is_there
from orchestrator.results.record import record_of
from orchestrator.results.store import Store
from orchestrator.results.tables import to_table

RECORDS = [
    fragments.record_name(f"job{n}", n, data) for n, data in enumerate((b"a" * 40, b"b", b""))
]
CONTENTS = (b"a" * 40, b"b", b"")


def log_of(directory: Path) -> bytes:
    """The bytes of a log with three small records."""
    log = AppendLog(directory)
    for name, data in zip(RECORDS, CONTENTS, strict=True):
        path = log.append(name, data)
    log.close()
    return path.read_bytes()


def sound(data: bytes) -> list[str]:
    return [part.name for part in parts_of(data) if not part.reason]


def numbers(store: Store) -> list[int]:
    """The rows that the store shows, by their batch size."""
    return sorted((each.batch_size or 0) - 1 for each in store.measurements(samples=False))


class Killed(BaseException):
    """The end of a driver of which nothing more happens."""


def killed() -> None:
    raise Killed


def away(_: Path) -> None:
    raise OSError("away for a moment")


def test_a_log_torn_at_any_byte_keeps_every_record_before_it(tmp_path: Path) -> None:
    """What is torn is called so, and is no damage: nobody was told that it is safe."""
    data = log_of(tmp_path)
    ends = [0]
    for name, content in zip(RECORDS, CONTENTS, strict=True):
        ends.append(ends[-1] + 2 * len(f"\n{name} {len(content)}\n") + len(content))
    assert ends[-1] == len(data)
    for length in range(len(data) + 1):
        parts = list(parts_of(data[:length]))
        whole = sum(length >= end for end in ends) - 1
        names = sound(data[:length])
        assert names in (RECORDS[:whole], RECORDS[: whole + 1]), length  # its last line may lack
        assert all(part.torn for part in parts if part.reason), length
        assert sum(len(part.reason) > 0 for part in parts) <= 1


@pytest.mark.slow
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_costs_one_record_at_most(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    """Whichever bit it is, the others are sound under their names, and a record that is not is
    named: no other attempt may be called the same."""
    data = bytearray(log_of(tmp_path_factory.mktemp("log")))
    data[at % len(data)] ^= 1 << bit
    parts = list(parts_of(bytes(data)))
    lost = set(RECORDS) - {part.name for part in parts if not part.reason}
    assert {part.name for part in parts if not part.reason} <= set(RECORDS)
    assert len(lost) <= 1
    assert lost <= {part.name for part in parts if part.reason and not part.torn}


@pytest.mark.slow
def test_a_row_torn_anywhere_loses_nothing_earlier(tmp_path: Path) -> None:
    """With real rows, at bytes all over the last record: readers see the others and no damage; the
    next writer sets the torn one aside, goes on in a log of its own, and all is Parquet then."""
    with Store.open(tmp_path / "sound", "night") as store:
        store.append(row(0), row(1))
        first = os.path.getsize(store.append(row(2)))
        log = store.append(row(3))
        data = log.read_bytes()
    for length in (first, *range(first + 1, len(data), 997), len(data)):
        store = Store.open(tmp_path / str(length), "night")
        store.tables_path.mkdir(parents=True)
        (store.tables_path / log.name).write_bytes(data[:length])
        seen = numbers(store)
        assert seen[:3] == [0, 1, 2] and store.read().damaged == ()
        with store:
            store.append(row(9))
            assert numbers(store) == [*seen, 9]
        assert numbers(store) == [*seen, 9]
        assert not any(name.endswith(".arrows") for name in os.listdir(store.tables_path))
        assert len(store.read().damaged) == (first < length and len(seen) == 3)


def test_rows_of_a_log_are_read_as_those_of_files(tmp_path: Path) -> None:
    """By every way of reading: whole, lean, history, raw values, attempts."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0), row(1))
        store.to_parquet()
        store.append(row(2))
        assert store.measurements() == [row(0), row(1), row(2)]
        lean = read_lean(store).measurements
        assert [each.job_id for each in lean] == [row(n).job_id for n in range(3)]
        found = [each for rows, _ in raw_batches(store, lean, "samples") for each in rows]
        assert sorted(each.job_id for each in found) == sorted(each.job_id for each in lean)
        attempts = scan.scan_rows(store.tables_path, scan.ATTEMPT).attempts()
        assert len(store.history()) == len(attempts) == 3


def test_a_writer_whose_lock_went_while_it_wrote_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may have read the log before: the row is not safe, and is not told to be."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0))
        sync = disk.sync

        def taken_over(handle: int) -> None:
            sync(handle)
            (store.path / "driver.lock").unlink()

        monkeypatch.setattr(disk, "sync", taken_over)
        with pytest.raises(StoreLocked):
            store.append(row(1))
        monkeypatch.undo()


def test_a_stalled_writer_leaves_its_successors_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away while it removes its own log; a driver on another host takes over meanwhile."""
    first, second = Store.open(tmp_path, "night"), Store.open(tmp_path, "night")
    first.__enter__()
    first.append(row(1))
    remove = disk.remove

    def stalled(path: Path) -> None:
        monkeypatch.undo()
        (first.path / paths.LOCK).unlink()
        second.__enter__()
        second.append(row(2))
        second.append(row(3))
        remove(path)

    monkeypatch.setattr(disk, "remove", stalled)
    first.to_parquet()
    assert numbers(first) == [1, 2, 3]
    with pytest.raises(StoreLocked):
        first.to_parquet()
    second.append(row(4))
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    assert numbers(first) == [1, 2, 3, 4]


def test_a_stalled_writer_makes_no_second_file_of_what_its_successor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away while it writes its file; meanwhile the other driver made one, of more rows."""
    first, second = Store.open(tmp_path, "night"), Store.open(tmp_path, "night")
    first.__enter__()
    first.append(row(1))
    first.begin(note(2))  # its row is in the other one's file, too
    create = disk.create

    def stalled(path: Path) -> int:
        monkeypatch.undo()
        (first.path / paths.LOCK).unlink()
        with second:
            assert len(second.interrupted) == 1
        return create(path)

    monkeypatch.setattr(disk, "create", stalled)
    with pytest.raises(StoreLocked):
        first.to_parquet()
    first.__exit__(None, None, None)
    assert len(numbers(first)) == 2 and len(os.listdir(first.tables_path)) == 1


def test_a_writer_without_its_lock_removes_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor answers for all logs."""
    with Store.open(tmp_path, "night") as store:
        log = store.append(row(0))
        write = fragments.write_durably

        def taken_over(*arguments: Any) -> Path:
            (store.path / paths.LOCK).unlink()
            return write(*arguments)

        monkeypatch.setattr(fragments, "write_durably", taken_over)
        with pytest.raises(StoreLocked):
            store.to_parquet()
        assert log.exists() and numbers(store) == [0]


def test_no_name_of_a_log_comes_back(tmp_path: Path) -> None:
    """Neither in one driver, nor in the next, nor after the log was removed; and a name that is
    taken is not taken away."""
    names = set()
    for _ in range(2):
        with Store.open(tmp_path, "night") as store:
            for number in range(2):
                names.add(store.append(row(number)).name)
                store.to_parquet()
    assert len(names) == 4
    one, two = (AppendLog(tmp_path, "0" * 16) for _ in range(2))
    path = one.append(RECORDS[0], CONTENTS[0])
    with pytest.raises(StoreError, match="File exists"):
        two.append(RECORDS[1], CONTENTS[1])
    assert sound(path.read_bytes()) == RECORDS[:1]


def test_a_writer_whose_log_was_removed_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next row, which is not called safe; or, if none comes, at the end."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0)).unlink()
        with pytest.raises(StoreError, match="removed by somebody else"):
            store.append(row(1))
        store.append(row(1))
    assert numbers(store) == [1] and "removed by somebody else" in caplog.text


def test_a_reader_misses_no_row_of_a_log_that_became_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it reads the files that it has listed, the log becomes one and another is begun."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(1))
        store.to_parquet()
        store.append(row(2))
        read = disk.read

        def meanwhile(path: Path, *arguments: Any) -> bytes:
            data = read(path, *arguments)
            monkeypatch.undo()
            store.to_parquet()
            store.append(row(3))
            return data

        monkeypatch.setattr(disk, "read", meanwhile)
        assert numbers(Store.open(tmp_path, "night")) == [1, 2, 3]


def test_a_reader_of_many_files_need_not_be_faster_than_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it has read two files more, the log has become one and another is begun."""
    with Store.open(tmp_path, "night") as store:
        for number in range(3):
            store.append(row(number))
            store.to_parquet()
        store.append(row(3))
        read, coming, reads = disk.read, itertools.count(4), itertools.count(1)

        def meanwhile(path: Path, *arguments: Any) -> bytes:
            data = read(path, *arguments)
            count = next(reads)
            assert count < 12, "it reads again what it has read"
            if path.suffix == ".parquet" and count % 2 == 0:
                with monkeypatch.context() as writing:
                    writing.setattr(disk, "read", read)
                    store.to_parquet()
                    store.append(row(next(coming)))
            return data

        monkeypatch.setattr(disk, "read", meanwhile)
        found = numbers(Store.open(tmp_path, "night"))
        monkeypatch.undo()
        assert found == list(range(next(coming)))


@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (disk, "read", OSError(errno.EMFILE, "Too many open files")),
        (record, "parsed", pa.ArrowMemoryError("malloc failed")),
        (record, "joined", pa.ArrowMemoryError("malloc failed")),
        (record, "joined", OSError(errno.EMFILE, "Too many open files")),
        (record, "joined", ImportError("upgraded meanwhile")),
        (record, "joined", RuntimeError("can't start new thread")),
        (validation, "_column_fault", pa.ArrowMemoryError("malloc failed")),
    ],
    ids=["read", "parse", "join", "descriptors", "import", "thread", "validate"],
)
def test_what_fails_for_a_moment_takes_no_row_out_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: Exception
) -> None:
    """At one of the first calls, or all, while a log becomes a file."""
    for number, failing in enumerate(([0], [1], [2], range(99))):
        calls, real = itertools.count(), getattr(place, name)

        def fail(*arguments: Any, **options: Any) -> Any:
            if next(calls) in failing:  # noqa: B023
                raise error
            return real(*arguments, **options)  # noqa: B023

        with Store.open(tmp_path, f"night{number}") as store:
            store.append(row(0), row(1))
            store.append(row(2))
            with monkeypatch.context() as broken, contextlib.suppress(Exception):
                broken.setattr(place, name, fail)
                store.to_parquet()
            assert numbers(store) == [0, 1, 2]
            store.append(row(3))
        assert numbers(store) == [0, 1, 2, 3] and not store.quarantine_path.exists()


@pytest.mark.parametrize("left", [False, True])
def test_a_log_that_cannot_be_read_keeps_no_other_from_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: bool
) -> None:
    """One of this driver, or ``left`` by a dead one beside the file of it, is said once; its rows
    count once, also when it can be read again and all is compacted."""
    caplog.set_level(logging.WARNING, logger="nightgrid.store")  # a command may have raised it
    read, bad = disk.read, ""

    def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
        if path.name == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *arguments, **options)

    monkeypatch.setattr(disk, "read", fail)
    if left:
        with pytest.raises(Killed), Store.open(tmp_path, "night") as store:
            bad = store.append(row(0)).name
            with monkeypatch.context() as broken, pytest.raises(OSError, match="away"):
                bad, log = "", bad
                broken.setattr(disk, "remove", away)
                store.to_parquet()
            bad = log
            monkeypatch.setattr(store, "to_parquet", killed)
    with Store.open(tmp_path, "night") as store:
        if not left:
            bad = store.append(row(0)).name
            assert store.to_parquet() is None
        for number in range(1, 4):
            store.append(row(number))
            assert store.to_parquet() is not None
        assert caplog.text.count("its rows are not in Parquet") == 1
        assert [name for name in os.listdir(store.tables_path) if is_log(name)] == [bad]
        bad = ""
        store.compact()
        assert numbers(store) == [0, 1, 2, 3] and len(os.listdir(store.tables_path)) == 1
    assert numbers(store) == [0, 1, 2, 3]


def test_a_compaction_that_reads_a_log_again_makes_no_row_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log could not be read when all became Parquet."""
    with Store.open(tmp_path, "night") as store:
        log = store.append(row(0)).name
        store.append(row(1))
        read, reads = disk.read, itertools.count()

        def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
            if path.name == log and not next(reads):
                raise OSError(errno.EIO, "Input/output error")
            return read(path, *arguments, **options)

        monkeypatch.setattr(disk, "read", fail)
        store.compact()
        assert numbers(store) == [0, 1]
        store.append(row(2))
        store.to_parquet()
        assert numbers(store) == [0, 1, 2] and len(os.listdir(store.tables_path)) == 2
    assert numbers(store) == [0, 1, 2]


def test_the_first_logs_are_read_though_their_names_told_no_writer(tmp_path: Path) -> None:
    with pytest.raises(Killed), Store.open(tmp_path, "night") as store:
        log = store.append(row(0))
        log.rename(log.with_name(".appended-1.arrows"))
        store.to_parquet = killed  # type: ignore[assignment]
    again = Store.open(tmp_path, "night")
    assert numbers(again) == [0]
    with again:
        assert numbers(again) == [0] and not any(map(is_log, os.listdir(again.tables_path)))


def test_a_file_that_cannot_be_read_as_a_driver_begins_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a lack of descriptors, which says nothing of the file."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(1))
    real, reads = disk.read, itertools.count()

    def fail(path: Path, *arguments: Any, **options: Any) -> bytes:
        if path.suffix == ".parquet" and not next(reads):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(disk, "read", fail)
        with Store.open(tmp_path, "night") as again:
            assert next(reads) > 0 and not again.quarantine_path.exists()
    assert numbers(again) == [1]


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize(
    ("place", "name", "error"),
    [
        (disk, "read", OSError(errno.EMFILE, "Too many open files")),
        (pq, "ParquetFile", pa.ArrowMemoryError("malloc failed")),
    ],
    ids=["read", "parse"],
)
def test_a_file_that_cannot_be_read_for_a_moment_may_stand_for_records(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    error: Exception,
    interrupted: bool,
) -> None:
    """At a time when its log is still there, beside another one: nothing is written of either. And
    who wants to know what was interrupted does not begin."""
    with pytest.raises(Killed), Store.open(tmp_path, "night") as store:
        store.append(row(1), row(2))
        with monkeypatch.context() as broken, pytest.raises(OSError, match="away"):
            broken.setattr(disk, "remove", away)
            store.to_parquet()
        store.append(row(3))
        if interrupted:
            store.begin(note(4))
        monkeypatch.setattr(store, "to_parquet", killed)
    real, again = getattr(place, name), Store.open(tmp_path, "night")
    with monkeypatch.context() as broken, contextlib.ExitStack() as stack:
        reads = itertools.count()

        def fail(source: Any, *arguments: Any, **options: Any) -> Any:
            # The first is the look for what is torn.
            if place is pq or (str(source).endswith(".parquet") and next(reads)):
                raise error
            return real(source, *arguments, **options)

        broken.setattr(place, name, fail)
        if interrupted:
            stack.enter_context(pytest.raises(StoreError, match="cannot be told now"))
        with again:
            broken.undo()
    assert numbers(again) == [1, 2, 3]
    with again:
        assert again.interrupted == (note(4).attempt_id,) * interrupted
    assert len(numbers(again)) == 3 + interrupted and len(os.listdir(again.tables_path)) < 3


@pytest.mark.parametrize("then", ["goes on", "is killed"])
@pytest.mark.parametrize("fail", ["remove", "sync_directory"])
def test_a_log_that_stays_behind_its_file_makes_no_row_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: str, then: str
) -> None:
    """The file appears and then something fails, in this driver or in its successor."""
    real: Callable[..., None] = getattr(disk, fail)

    def away(path: Path) -> None:
        if fail == "remove" or any(name.endswith(".parquet") for name in os.listdir(path)):
            raise OSError("away for a moment")
        real(path)

    with pytest.raises(Killed), Store.open(tmp_path, "night") as store:
        store.append(row(0), row(1))
        with monkeypatch.context() as broken:
            broken.setattr(disk, fail, away)
            with pytest.raises((OSError, StoreError)):
                store.to_parquet()
        assert numbers(store) == [0, 1]
        store.append(row(2))
        assert numbers(store) == [0, 1, 2]
        if then == "goes on":
            store.to_parquet()
            assert numbers(store) == [0, 1, 2]
        monkeypatch.setattr(store, "to_parquet", killed)  # and it ends as if it were killed
    monkeypatch.undo()
    again = Store.open(tmp_path, "night")
    assert numbers(again) == [0, 1, 2]
    with again:
        assert numbers(again) == [0, 1, 2]
    assert numbers(again) == [0, 1, 2] and again.read().damaged == ()


def test_two_threads_append_and_make_parquet(tmp_path: Path) -> None:
    """Rows appended while a file is made are in the next one; none is lost or two."""
    with Store.open(tmp_path, "night") as store:
        going = threading.Event()

        def make() -> None:
            while not going.is_set():
                store.to_parquet()

        maker = threading.Thread(target=make)
        maker.start()
        for number in range(40):
            store.append(row(number))
        going.set()
        maker.join()
        assert numbers(store) == list(range(40))
    assert numbers(store) == list(range(40))


def test_a_fetched_copy_has_the_rows_of_the_log_once(tmp_path: Path) -> None:
    """Fetched while the run writes, then when its log has become Parquet and all was compacted."""

    def fetch() -> Store:
        receiver = Receiver(begin=lambda _: tmp_path / "there" / "night")
        lines = lines_of(store.path, what_is_there(tmp_path / "there" / "night"))
        receiver.feed("".join(f"{line}\n" for line in lines))
        assert receiver.finished and not receiver.damaged
        return Store.open(tmp_path / "there", "night")

    with Store.open(tmp_path / "here", "night") as store:
        store.append(row(0))
        store.to_parquet()
        store.append(row(1))
        assert numbers(fetch()) == [0, 1]
        store.append(row(2))
        store.compact()
        assert numbers(fetch()) == [0, 1, 2]
        assert not any(name.endswith(".arrows") for name in os.listdir(fetch().tables_path))


def test_a_fetched_copy_keeps_its_log_until_the_file_of_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log becomes a file, which is compacted, while it is sent; the copy has lost no row. One
    who knows no logs is sent none."""
    there = tmp_path / "there" / "night"

    def fetch() -> list[int]:
        receiver = Receiver(begin=lambda _: there)
        receiver.feed("".join(f"{line}\n" for line in lines_of(store.path, what_is_there(there))))
        return numbers(Store.open(there.parent, "night"))

    with Store.open(tmp_path / "here", "night") as store:
        store.append(row(0))
        assert fetch() == [0]
        earlier = list(lines_of(store.path, digests(there)))
        assert not any("appended" in line for line in earlier)
        store.append(row(1))
        store.to_parquet()
        read = disk.read

        def meanwhile(path: Path, *arguments: Any, **options: Any) -> bytes:
            if path.parent == store.tables_path:
                monkeypatch.undo()
                store.append(row(2))
                store.compact()
            return read(path, *arguments, **options)

        monkeypatch.setattr(disk, "read", meanwhile)
        assert fetch() == [0]
        assert fetch() == [0, 1, 2]
        assert len(os.listdir(there / "rows")) == 1


def test_a_log_that_was_fetched_by_half_is_cleared_up(tmp_path: Path) -> None:
    """As the halves of other files are, by the next writer of the copy."""
    store = Store.open(tmp_path, "night")
    store.tables_path.mkdir(parents=True)
    half = store.tables_path / f"..appended-{0:016x}-1.arrows.partial"
    half.write_bytes(log_of(tmp_path)[:50])
    with store:
        store.append(row(0))
    assert not half.exists() and numbers(store) == [0]


def test_a_record_without_a_column_costs_no_other_its_raw_values(tmp_path: Path) -> None:
    """As an earlier version would write it: the column has its default."""
    with Store.open(tmp_path, "night") as store:
        store.append(row(0))
        log = AppendLog(store.tables_path)
        table = to_table([row(1)], documented=False).drop_columns(["items"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        odd = sink.getvalue().to_pybytes()
        for name, data in (
            (fragments.record_name("x", 1, odd, ".arrow"), odd),
            record_of([row(2)]),
        ):
            log.append(name, data)
        log.close()
        lean = read_lean(store).measurements
        found = [each.batch_size or 0 for each in with_raw(store, lean, "items", "samples")]
        assert sorted(found) == [1, 2, 3]


def test_a_copy_that_kept_a_log_has_its_rows_once(tmp_path: Path) -> None:
    """Copied while the run writes and after it was compacted, by something that removes nothing:
    the file that came between is in neither copy. Also when more was compacted twice."""
    copy = Store.open(tmp_path / "copy", "night")
    with Store.open(tmp_path, "night") as store:
        store.append(row(1))
        store.append(row(2))
        shutil.copytree(store.tables_path, copy.tables_path)
        store.to_parquet()
        for number in (3, 4):
            store.append(row(number))
            store.compact()
            shutil.copytree(store.tables_path, copy.tables_path, dirs_exist_ok=True)
            assert numbers(store) == numbers(copy) == list(range(1, number + 1))
    with copy:
        copy.append(row(5))
    assert numbers(copy) == [1, 2, 3, 4, 5] and copy.read().damaged == ()


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowInvalid("odd")], ids=repr)
def test_a_run_begins_and_ends_where_no_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The rows stay in their logs, and the first driver that can makes a file of them."""

    def fail(_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(compaction, "file_of_records", fail)
        for number in range(2):
            with Store.open(tmp_path, "night") as store:
                store.append(row(number))
    assert numbers(store) == [0, 1]
    with store:
        assert numbers(store) == [0, 1]
    assert len(os.listdir(store.tables_path)) == 1


def test_a_spilled_record_that_is_home_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver died between the append and the removal of the copy on the other disk."""
    monkeypatch.setattr(paths, "spill_directories", lambda _: [tmp_path / "elsewhere"])
    name, data = record_of([row(0, final=False)])
    with pytest.raises(Killed), Store.open(tmp_path, "night") as store:
        place = tmp_path / "elsewhere" / name
        assert store.spill(row(0, final=False)) == place
        store.append(row(0, final=False))
        assert not place.exists()
        monkeypatch.setattr(store, "to_parquet", killed)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.write_bytes(data)
    with Store.open(tmp_path, "night") as store:
        assert numbers(store) == [0] and not place.exists()
    assert numbers(store) == [0]


@pytest.mark.slow
def test_plain_readers_follow_a_live_writer(tmp_path: Path) -> None:
    """The query of README, in DuckDB and Polars, beside another process that appends and makes
    Parquet: rows come and never go, each once."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    process = CONTEXT.Process(target=log_rows, args=(tmp_path, 60, 6))
    process.start()
    rows = tmp_path / "night" / "rows"
    deadline, seen, looks = time.monotonic() + patience(60), 0, 0
    while seen < 60 and time.monotonic() < deadline:
        if not list(rows.glob("*.parquet")):
            time.sleep(0.01)
            continue
        query = f"select batch_size from '{rows}/*.parquet' where final and state = 'SUCCEEDED'"
        with duckdb.connect() as connection:
            by_duckdb = sorted(size for (size,) in connection.sql(query).fetchall())
        frame = polars.read_parquet(f"{rows}/*.parquet", columns=["batch_size"])
        for sizes in (by_duckdb, sorted(frame["batch_size"].to_list())):
            assert sizes == list(range(1, len(sizes) + 1)) and len(sizes) >= seen
            seen = len(sizes)
        looks += 1
    process.join(patience(60))
    assert seen == 60 and looks > 1


@pytest.mark.slow
@given(at=st.integers(0, 10**6), odd=st.binary(min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_foreign_record_with_a_fitting_checksum_is_survived(
    tmp_path_factory: pytest.TempPathFactory, at: int, odd: bytes
) -> None:
    """Arrow's reader takes buffers as they are: whoever plants a record with offsets that lead
    nowhere gets it set aside, or read as far as its values are some, and the others are read."""
    _, data = record_of([row(1)])
    begin = at % len(data)
    data = data[:begin] + odd + data[begin + len(odd) :]
    store = Store.open(tmp_path_factory.mktemp("planted"), "night")
    store.tables_path.mkdir(parents=True)
    log = AppendLog(store.tables_path)
    for name, content in (record_of([row(0)]), (fragments.record_name("x", 1, data), data)):
        log.append(name, content)
    log.close()
    contents = store.read()
    assert row(0) in contents.measurements
    assert len(contents.measurements) + len(contents.damaged) == 2
    lean = read_lean(store).measurements  # also one whose raw values only are odd
    assert len(contents.measurements) <= len(lean) <= 2
    found = [each.job_id for rows, _ in raw_batches(store, lean, "samples") for each in rows]
    assert row(0).job_id in found
