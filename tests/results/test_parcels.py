"""A run's files through a channel of text: whole, once, and however the channel is cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measurements import row

from orchestrator.core.errors import StoreError
from orchestrator.results import parcels, paths
from orchestrator.results.fetched import fetched_directory, fetched_id
from orchestrator.results.parcels import (
    MARK,
    PART_BYTES,
    Receiver,
    digests,
    lines_of,
    main,
    what_is_there,
)
from orchestrator.results.store import Store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with rows of several sizes, side files, and what is of no use elsewhere."""
    home = tmp_path_factory.mktemp("there") / "night"
    (home / paths.ROWS).mkdir(parents=True)
    for number, size in enumerate((0, 1, PART_BYTES, 3 * PART_BYTES + 7)):
        data = bytes(range(256)) * (size // 256 + 1)
        (home / paths.ROWS / f"job-{number}.parquet").write_bytes(data[:size])
    (home / paths.ROWS / ".job-9.parquet.partial").write_bytes(b"torn")
    (home / paths.STATUS).write_text("{}")
    (home / paths.trace_of("job-1")).write_bytes(b"two steps")
    (home / paths.REPORT).write_text("<html>" * 1000)
    (home / paths.LOCK).write_text("held")
    return home


def copy_in(directory: Path, begun: list[object] | None = None) -> Receiver:
    def begin(told: object) -> Path:
        if begun is not None:
            begun.append(told)
        return directory

    return Receiver(begin=begin)


def text_of(run: Path, have: dict[str, str]) -> str:
    """The log of the job that sends, with what Ray prints before."""
    lines = ["2026-11-23 02:00:00,000\tINFO job_manager.py:568 -- Runtime env is setting up."]
    return "".join(f"{line}\n" for line in [*lines, *lines_of(run, have)])


def test_what_comes_is_what_was_sent_and_only_what_is_lacking(run: Path, tmp_path: Path) -> None:
    """Then nothing; then the one file that has changed."""
    receiver = copy_in(tmp_path)
    receiver.feed(text_of(run, {}))
    assert receiver.finished and not receiver.damaged
    assert digests(tmp_path) == digests(run) and len(receiver.received) == 7
    assert not (tmp_path / paths.LOCK).exists()
    again = copy_in(tmp_path)
    again.feed(text_of(run, digests(tmp_path)))
    assert again.finished and again.received == []
    (tmp_path / paths.STATUS).write_text("older")
    once_more = copy_in(tmp_path)
    once_more.feed(text_of(run, digests(tmp_path)))
    assert once_more.received == [paths.STATUS]


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_transfer_may_be_cut_and_damaged_anywhere(
    run: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Whatever piece of the text goes, changes or comes in other pieces: each file that is there
    is whole, and the next transfer brings the others."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    text = text_of(run, {})
    at = data.draw(st.integers(0, len(text) - 1))
    fault = data.draw(st.sampled_from(["cut", "change", "drop", "none"]))
    sent = {
        "cut": text[:at],
        "change": text[:at] + data.draw(st.sampled_from("aZ9+/ \n{")) + text[at + 1 :],
        "drop": text[:at] + text[at + data.draw(st.integers(1, 100_000)) :],
        "none": text,
    }[fault]
    receiver = copy_in(tmp_path / "copy")
    size = data.draw(st.integers(1, 100_000))
    try:
        for start in range(0, len(sent), size):
            receiver.feed(sent[start : start + size])
    except StoreError as error:  # a name that was changed on its way
        assert "is no file of a run" in str(error)
    there = digests(run)
    for name, digest in digests(tmp_path / "copy").items():
        assert there[name] == digest
    rest = copy_in(tmp_path / "copy")
    rest.feed(text_of(run, digests(tmp_path / "copy")))
    assert rest.finished and digests(tmp_path / "copy") == there


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "rows/../../evil.parquet",
        "/etc/evil",
        "driver.lock",
        "rows/.x.parquet",
        "trace-/x",
    ],
)
def test_a_sender_cannot_choose_where_a_file_goes(tmp_path: Path, run: Path, name: str) -> None:
    """Rows and the known side files, and nothing else."""
    text = text_of(run, {}).replace(f'"{paths.REPORT}", "sha', f'"{name}", "sha')
    assert name in text
    with pytest.raises(StoreError, match="is no file of a run"):
        copy_in(tmp_path / "copy").feed(text)
    assert not list(tmp_path.glob("*evil*"))


def test_a_file_whose_name_was_changed_on_its_way_is_damaged(tmp_path: Path, run: Path) -> None:
    """Into another one of a row, or one that no file has; the next transfer brings the file."""
    for number, changed in enumerate(("rows/xob-1.parquet", "rows/+ob.parquet")):
        copy = tmp_path / str(number)
        lines = text_of(run, digests(copy)).split("\n")
        name = next(each for each in digests(run) if each.startswith("rows/"))
        sent = [each.replace(name, changed) if " file " in each else each for each in lines]
        receiver = copy_in(copy)
        receiver.feed("\n".join(sent))
        assert receiver.damaged == [changed] and name not in digests(copy)
        copy_in(copy).feed(text_of(run, digests(copy)))
        assert digests(copy) == digests(run)


@pytest.mark.parametrize("wanted", [[], None], ids=["none", "unsaid"])
def test_a_sender_that_has_nothing_to_send_sends_nothing(
    tmp_path: Path, run: Path, wanted: list[str] | None
) -> None:
    """Where it says so; one that does not say what it will send is believed."""
    first, *rest = lines_of(run, {})
    head = json.loads(first.partition(" begin ")[2])
    lines = [f"{MARK} begin {json.dumps(head | {'wanted': wanted})}", *rest]
    receiver = copy_in(tmp_path)
    receiver.feed("".join(f"{line}\n" for line in lines))
    assert receiver.finished
    assert sorted(receiver.damaged if wanted == [] else receiver.received) == sorted(digests(run))


def test_a_refusal_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no such run: the reason comes here."""
    assert main(["night", "--results", str(tmp_path)]) == StoreError.exit_code
    printed = capsys.readouterr().out
    assert printed.startswith(f"{MARK} refused")
    with pytest.raises(StoreError, match="there are no runs in"):
        copy_in(tmp_path).feed(printed)


def test_a_file_that_goes_meanwhile_is_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fragments do when the run ends and compacts them."""
    there = tmp_path / "there"
    shutil.copytree(run, there)

    def lines() -> Iterator[str]:
        for line in lines_of(there, {}):
            (there / paths.ROWS / "job-3.parquet").unlink(missing_ok=True)
            yield line

    receiver = copy_in(tmp_path / "copy")
    receiver.feed("".join(f"{line}\n" for line in lines()))
    assert receiver.finished and "rows/job-3.parquet" not in receiver.received


def test_a_copy_never_mixes_with_another_run(tmp_path: Path) -> None:
    """Neither with one of this machine nor with another's of the same name."""
    told = {"run_id": "0123456789ab"}
    path = fetched_directory(tmp_path, "night", "http://head:8265", told)
    assert fetched_directory(tmp_path, "night", "http://head:8265", told) == path
    with pytest.raises(StoreError, match="a copy of another run; fetch into another"):
        fetched_directory(tmp_path, "night", "http://head:8265", {"run_id": "ba9876543210"})
    (tmp_path / "own" / paths.ROWS).mkdir(parents=True)
    with pytest.raises(StoreError, match=r"a run of this machine; .*--as NAME"):
        fetched_directory(tmp_path, "own", "http://head:8265", told)
    with pytest.raises(StoreError, match="cannot name"):
        fetched_directory(tmp_path, "../night", "http://head:8265", told)


def test_a_copy_begun_before_its_run_had_an_id_goes_on(tmp_path: Path) -> None:
    """The first id that it is told is then its own, and another is refused."""
    path = fetched_directory(tmp_path, "night", "http://head:8265", {"run_id": None})
    told = {"run_id": "0123456789ab"}
    for known in ({}, told, {}, told):
        assert fetched_directory(tmp_path, "night", "http://head:8265", known) == path
    assert fetched_id(path) == "0123456789ab"
    with pytest.raises(StoreError, match="a copy of another run"):
        fetched_directory(tmp_path, "night", "http://head:8265", {"run_id": "ba9876543210"})


def test_a_copy_with_which_a_driver_has_gone_on_takes_nothing_more(tmp_path: Path) -> None:
    """Its files and those of the source would hold some rows twice. Another name is free."""
    told = {"run_id": "0123456789ab"}
    fetched_directory(tmp_path, "night", "http://head:8265", told)
    with Store.open(tmp_path, "night") as copy:
        (copy.path / paths.RUN_ID).unlink()
        with pytest.raises(StoreError, match=r"has gone on with .*--as NAME"):
            fetched_directory(tmp_path, "night", "http://head:8265", told)
    with copy:
        pass
    with pytest.raises(StoreError, match=r"has gone on with .*--as NAME"):
        fetched_directory(tmp_path, "night", "http://head:8265", told)
    assert fetched_directory(tmp_path, "again", "http://head:8265", told).is_dir()


def test_what_is_foreign_among_the_rows_keeps_nothing_from_its_way(
    run: Path, tmp_path: Path
) -> None:
    """A directory, and a file whose name no receiver takes; logs can be told of all the same."""
    there = tmp_path / "there"
    shutil.copytree(run, there)
    (there / paths.ROWS / "a.parquet").mkdir()
    (there / paths.ROWS / "a note.parquet").write_bytes(b"mine")
    begun: list[object] = []
    receiver = copy_in(tmp_path / "copy", begun)
    receiver.feed(text_of(there, {}))
    assert receiver.finished and digests(tmp_path / "copy") == digests(run)
    (told,) = begun
    assert isinstance(told, dict) and told["logs"] == []


def numbers(run: Path) -> list[int]:
    """The rows of a run's directory, by their batch size."""
    return sorted((each.batch_size or 0) - 1 for each in Store(run.parent, run.name).measurements())


@pytest.mark.parametrize("when", ["listed", "digested", "unread", "file line lost"])
def test_a_copy_keeps_a_log_whose_file_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The log becomes a file while the sender looks at its files, or that file cannot be read
    then, or is lost on its way."""
    copy = tmp_path / "copy"
    with Store.open(tmp_path, "night") as store:

        def fetch(lost: str = "nothing") -> list[int]:
            lines = lines_of(store.path, what_is_there(copy))
            receiver = copy_in(copy)
            receiver.feed("".join(f"{line}\n" for line in lines if lost not in line))
            assert receiver.finished
            return numbers(copy)

        store.append(row(1))
        assert fetch() == [1]
        place = "carried" if when == "listed" else "digest_of"
        real = getattr(parcels, place)

        def meanwhile(path: Path) -> object:
            if not path.is_relative_to(store.path):
                return real(path)
            monkeypatch.undo()
            found = real(path) if when == "listed" else None
            store.to_parquet()
            if when == "unread":
                raise OSError("Too many open files")
            return found or real(path)

        if when in ("unread", "file line lost"):
            store.to_parquet()
        if when != "file line lost":
            monkeypatch.setattr(parcels, place, meanwhile)
        assert fetch(" file " if when == "file line lost" else "nothing") == [1]
        assert fetch() == [1]
        assert [name.suffix for name in (copy / paths.ROWS).iterdir()] == [".parquet"]


def test_a_transfer_leaves_the_log_of_a_driver_that_goes_on_with_the_copy(tmp_path: Path) -> None:
    """Its rows are nowhere else. The log that was fetched goes when its file has come."""
    ours = Store.open(tmp_path / "here", "night")

    def fetch() -> None:
        receiver = copy_in(ours.path)
        lines = lines_of(store.path, what_is_there(ours.path))
        receiver.feed("".join(f"{line}\n" for line in lines))
        assert receiver.finished

    with Store.open(tmp_path, "night") as store:
        store.append(row(1))
        store.to_parquet()
        fetch()
        with ours:
            own = ours.append(row(7))
            theirs = store.append(row(2))
            fetch()
            assert numbers(ours.path) == [1, 2, 7]
            store.to_parquet()
            fetch()
            logs = [each.name for each in ours.tables_path.iterdir() if each.suffix == ".arrows"]
            assert numbers(ours.path) == [1, 2, 7] and logs == [own.name] != [theirs.name]
            ours.append(row(8))
    assert numbers(ours.path) == [1, 2, 7, 8]
