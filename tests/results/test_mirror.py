"""The copy of a run's results in a bucket: moto's S3 server over HTTP, spoken to by pyarrow."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_workload
from example_grids import NOTEBOOK_GRID
from measurements import row
from moto.server import ThreadedMotoServer

from orchestrator.cli.main import main
from orchestrator.core.errors import StoreError
from orchestrator.results import disk, mirror, paths
from orchestrator.results.mirror import Mirror, fetch_from, shown
from orchestrator.results.parcels import digests
from orchestrator.results.store import Store

BUCKET = "nights"


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    """An S3 server on a port of this machine's loopback, with a bucket."""
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
def address(
    server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """An address in the bucket that no other test has."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    host, port = server.get_host_and_port()
    where = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    return f"s3://{BUCKET}/{request.node.name}?{where}"


def run_of(results: Path, rows: int) -> Store:
    store = Store.open(results, "night")
    with store:
        for number in range(rows):
            store.append(row(number, run="night"))
            store.to_parquet()
        store.write_file(paths.STATUS, "{}")
    return store


def test_a_copy_follows_the_run_and_comes_back(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is new is copied, and nothing twice; fetched elsewhere it reads as the run does, and a
    second fetch brings what has come meanwhile."""
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
    """A log that is still there at the next look, or at the end, goes there as it is; when it has
    become Parquet, each row is there once."""

    def fetched() -> list[int]:
        there = tmp_path / "there" / "night"
        fetch_from(address, "night", lambda _: there)
        rows = Store.existing(there.parent, "night").measurements()
        return sorted((each.batch_size or 0) - 1 for each in rows)

    store = run_of(tmp_path / "here", 1)
    copy = Mirror(store.path, address, "0123456789ab")
    with store:
        store.append(row(7, run="night"))
        assert copy.copy() == 2 and copy.copy() == 1 and copy.copy() == 0
        assert fetched() == [0, 7]
        store.compact()
        store.append(row(8, run="night"))
        copy.close()
        assert fetched() == [0, 7, 8] and not copy.trouble
    copy.copy()
    assert fetched() == [0, 7, 8]


def test_a_file_that_cannot_be_read_keeps_no_other_from_the_bucket(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named while it cannot be read, and copied when it can."""
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
def test_the_run_goes_on_while_the_bucket_is_away(
    tmp_path: Path, address: str, server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, where the rows are safe is said, and the next try brings what is missing."""
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
    monkeypatch.setattr(mirror, "INTERVAL_S", 0.01)
    copy.start()
    copy.close()
    back.stop()
    assert copy.trouble == ""
    assert Mirror(store.path, address, "0123456789ab").copy() == 1  # the rows are there


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, address: str) -> None:
    """A bucket that is not there, another run of this name, an address of no store."""
    store = run_of(tmp_path, 1)
    Mirror(store.path, address, "0123456789ab")
    with pytest.raises(StoreError, match="has another run 'night'; choose another --run"):
        Mirror(store.path, address, "ba9876543210")
    with pytest.raises(StoreError, match="cannot be copied to s3://nowhere/x: "):
        Mirror(store.path, f"s3://nowhere/x?{address.partition('?')[2]}", "0")
    with pytest.raises(StoreError, match="is no address for results"):
        Mirror(store.path, "s3://nights/x?colour=red", "0")
    assert shown("s3://KEY:SECRET@nights/x?region=eu") == "s3://<credentials>@nights/x"


@pytest.mark.slow
def test_a_run_with_an_address_has_rows_and_page_in_both_places(
    tmp_path: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`nightgrid run` of a grid with ``results: s3://…``: here first, where results go without
    it."""
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
    assert paths.REPORT in digests(here)
