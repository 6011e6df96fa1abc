"""Simulated nights: whatever goes wrong, every job ends once and no row is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from defences import DEFENCES, Defence, caught_by
from disk_model import NOWHERE, SimulatedDisk
from exchange import run_exchange
from nights import run_night
from shapes import Tally

#: ``NIGHTGRID_SEED=17 pytest tests/night`` looks at other nights.
FIRST = int(os.environ.get("NIGHTGRID_SEED", "0"))
IN_MEMORY = 150
ON_DISK = 16
BATCH = 25

TOTAL = Tally()
CAUGHT: dict[str, tuple[int, str]] = {}


@pytest.fixture(scope="module", autouse=True)
def figures(request: pytest.FixtureRequest) -> object:
    yield
    lines = [str(TOTAL)]
    if CAUGHT:
        width = max(len(name) for name in CAUGHT)
        lines += [
            f"{name:{width}}  seed {seed:3}  without it: {what}"
            for name, (seed, what) in CAUGHT.items()
        ]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


def batches(nights: int, size: int) -> list[object]:
    first, *others = range(FIRST, FIRST + nights, size)
    return [first, *(pytest.param(each, marks=pytest.mark.slow) for each in others)]


@pytest.mark.slow
@pytest.mark.parametrize("first", batches(IN_MEMORY, BATCH))
def test_nights_with_many_events(first: int) -> None:
    for seed in range(first, first + BATCH):
        TOTAL.add(run_night(seed, on_disk=False))


@pytest.mark.slow
@pytest.mark.parametrize("first", batches(ON_DISK, 8))
def test_nights_with_the_real_store_on_a_disk_that_fails(first: int) -> None:
    for seed in range(first, first + 8):
        TOTAL.add(run_night(seed, on_disk=True))


def test_requests_arrive_once_and_in_order_whatever_calls_are_lost() -> None:
    for seed in range(FIRST, FIRST + IN_MEMORY // 2):
        TOTAL.add(run_exchange(seed))


@pytest.mark.slow
def test_one_seed_is_one_night() -> None:
    assert run_night(11, on_disk=False) == run_night(11, on_disk=False)
    assert run_night(3, on_disk=True) == run_night(3, on_disk=True)


@pytest.mark.slow
@pytest.mark.parametrize("defence", DEFENCES, ids=lambda defence: defence.name)
def test_no_defence_can_be_taken_away(defence: Defence) -> None:
    found = caught_by(defence)
    assert found is not None, f"nothing shows what {defence.name!r} is good for"
    CAUGHT[defence.name] = found[0], found[1][:90]


@pytest.fixture
def disk() -> SimulatedDisk:
    from random import Random

    disk = SimulatedDisk(Random(0), lambda: None)
    disk.make_directory(NOWHERE)
    return disk


def put(disk: SimulatedDisk, path: Path, data: bytes, *, sync: bool) -> None:
    handle = disk.create(path)
    disk.write(handle, data)
    if sync:
        disk.sync(handle)
    disk.close(handle)


def test_what_was_synced_survives_a_power_failure(disk: SimulatedDisk) -> None:
    put(disk, NOWHERE / "file", b"content", sync=True)
    disk.sync_directory(NOWHERE)
    disk.lose_power()
    assert disk.read(NOWHERE / "file") == b"content"


def test_what_was_not_synced_may_be_lost_in_every_way(disk: SimulatedDisk) -> None:
    seen = set()
    for _ in range(300):
        put(disk, NOWHERE / "file", b"content", sync=False)
        disk.lose_power()
        seen.add(disk.read(NOWHERE / "file") if disk.is_there(NOWHERE / "file") else None)
        if disk.is_there(NOWHERE / "file"):
            disk.remove(NOWHERE / "file")
        disk.sync_directory(NOWHERE)
    assert {None, b"", b"content"} <= seen
    assert any(each and each != b"content" and b"content".startswith(each) for each in seen)
    assert any(each and each.endswith(b"\0") for each in seen)


def test_a_rename_is_seen_whole_or_not_at_all(disk: SimulatedDisk) -> None:
    for _ in range(50):
        put(disk, NOWHERE / "old", b"content", sync=True)
        disk.sync_directory(NOWHERE)
        disk.rename(NOWHERE / "old", NOWHERE / "new")
        disk.lose_power()
        assert len(disk.names(NOWHERE)) == 1
        disk.remove(NOWHERE / disk.names(NOWHERE)[0])


def test_a_full_disk_takes_what_fits(disk: SimulatedDisk) -> None:
    disk.room = 4
    handle = disk.create(NOWHERE / "file")
    assert disk.write(handle, b"content") == 4
    with pytest.raises(OSError, match="No space left"):
        disk.write(handle, b"ent")
