"""CPU slots: real processes and the kernel's own locks."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import patience, until

from orchestrator.core.readings import SHORTEST_OF_HOST_S, ProcessorUse, use_between
from orchestrator.worker import cpu_slots
from orchestrator.worker.cpu_slots import (
    Locks,
    Slot,
    cpu_slot,
    processor_reading,
    thread_times,
)
from workloads.bench.collective import OneCard

CORES = (0, 2, 5)


def _take_slots(path: Path, cores: tuple[int, ...], channel: Connection) -> None:
    locks = Locks.of(path)
    with contextlib.suppress(EOFError):
        while threads := channel.recv():
            slot = Slot(locks, cores, threads)
            channel.send("queued")
            while not slot.wait(3600):
                pass
            channel.send("slot")
            channel.recv()
            slot.release()
            channel.send("left")


class Taker:
    """A process that takes slots."""

    def __init__(self, path: Path, cores: tuple[int, ...] = CORES) -> None:
        context = multiprocessing.get_context("fork")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_take_slots, args=(path, cores, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.threads = 0  # of the slot that it has or waits for
        self.has_slot = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def queue(self, threads: int) -> None:
        self.channel.send(threads)
        assert self.channel.recv() == "queued"
        self.threads = threads

    def look(self, seconds: float) -> bool:
        if not self.has_slot and self.channel.poll(seconds):
            assert self.channel.recv() == "slot"
            self.has_slot = True
        return self.has_slot

    def leave(self) -> None:
        self.channel.send("leave")
        assert self.channel.recv() == "left"
        self.threads, self.has_slot = 0, False

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.threads, self.has_slot = 0, False


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def takers(directory: Path) -> Iterator[list[Taker]]:
    made = [Taker(directory / "shared.lock") for _ in range(6)]
    yield made
    for taker in made:
        taker.end()


def has_slot(taker: Taker) -> bool:
    return taker.look(patience(20))


def waits(taker: Taker) -> bool:
    return not taker.look(0.3)


def used(takers: list[Taker]) -> int:
    return sum(min(each.threads, len(CORES)) for each in takers if each.has_slot)


@pytest.mark.slow
def test_never_more_threads_than_cores_and_every_job_gets_its_slot(takers: list[Taker]) -> None:
    """Those that have their slot leave a core to the rest of the host unless one needs them all."""
    chance = random.Random(15)
    served = 0
    while served < 40:
        idle = [taker for taker in takers if not taker.threads]
        if idle and chance.random() < 0.7:
            chance.choice(idle).queue(chance.choice((1, 1, 1, 2, 3, 5)))
        waiting = [taker for taker in takers if taker.threads and not taker.has_slot]
        working = [taker for taker in takers if taker.has_slot]
        if waiting and not working:
            assert until(lambda w=waiting: any(taker.look(0) for taker in w), patience(20))
        working = [taker for taker in takers if taker.look(0)]
        assert used(takers) < len(CORES) or len(working) == 1
        if working and chance.random() < 0.7:
            chance.choice(working).leave()
            served += 1
    while taken := [taker for taker in takers if taker.threads]:
        assert until(lambda t=taken: any(taker.look(0) for taker in t), patience(20))
        next(taker for taker in taken if taker.has_slot).leave()


def test_a_killed_holder_and_a_killed_gang_that_waits_free_what_they_had(directory: Path) -> None:
    path = directory / "killed.lock"
    one, gang, late = (Taker(path) for _ in range(3))
    one.queue(1)
    assert has_slot(one)
    gang.queue(3)
    late.queue(1)
    assert waits(gang) and waits(late)  # two cores are free: neither half a gang, nor overtaking
    gang.end()
    assert has_slot(late)
    again = Taker(path)
    again.queue(3)
    one.end()
    assert waits(again)
    late.end()
    assert has_slot(again)
    again.end()


def test_stopped_processes_hold_up_nobody(directory: Path) -> None:
    path = directory / "stopped.lock"
    holder, first, second = (Taker(path, (0,)) for _ in range(3))
    holder.queue(1)
    assert has_slot(holder)
    first.queue(1)
    assert waits(first)
    for each in (first, holder):
        os.kill(each.pid, signal.SIGSTOP)
        while Path(f"/proc/{each.pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
    second.queue(1)
    assert has_slot(second)
    for each in (holder, first):
        os.kill(each.pid, signal.SIGCONT)
    assert waits(first)
    holder.leave()
    assert has_slot(first)
    second.leave()
    for each in (holder, first, second):
        each.end()


class Gang:
    """Ranks in threads, which exchange values as torch.distributed would: each asks for a slot of
    one thread, notes it in ``began``, and keeps it until ``done``."""

    def __init__(self, cores: tuple[int, ...], *paths: Path) -> None:
        self.values: list[Any] = [None] * len(paths)
        self.barrier = threading.Barrier(len(paths))
        self.began: list[Any] = []
        self.done = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(number, cores, path))
            for number, path in enumerate(paths)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int, cores: tuple[int, ...], path: Path) -> None:
        gang = self

        class Rank(OneCard):
            def gather(self, value: Any) -> list[Any]:
                gang.values[number] = value
                gang.barrier.wait(patience(60))
                found = list(gang.values)
                gang.barrier.wait(patience(60))
                return found

        with cpu_slot(Rank(), number, 1, cores, path=path) as mine:
            self.began.append(mine)
            self.done.wait(patience(60))

    def all_began(self) -> bool:
        return until(lambda: len(self.began) == len(self.threads), 20)

    def end(self) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join()


def test_a_gang_takes_its_slot_as_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two cores: while another process has one, none of the ranks begins."""
    monkeypatch.setattr(cpu_slots, "ROUND_S", 0.1)
    path = directory / "gang.lock"
    other = Taker(path, (0, 1))
    other.queue(1)
    assert has_slot(other)
    gang = Gang((0, 1), *[path] * 3)
    time.sleep(0.4)  # a few rounds
    assert not gang.began
    other.leave()
    assert gang.all_began() and [each.oversubscribed for each in gang.began] == [True] * 3
    assert all(each.waited_s > 0.1 for each in gang.began)
    other.queue(1)
    assert waits(other)
    gang.end()
    assert has_slot(other)
    other.end()


def test_a_gang_of_two_hosts_takes_its_slot_on_both(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the first one while it waits for the second, and keeps others from both."""
    monkeypatch.setattr(cpu_slots, "ROUND_S", 0.1)
    first, second = sorted(
        (directory / "here.lock", directory / "there.lock"),
        key=lambda path: Locks.of(path).identity,
    )
    on_first, on_second = Taker(first, (0,)), Taker(second, (0,))
    on_second.queue(1)
    assert has_slot(on_second)
    gang = Gang((0,), second, first)
    time.sleep(0.3)
    on_first.queue(1)
    assert waits(on_first) and not gang.began
    on_second.leave()
    assert gang.all_began()
    on_second.queue(1)
    assert waits(on_first) and waits(on_second)
    gang.end()
    assert has_slot(on_first) and has_slot(on_second)
    on_first.end()
    on_second.end()


def test_a_job_goes_on_where_there_can_be_no_slots(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target")
    os.mkfifo(pipe)
    for path in (tmp_path / "nowhere" / "slots.lock", link, pipe):
        with cpu_slot(OneCard(), 0, 1, (0,), path=path) as mine:
            assert mine is None
    assert not (tmp_path / "target").exists()


def test_slots_lie_in_a_directory_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cpu_slots.VARIABLE)
    planted, own = tmp_path / "planted", tmp_path / "below" / "own"
    monkeypatch.setattr(cpu_slots, "directories", lambda: (planted, own))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    plants: list[Callable[[], object]] = [
        lambda: planted.symlink_to(elsewhere),
        lambda: os.mkfifo(planted),
        planted.touch,
        lambda: (planted.mkdir(), planted.chmod(0o777)),
    ]
    if os.geteuid() == 0:  # may give it to another user
        plants.append(lambda: (planted.mkdir(mode=0o700), os.chown(planted, 4711, -1)))
    for plant in plants:
        plant()
        with cpu_slot(OneCard(), 0, 1, (0,)) as mine:
            assert mine is not None and not mine.oversubscribed
        assert not any(elsewhere.iterdir()) and any(own.iterdir())
        if planted.is_dir() and not planted.is_symlink():
            assert not any(planted.iterdir())
            planted.rmdir()
        else:
            planted.unlink()
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o755)
    planted.touch()
    with cpu_slot(OneCard(), 0, 1, (0,)) as mine:
        assert mine is None
    monkeypatch.setenv(cpu_slots.VARIABLE, str(tmp_path / "named.lock"))
    with cpu_slot(OneCard(), 0, 1, (0,)) as mine:
        assert mine is not None and (tmp_path / "named.lock").exists()


def test_a_file_that_was_tidied_up_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "slots.lock"
    first = Locks.of(path)
    assert Locks.of(path) is first
    path.unlink()
    assert Locks.of(path) is not first and path.exists()


def test_nobody_waits_for_ever(directory: Path) -> None:
    path = directory / "patience.lock"
    holder = Taker(path, (0,))
    holder.queue(1)
    assert has_slot(holder)
    now = [0.0]

    def clock() -> float:
        now[0] += 600.0
        return now[0]

    slot = Slot(Locks.of(path), (0,), 1, clock)
    while not slot.wait(0.0):
        assert now[0] < 2 * cpu_slots.PATIENCE_S
    assert now[0] > cpu_slots.PATIENCE_S
    slot.release()
    holder.end()


# ---------------------------------------------------------------- processor readings

BUSY_S = 0.6
CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

counted = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting"
)


def _spend(busy: bool, channel: Connection) -> None:
    os.sched_setaffinity(0, {CORE})
    channel.send("ready")
    channel.recv()
    before = processor_reading()
    if busy:
        while time.monotonic() - before.at < BUSY_S:
            pass
    else:
        time.sleep(BUSY_S)
    channel.send(use_between(before, processor_reading()))


def _together(*busy: bool) -> list[ProcessorUse]:
    context = multiprocessing.get_context("fork")
    channels, processes = [], []
    for each in busy:
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_spend, args=(each, theirs), daemon=True))
        processes[-1].start()
        channels.append(mine)
    for channel in channels:
        assert channel.recv() == "ready"
    for channel in channels:
        channel.send("go")
    found = [channel.recv() for channel in channels]
    for process in processes:
        process.join()
    return found


@counted
def test_a_process_beside_a_busy_one_waits_and_one_that_sleeps_does_not() -> None:
    """Two of three wait for about half of the time, or more under load."""
    first, second, asleep = _together(True, True, False)
    for use in (first, second):
        assert use.wait_share is not None and use.wait_share > 0.3
        assert use.cores < 0.7
        assert use.cores + use.wait_share == pytest.approx(1.0, abs=0.15)
    assert asleep.wait_share is not None and asleep.wait_share < 0.05
    assert asleep.cores < 0.05
    assert first.host_load is not None and 0 < first.host_load <= (os.cpu_count() or 1) * 1.1
    assert first.stolen_share is not None and 0 <= first.stolen_share <= 1


def test_kernels_that_count_nothing_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("user", "nice", "system", "irq", "softirq", "idle", "iowait", "steal")
    monkeypatch.setattr("psutil.cpu_times", lambda: SimpleNamespace(**dict.fromkeys(kinds, 0.0)))
    assert processor_reading().host is None
    assert thread_times(tmp_path / "none") is None
    (tmp_path / "7").mkdir()
    assert thread_times(tmp_path) is None
    for text in ("0 0 0\n", "nonsense\n"):
        (tmp_path / "7" / "schedstat").write_text(text)
        assert thread_times(tmp_path) is None
    (tmp_path / "7" / "schedstat").write_text("5000000000 1000000000 12\n")
    found = thread_times(tmp_path)
    assert found is not None and (found[7].ran_s, found[7].waited_s) == (5.0, 1.0)


@counted
def test_the_host_is_not_read_for_a_time_too_short_to_say_anything() -> None:
    before = processor_reading()
    assert before.host is not None
    assert processor_reading(before).host is None
    earlier = dataclasses.replace(before, at=before.at - SHORTEST_OF_HOST_S)
    assert processor_reading(earlier).host is not None
