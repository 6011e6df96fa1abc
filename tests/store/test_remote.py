"""Copies of runs, in an object store and beside it."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset
import pyarrow.fs
import pytest
import tiny_workload
from example_grids import NOTEBOOK_GRID
from measurements import numbers, row
from moto.server import ThreadedMotoServer
from odd_files import unreadable

from orchestrator.cli.main import main
from orchestrator.core.errors import StoreError
from orchestrator.store import disk, remote
from orchestrator.store import files as run_files
from orchestrator.store.remote import (
    Mirror,
    copied_id,
    copy_directory,
    fetch_from,
    receive,
    shown_address,
    travelling_files,
)
from orchestrator.store.store import Store

BUCKET = "nights"


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    import boto3

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    client = boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **keys
    )
    client.create_bucket(Bucket=BUCKET)
    with contextlib.closing(client):
        yield running
    running.stop()


@pytest.fixture
def address(server, monkeypatch, request):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    host, port = server.get_host_and_port()
    where = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    return f"s3://{BUCKET}/{request.node.name}?{where}"


def run_of(results: Path, rows: int) -> Store:
    store = Store(results, "night")
    with store:
        for number in range(rows):
            store.append(row(number, run="night"))
            store.to_parquet()
        store.write_file(run_files.STATUS, "{}")
    return store


def plain_rows(run: Path) -> int:
    """The rows that readers see who know nothing of repeated ones."""
    return int(pyarrow.dataset.dataset(run / run_files.ROWS).count_rows())


def contents(run: Path) -> dict[str, bytes]:
    """The files of a run that are copied."""
    return {name: (run / name).read_bytes() for name in travelling_files(run)}


def test_a_copy_follows_the_run_and_comes_back(tmp_path, address, capsys) -> None:
    store = run_of(tmp_path / "here", 2)
    copy = Mirror(store.path, address, "0123456789ab")
    assert copy.copy() == 3 and copy.copy() == 0 and not copy.trouble
    there = ("--results", str(tmp_path / "there"))
    assert main(["fetch", "night", "--address", address, *there]) == 0
    fetched = Store.existing(tmp_path / "there", "night")
    assert contents(fetched.path) == contents(store.path)
    assert len(fetched.measurements()) == 2
    with store:
        store.append(row(7, run="night"))
    assert copy.copy() == 1
    capsys.readouterr()
    assert main(["fetch", "night", "--address", address, *there, "--json"]) == 0
    received = json.loads(capsys.readouterr().out)["received"]
    assert len([name for name in received if name.startswith("rows/")]) == 1
    assert len(fetched.measurements()) == 3
    # Another driver of the run, who knows nothing of the copy, does not send rows again.
    again = Mirror(store.path, address, "0123456789ab")
    assert again.copy() == 1  # the status


def test_rows_of_which_no_parquet_is_made_are_copied(tmp_path: Path, address: str) -> None:
    def fetched() -> list[int]:
        there = tmp_path / "there" / "night"
        fetch_from(address, "night", lambda _: there)
        return numbers(Store(there.parent, there.name))

    store = run_of(tmp_path / "here", 1)
    copy = Mirror(store.path, address, "0123456789ab")
    with store:
        store.append(row(7, run="night"))
        assert copy.copy() == 2 and copy.copy() == 0
        copy.close()
        assert fetched() == [0, 7] and not copy.trouble
    copy.copy()
    assert fetched() == [0, 7]


def test_a_bucket_has_what_a_run_has_merged_once(tmp_path: Path, address: str) -> None:
    def plain(name: str) -> int:
        there = tmp_path / name
        fetch_from(address, "night", lambda _: there)
        return plain_rows(there)

    store = run_of(tmp_path / "here", 3)
    copy = Mirror(store.path, address, "0123456789ab")
    copy.copy()
    with store:
        store.compact()
    copy.copy()
    assert plain("at-once") == 3 and not copy.trouble
    with store:
        for number in (7, 8):
            store.append(row(number, run="night"))
            store.to_parquet()
        copy.copy()
        store.compact()
    again = Mirror(store.path, address, "0123456789ab")  # of a driver that comes later
    again.copy()
    assert plain("later") == 5 and not again.trouble
    assert again.copy() == 0


def test_a_bucket_keeps_rows_that_the_run_has_lost(tmp_path: Path, address: str) -> None:
    store = run_of(tmp_path / "here", 3)
    copy = Mirror(store.path, address, "0123456789ab")
    copy.copy()
    min(store.tables_path.iterdir()).unlink()
    with store:
        store.compact()
    copy.copy()
    there = tmp_path / "there" / "night"
    fetch_from(address, "night", lambda _: there)
    assert numbers(Store(there.parent, there.name)) == [0, 1, 2] and not copy.trouble


class Refusing:
    """A file system whose keys may not delete."""

    def __init__(self, files: Any) -> None:
        self.files, self.refuses = files, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def delete_file(self, path: str) -> None:
        if self.refuses:
            raise PermissionError(errno.EACCES, "Access Denied")
        self.files.delete_file(path)


def test_keys_that_may_not_delete_are_said(tmp_path: Path, address: str, monkeypatch) -> None:
    files, base = pyarrow.fs.FileSystem.from_uri(address)
    refusing = Refusing(files)
    patched = SimpleNamespace(from_uri=lambda _: (refusing, base))
    monkeypatch.setattr(pyarrow.fs, "FileSystem", patched)
    store = run_of(tmp_path, 2)
    copy = Mirror(store.path, address, "0123456789ab")
    copy.copy()
    with store:
        store.compact()
    assert copy.copy() == 1
    assert "has merged stay at s3://" in copy.trouble and "Access Denied" in copy.trouble
    refusing.refuses = False
    assert copy.copy() == 0 and not copy.trouble


def test_a_file_that_cannot_be_read_keeps_no_other_from_the_bucket(tmp_path, address) -> None:
    store = run_of(tmp_path, 2)
    copy = Mirror(store.path, address, "0123456789ab")
    first = min(store.tables_path.iterdir())
    with unreadable(lambda path: path == first):
        assert copy.copy() == 2 and f"{first} cannot be read" in copy.trouble
    assert copy.copy() == 1 and not copy.trouble


@pytest.mark.slow
def test_the_run_goes_on_while_the_bucket_is_away(tmp_path, address, server, monkeypatch) -> None:
    store = run_of(tmp_path, 1)
    second = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    second.start()  # on the same buckets
    port = second.get_host_and_port()[1]
    there = address.replace(f":{server.get_host_and_port()[1]}", f":{port}")
    copy = Mirror(store.path, there, "0123456789ab")
    second.stop()
    assert copy.copy() == 0
    assert "cannot be copied" in Mirror(store.path, there, "0123456789ab", again=True).trouble
    assert "cannot be copied to s3://" in copy.trouble and f"safe in {store.path}" in copy.trouble
    back = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    back.start()
    monkeypatch.setattr(remote, "INTERVAL_S", 0.01)
    copy.start()
    copy.close()
    back.stop()
    assert copy.trouble == ""
    assert Mirror(store.path, address, "0123456789ab").copy() == 1  # the rows are there


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, address: str) -> None:
    store = run_of(tmp_path, 1)
    Mirror(store.path, address, "0123456789ab")
    with pytest.raises(StoreError, match="has another run 'night'; choose another --run"):
        Mirror(store.path, address, "ba9876543210")
    with pytest.raises(StoreError, match="cannot be copied to s3://nowhere/x: "):
        Mirror(store.path, f"s3://nowhere/x?{address.partition('?')[2]}", "0")
    with pytest.raises(StoreError, match="is not an address for results"):
        Mirror(store.path, "s3://nights/x?colour=red", "0")
    assert shown_address("s3://KEY:SECRET@nights/x?region=eu") == "s3://<credentials>@nights/x"


@pytest.mark.slow
def test_a_run_with_an_address_has_rows_and_page_in_both_places(
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_workload.register(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIGHTGRID_RESULTS", raising=False)
    (tmp_path / "grid.yaml").write_text(f'results: "{address}"\n{NOTEBOOK_GRID}')
    assert main(["run", "grid.yaml", "--in-process", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "copied to s3://nights/" in printed and "endpoint" not in printed
    [here] = (tmp_path / "results").iterdir()
    shutil.move(here, tmp_path / "first")
    assert main(["fetch", here.name, "--address", address]) == 0
    assert contents(here) == contents(tmp_path / "first")
    assert run_files.REPORT in contents(here)


# ---------------------------------------------------------------- a copy


def fetch(run: Path, copy: Path) -> list[str]:
    return receive(travelling_files(run), lambda name: (run / name).read_bytes(), copy)


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "rows/../../evil.parquet", "/etc/evil"),
        *("driver.lock", "rows/.x.parquet", "trace-/x", "answer-x.yaml", "logs/evil.log"),
    ],
)
def test_a_sender_cannot_choose_where_a_file_goes(tmp_path: Path, name: str) -> None:
    assert receive([name], lambda _: b"evil", tmp_path / "copy") == []
    assert not any(tmp_path.iterdir())


def test_requests_that_cannot_be_listed_keep_no_rows_back(tmp_path: Path, monkeypatch) -> None:
    with Store(tmp_path, "night") as store:
        store.append(row(0))
    before, real = travelling_files(tmp_path / "night"), disk.names

    def names(directory: Path) -> list[str]:
        if directory.name == run_files.REQUESTS:
            raise PermissionError(errno.EACCES, "no")
        return real(directory)

    monkeypatch.setattr(disk, "names", names)
    assert travelling_files(tmp_path / "night") == before
    assert any(name.startswith(run_files.ROWS) for name in before)


def test_a_file_that_goes_meanwhile_is_left_out(tmp_path: Path) -> None:
    """As rows do when the run ends and compacts them."""
    run = run_of(tmp_path / "there", 2).path
    names = travelling_files(run)
    (run / names[0]).unlink()
    copy = tmp_path / "copy"
    assert receive(names, lambda name: (run / name).read_bytes(), copy) == names[1:]


def test_a_copy_never_mixes_with_another_run(tmp_path: Path) -> None:
    run_id = "0123456789ab"
    path = copy_directory(tmp_path, "night", "http://head:8265", run_id)
    assert copy_directory(tmp_path, "night", "http://head:8265", run_id) == path
    with pytest.raises(StoreError, match="a copy of another run; fetch into another"):
        copy_directory(tmp_path, "night", "http://head:8265", "ba9876543210")
    (tmp_path / "own" / run_files.ROWS).mkdir(parents=True)
    with pytest.raises(StoreError, match=r"a run of this machine; .*--as NAME"):
        copy_directory(tmp_path, "own", "http://head:8265", run_id)
    with pytest.raises(StoreError, match="cannot name"):
        copy_directory(tmp_path, "../night", "http://head:8265", run_id)
    path = copy_directory(tmp_path, "early", "http://head:8265", "")  # the run has no id yet
    for known in (run_id, "", run_id):
        assert copy_directory(tmp_path, "early", "http://head:8265", known) == path
    assert copied_id(path) == run_id


def test_a_copy_with_which_a_driver_has_gone_on_takes_nothing_more(tmp_path: Path) -> None:
    """Its files and those of the source would hold some rows twice."""
    run_id = "0123456789ab"
    copy_directory(tmp_path, "night", "http://head:8265", run_id)
    with Store(tmp_path, "night") as copy:
        (copy.path / run_files.RUN_ID).unlink()
        with pytest.raises(StoreError, match=r"has gone on with .*--as NAME"):
            copy_directory(tmp_path, "night", "http://head:8265", run_id)
    with copy:
        pass
    with pytest.raises(StoreError, match=r"has gone on with .*--as NAME"):
        copy_directory(tmp_path, "night", "http://head:8265", run_id)
    assert copy_directory(tmp_path, "again", "http://head:8265", run_id).is_dir()


def test_what_is_foreign_among_the_rows_keeps_nothing_from_its_way(tmp_path: Path) -> None:
    run = run_of(tmp_path / "there", 2).path
    (run / run_files.ROWS / "a.parquet").mkdir()
    (run / run_files.ROWS / "a note.parquet").write_bytes(b"mine")
    assert len(fetch(run, tmp_path / "copy")) == 3


def test_a_copy_has_the_rows_of_a_log_once(tmp_path: Path) -> None:
    def fetched() -> list[int]:
        fetch(store.path, tmp_path / "copy")
        return numbers(Store(tmp_path, "copy"))

    with Store(tmp_path, "night") as store:
        store.append(row(1))
        assert fetched() == [1]
        store.append(row(2))
        assert fetched() == [1, 2]
        store.to_parquet()
        assert fetched() == [1, 2]
        for number in range(3, 13):
            store.append(row(number))
            store.to_parquet()
        assert fetched() == list(range(1, 13)) and plain_rows(tmp_path / "copy") == 12
    assert len(list(store.tables_path.iterdir())) == 1  # merged, as there were ten and more
    assert fetched() == list(range(1, 13)) and plain_rows(tmp_path / "copy") == 12
    copied = Store.existing(tmp_path, "copy")
    assert len(copied.history()) == 12 and copied.read().damaged == ()


def test_a_copy_keeps_what_did_not_come_in_merged_files(tmp_path: Path) -> None:
    run, copy = run_of(tmp_path / "there", 3).path, tmp_path / "copy"
    fetch(run, copy)
    small = set(disk.names(copy / run_files.ROWS))
    lost = min((run / run_files.ROWS).iterdir())
    lost.rename(tmp_path / lost.name)
    with Store(run.parent, run.name) as store:
        store.append(row(7, run="night"))
        store.compact()

    def broken(name: str) -> bytes:
        raise ConnectionError(name)

    with pytest.raises(ConnectionError):  # an interrupted fetch
        receive(travelling_files(run), broken, copy)
    merged = min((run / run_files.ROWS).iterdir()).name
    names = [name for name in travelling_files(run) if not name.endswith(merged)]
    receive(names, lambda name: (run / name).read_bytes(), copy)  # which is listed without it
    assert set(disk.names(copy / run_files.ROWS)) == small
    receive(travelling_files(run), lambda name: b"torn", copy)
    assert small < set(disk.names(copy / run_files.ROWS))
    (copy / run_files.ROWS / merged).unlink()
    fetch(run, copy)
    assert set(disk.names(copy / run_files.ROWS)) == {lost.name, merged}  # which the source lost
    assert numbers(Store(tmp_path, "copy")) == [0, 1, 2, 7] and plain_rows(copy) == 4
