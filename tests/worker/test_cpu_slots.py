"""CPU slots: real processes and the kernel's own locks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until

from orchestrator.worker import cpu_slots
from orchestrator.worker.cpu_slots import Locks, Slot, cpu_slot
from workloads.bench.collective import OneCard

CORES = (0, 2, 5)


def _take_slots(path: Path, cores: tuple[int, ...], channel: Connection) -> None:
    """The work of a ``Taker`` in its process: a slot for each number of threads that it gets."""
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
        """Begin to wait for a slot."""
        self.channel.send(threads)
        assert self.channel.recv() == "queued"
        self.threads = threads

    def look(self, seconds: float) -> bool:
        """Return whether it has its slot within this time."""
        if not self.has_slot and self.channel.poll(seconds):
            assert self.channel.recv() == "slot"
            self.has_slot = True
        return self.has_slot

    def leave(self) -> None:
        """Give the slot back."""
        self.channel.send("leave")
        assert self.channel.recv() == "left"
        self.threads, self.has_slot = 0, False

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        self.threads, self.has_slot = 0, False


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for files of locks."""
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def takers(directory: Path) -> Iterator[list[Taker]]:
    """Six processes, of two drivers for all they know, with one file."""
    made = [Taker(directory / "shared.lock") for _ in range(6)]
    yield made
    for taker in made:
        taker.end()


def has_slot(taker: Taker) -> bool:
    return taker.look(patience(20))


def waits(taker: Taker) -> bool:
    return not taker.look(0.3)


def used(takers: list[Taker]) -> int:
    """Cores of those that have their turn."""
    return sum(min(each.threads, len(CORES)) for each in takers if each.has_slot)


@pytest.mark.slow
def test_never_more_threads_than_cores_and_every_job_gets_its_slot(takers: list[Taker]) -> None:
    """Forty jobs of one to five threads in a random order: those that have their slot leave a core
    to the rest of the host unless one needs them all."""
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
    """Of a gang of all cores, which waits for one core: nobody overtakes it, and when it is killed
    the next one goes on; a killed holder's core is free at once."""
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
    """A holder and the first of the queue are stopped by a signal: the next one takes its slot, and
    they go on when they are let go on."""
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
    """Ranks of a gang in threads, which exchange values as torch.distributed would."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.rounds = 0

    def rank(self, number: int) -> Any:
        gang = self

        class Rank(OneCard):
            def gather(self, value: Any) -> list[Any]:
                gang.values[number] = value
                gang.barrier.wait(patience(60))
                found = list(gang.values)
                gang.barrier.wait(patience(60))
                return found

        return Rank()


def test_a_gang_takes_its_slot_as_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two cores: while another process has one, none of the ranks begins; then all
    do, marked as oversubscribed, and the whole wait is told by each."""
    monkeypatch.setattr(cpu_slots, "ROUND_S", 0.1)
    path = directory / "gang.lock"
    other = Taker(path, (0, 1))
    other.queue(1)
    assert has_slot(other)
    gang = Gang(3)
    began: list[Any] = []
    done = threading.Event()

    asking = threading.Barrier(4)

    def run(number: int) -> None:
        asking.wait(patience(60))
        with cpu_slot(gang.rank(number), number, 1, (0, 1), path=path) as mine:
            began.append(mine)
            done.wait(patience(60))

    ranks = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for each in ranks:
        each.start()
    asking.wait(patience(60))
    time.sleep(0.5)  # a few rounds
    assert not began
    other.leave()
    deadline = time.monotonic() + patience(20)
    while len(began) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [each.oversubscribed for each in began] == [True] * 3
    assert all(each.waited_s > 0.1 for each in began)
    other.queue(1)
    assert waits(other)
    done.set()
    for each in ranks:
        each.join()
    assert has_slot(other)
    other.end()


def test_a_gang_of_two_hosts_takes_its_slot_on_both(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with a file of locks each: the gang begins when it has both, takes the first one
    while it waits for the second, and keeps others from both."""
    monkeypatch.setattr(cpu_slots, "ROUND_S", 0.1)
    paths = sorted(
        (directory / "here.lock", directory / "there.lock"),
        key=lambda path: Locks.of(path).identity,
    )
    others = [Taker(path, (0,)) for path in paths]
    others[1].queue(1)
    assert has_slot(others[1])
    gang, begun, done = Gang(2), threading.Barrier(3), threading.Event()

    def run(number: int) -> None:
        with cpu_slot(gang.rank(number), number, 1, (0,), path=paths[1 - number]):
            begun.wait(patience(60))
            done.wait(patience(60))

    ranks = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for each in ranks:
        each.start()
    time.sleep(0.3)
    others[0].queue(1)
    assert waits(others[0]) and begun.n_waiting == 0
    others[1].leave()
    begun.wait(patience(20))
    others[1].queue(1)
    assert waits(others[0]) and waits(others[1])
    done.set()
    assert has_slot(others[0]) and has_slot(others[1])
    for rank, other in zip(ranks, others, strict=True):
        rank.join()
        other.end()


def test_a_job_goes_on_where_there_can_be_no_slots(tmp_path: Path) -> None:
    """No directory, a link and a pipe in the place of the file."""
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
    """A link, a pipe, a file and a directory that others may enter are passed over, so that nobody
    else can take a lock and stop a run; without a place of its own a job has no slot."""
    monkeypatch.delenv(cpu_slots.VARIABLE)
    planted, own = tmp_path / "planted", tmp_path / "below" / "own"
    monkeypatch.setattr(cpu_slots, "directories", lambda: (planted, own))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    for plant in (
        lambda: planted.symlink_to(elsewhere),
        lambda: os.mkfifo(planted),
        planted.touch,
        lambda: (planted.mkdir(), planted.chmod(0o777)),
    ):
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


def test_the_environment_may_name_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that name one wait for none of the user's others, as these tests do."""
    path = tmp_path / "named.lock"
    monkeypatch.setenv(cpu_slots.VARIABLE, str(path))
    other = Taker(path, (0,))
    with cpu_slot(OneCard(), 0, 1, (0,)):
        other.queue(1)
        assert waits(other)
    assert has_slot(other)
    other.end()


def test_a_file_that_was_tidied_up_is_made_anew(tmp_path: Path) -> None:
    """A new file takes the place of one that was removed, for whoever comes next."""
    path = tmp_path / "slots.lock"
    first = Locks.of(path)
    assert Locks.of(path) is first
    path.unlink()
    assert Locks.of(path) is not first and path.exists()


def test_nobody_waits_for_ever(directory: Path) -> None:
    """After hours without any change ahead of it a job goes on without a slot."""
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
