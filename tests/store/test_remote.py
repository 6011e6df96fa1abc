"""Copies of runs: in an object store, and through a channel of text."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_workload
from driver_cases import STATUS
from example_grids import NOTEBOOK_GRID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measurements import numbers, row
from moto.server import ThreadedMotoServer

from orchestrator.cli.main import main
from orchestrator.core.errors import StoreError
from orchestrator.store import disk, remote
from orchestrator.store import files as run_files
from orchestrator.store.remote import (
    MARK,
    PART_BYTES,
    Mirror,
    Receiver,
    copied_id,
    copy_directory,
    digests,
    fetch_from,
    lines_of,
    shown_address,
)
from orchestrator.store.remote import main as print_files
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


def test_a_copy_follows_the_run_and_comes_back(tmp_path, address, capsys) -> None:
    store = run_of(tmp_path / "here", 2)
    copy = Mirror(store.path, address, "0123456789ab")
    assert copy.copy() == 3 and copy.copy() == 0 and not copy.trouble
    there = ("--results", str(tmp_path / "there"))
    assert main(["fetch", "night", "--address", address, *there]) == 0
    fetched = Store.existing(tmp_path / "there", "night")
    assert digests(fetched.path) == digests(store.path)
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


def test_a_file_that_cannot_be_read_keeps_no_other_from_the_bucket(tmp_path, address, monkeypatch):
    store = run_of(tmp_path, 2)
    copy = Mirror(store.path, address, "0123456789ab")
    first, read = min(store.tables_path.iterdir()), disk.read

    def fail(path: Path, *arguments: Any) -> bytes:
        if path == first:
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *arguments)

    with monkeypatch.context() as broken:
        broken.setattr(disk, "read", fail)
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
    assert digests(here) == digests(tmp_path / "first")
    assert run_files.REPORT in digests(here)


# ---------------------------------------------------------------- a transfer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("there") / "night"
    (home / run_files.ROWS).mkdir(parents=True)
    for number, size in enumerate((0, 1, PART_BYTES, 3 * PART_BYTES + 7)):
        data = bytes(range(256)) * (size // 256 + 1)
        (home / run_files.ROWS / f"job-{number}.parquet").write_bytes(data[:size])
    (home / run_files.ROWS / ".job-9.parquet.partial").write_bytes(b"torn")
    (home / run_files.STATUS).write_text("{}")
    (home / run_files.trace_of("job-1")).write_bytes(b"two steps")
    (home / run_files.answer_file(1)).write_text("name: answer")
    (home / run_files.REPORT).write_text("<html>" * 1000)
    (home / run_files.LOCK).write_text("held")
    return home


def copy_in(directory: Path) -> Receiver:
    return Receiver(begin=lambda _: directory)


def text_of(run: Path, have: dict[str, str]) -> str:
    lines = ["2026-11-23 02:00:00,000\tINFO job_manager.py:568 -- Runtime env is setting up."]
    return "".join(f"{line}\n" for line in [*lines, *lines_of(run, have)])


def transfer(run: Path, copy: Path, change: Callable[[str], str] = str) -> Receiver:
    """Transfer what a copy lacks; ``change`` makes of the text what arrives."""
    receiver = copy_in(copy)
    receiver.feed(change(text_of(run, digests(copy))))
    return receiver


def test_what_comes_is_what_was_sent_and_only_what_is_lacking(run: Path, tmp_path: Path) -> None:
    receiver = transfer(run, tmp_path)
    assert receiver.finished and not receiver.damaged
    assert digests(tmp_path) == digests(run) and len(receiver.received) == 8
    assert not (tmp_path / run_files.LOCK).exists()
    again = transfer(run, tmp_path)
    assert again.finished and again.received == []
    (tmp_path / run_files.STATUS).write_text("older")
    assert transfer(run, tmp_path).received == [run_files.STATUS]


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_transfer_may_be_cut_and_damaged_anywhere(run, tmp_path, data) -> None:
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
    for start in range(0, len(sent), size):
        receiver.feed(sent[start : start + size])
    there = digests(run)
    for name, digest in digests(tmp_path / "copy").items():
        assert there[name] == digest
    rest = transfer(run, tmp_path / "copy")
    assert rest.finished and digests(tmp_path / "copy") == there


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "rows/../../evil.parquet", "/etc/evil"),
        *("driver.lock", "rows/.x.parquet", "trace-/x", "answer-x.yaml"),
    ],
)
def test_a_sender_cannot_choose_where_a_file_goes(tmp_path: Path, run: Path, name: str) -> None:
    with pytest.raises(StoreError, match="is not a file of a run"):
        transfer(run, tmp_path / "copy", lambda t: t.replace(f'"{run_files.REPORT}"', f'"{name}"'))
    assert not list(tmp_path.glob("*evil*"))


def test_a_file_whose_name_was_changed_on_its_way_is_damaged(tmp_path: Path, run: Path) -> None:
    for number, changed in enumerate(("rows/xob-1.parquet", "rows/+ob.parquet")):
        copy = tmp_path / str(number)
        name = next(each for each in digests(run) if each.startswith("rows/"))
        renamed = f'file {{"name": "{name}"', f'file {{"name": "{changed}"'
        receiver = transfer(run, copy, lambda text, renamed=renamed: text.replace(*renamed))
        assert receiver.damaged == [changed] and name not in digests(copy)
        transfer(run, copy)
        assert digests(copy) == digests(run)


def test_files_are_sent_until_the_run_has_finished_though_no_driver_has_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As between a driver that was killed and the next one, which its supervisor starts."""
    store = run_of(tmp_path, 1)

    def say(finished: bool) -> None:
        with store:
            status = dataclasses.replace(STATUS, run="night", finished=finished)
            store.write_file(run_files.STATUS, status.to_json())

    say(finished=False)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        say(finished=len(waits) > 1)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(remote, "time", clock)  # of this module alone: other threads sleep, too
    assert print_files(["night", "--results", str(tmp_path), "--every", "3"]) == 0
    assert waits == [3.0, 3.0]
    copy = copy_in(tmp_path / "there")
    copy.feed(capsys.readouterr().out)
    assert '"finished": true' in (tmp_path / "there" / run_files.STATUS).read_text()


def test_a_refusal_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_files(["night", "--results", str(tmp_path)]) == StoreError.exit_code
    printed = capsys.readouterr().out
    assert printed.startswith(f"{MARK} refused")
    with pytest.raises(StoreError, match="there are no runs in"):
        copy_in(tmp_path).feed(printed)


def test_a_file_that_goes_meanwhile_is_left_out(run, tmp_path, monkeypatch) -> None:
    """As rows do when the run ends and compacts them."""
    there = tmp_path / "there"
    shutil.copytree(run, there)

    def lines() -> Iterator[str]:
        for line in lines_of(there, {}):
            (there / run_files.ROWS / "job-3.parquet").unlink(missing_ok=True)
            yield line

    receiver = copy_in(tmp_path / "copy")
    receiver.feed("".join(f"{line}\n" for line in lines()))
    assert receiver.finished and "rows/job-3.parquet" not in receiver.received


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


def test_what_is_foreign_among_the_rows_keeps_nothing_from_its_way(run, tmp_path) -> None:
    there = tmp_path / "there"
    shutil.copytree(run, there)
    (there / run_files.ROWS / "a.parquet").mkdir()
    (there / run_files.ROWS / "a note.parquet").write_bytes(b"mine")
    assert transfer(there, tmp_path / "copy").finished
    assert digests(tmp_path / "copy") == digests(run)


@pytest.mark.parametrize("lost", ["nothing", " file "])
def test_a_copy_has_the_rows_of_a_log_once(tmp_path: Path, lost: str) -> None:
    copy = tmp_path / "copy"

    def fetch(lost: str = "nothing") -> list[int]:
        receiver = copy_in(copy)
        lines = lines_of(store.path, digests(copy))
        receiver.feed("".join(f"{line}\n" for line in lines if lost not in line))
        assert receiver.finished
        return numbers(Store(tmp_path, "copy"))

    with Store(tmp_path, "night") as store:
        store.append(row(1))
        assert fetch() == [1]
        store.append(row(2))
        assert fetch() == [1, 2]
        store.to_parquet()
        assert fetch(lost) == [1, 2]
        assert fetch() == [1, 2]
        store.append(row(3))
        store.compact()
        assert fetch() == [1, 2, 3]
    copied = Store.existing(tmp_path, "copy")
    assert len(copied.history()) == 3 and copied.read().damaged == ()
