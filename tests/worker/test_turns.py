"""Turns on the processors of a host: real processes and the kernel's own locks."""

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
from patience import patience

from orchestrator.worker import turns
from orchestrator.worker.turns import KeptTurn, Locks, Place, turn
from workloads.bench.collective import OneCard

CORES = (0, 2, 5)


def _take_turns(path: Path, cores: tuple[int, ...], channel: Connection) -> None:
    """The work of a ``Taker`` in its process: a turn for each number of threads that it is told."""
    locks = Locks.of(path)
    with contextlib.suppress(EOFError):
        while threads := channel.recv():
            place = Place(locks, cores, threads)
            channel.send("queued")
            while not place.wait(3600):
                pass
            channel.send("turn")
            channel.recv()
            place.leave()
            channel.send("left")


class Taker:
    """A process that takes turns."""

    def __init__(self, path: Path, cores: tuple[int, ...] = CORES) -> None:
        context = multiprocessing.get_context("fork")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_take_turns, args=(path, cores, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.threads = 0  # of the turn that it has or waits for
        self.has_turn = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def queue(self, threads: int) -> None:
        """Begin to wait for a turn."""
        self.channel.send(threads)
        assert self.channel.recv() == "queued"
        self.threads = threads

    def look(self, seconds: float) -> bool:
        """Return whether it has its turn within this time."""
        if not self.has_turn and self.channel.poll(seconds):
            assert self.channel.recv() == "turn"
            self.has_turn = True
        return self.has_turn

    def leave(self) -> None:
        """Give the turn back."""
        self.channel.send("leave")
        assert self.channel.recv() == "left"
        self.threads, self.has_turn = 0, False

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.join()
        self.threads, self.has_turn = 0, False


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for files of locks."""
    return tmp_path_factory.mktemp("turns")


@pytest.fixture(scope="module")
def takers(directory: Path) -> Iterator[list[Taker]]:
    """Six processes, of two drivers for all they know, with one file."""
    made = [Taker(directory / "shared.lock") for _ in range(6)]
    yield made
    for taker in made:
        taker.end()


def has_turn(taker: Taker) -> bool:
    return taker.look(patience(20))


def waits(taker: Taker) -> bool:
    return not taker.look(0.3)


def used(takers: list[Taker]) -> int:
    """Cores of those that have their turn."""
    return sum(min(each.threads, len(CORES)) for each in takers if each.has_turn)


def fits(taker: Taker, takers: list[Taker]) -> bool:
    """Return whether a turn beside those leaves a core free, or needs all cores and finds them
    free."""
    return used(takers) + min(taker.threads + 1, len(CORES)) <= len(CORES)


@pytest.mark.slow
def test_never_more_threads_than_cores_and_everybody_comes_to_turn(takers: list[Taker]) -> None:
    """Sixty jobs of one to five threads in a random order: those that have their turn leave a core
    to the rest of the host unless one needs them all, and turns come in the order of arrival."""
    chance = random.Random(15)
    waiting: list[Taker] = []
    served = 0
    while served < 60:
        idle = [each for each in takers if not each.threads]
        if idle and chance.random() < 0.6:
            taker = chance.choice(idle)
            taker.queue(chance.choice((1, 1, 1, 2, 3, 5)))
            waiting.append(taker)
        working = [each for each in takers if each.has_turn]
        while waiting and fits(waiting[0], takers):
            assert has_turn(waiting[0])
            working.append(waiting.pop(0))
        assert not any(each.look(0) for each in waiting)
        assert used(takers) < len(CORES) or len([each for each in takers if each.has_turn]) == 1
        if working and chance.random() < 0.7:
            chance.choice(working).leave()
            served += 1
    for taker in [each for each in takers if each.threads]:
        while not taker.has_turn:
            next(each for each in takers if each.has_turn).leave()
            assert has_turn(waiting.pop(0))
    for taker in takers:
        if taker.has_turn:
            taker.leave()


def test_a_killed_holder_and_a_killed_gang_that_waits_free_what_they_had(directory: Path) -> None:
    """Of a gang of all cores, which waits for one core: nobody overtakes it, and when it is killed
    the next one goes on; a killed holder's core is free at once."""
    path = directory / "killed.lock"
    one, gang, late = (Taker(path) for _ in range(3))
    one.queue(1)
    assert has_turn(one)
    gang.queue(3)
    late.queue(1)
    assert waits(gang) and waits(late)  # two cores are free: neither half a gang, nor overtaking
    gang.end()
    assert has_turn(late)
    again = Taker(path)
    again.queue(3)
    one.end()
    assert waits(again)
    late.end()
    assert has_turn(again)
    again.end()


def test_stopped_processes_hold_up_nobody(directory: Path) -> None:
    """A holder and the first of the queue are stopped by a signal: the next one takes its turn, and
    they go on when they are let go on."""
    path = directory / "stopped.lock"
    holder, first, second = (Taker(path, (0,)) for _ in range(3))
    holder.queue(1)
    assert has_turn(holder)
    first.queue(1)
    assert waits(first)
    for each in (first, holder):
        os.kill(each.pid, signal.SIGSTOP)
        while Path(f"/proc/{each.pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
    second.queue(1)
    assert has_turn(second)
    for each in (holder, first):
        os.kill(each.pid, signal.SIGCONT)
    assert waits(first)
    holder.leave()
    assert waits(first)  # the other lane of the core is in use
    second.leave()
    assert has_turn(first)
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


def test_a_gang_takes_its_turn_as_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two cores: while another process has one, none of the ranks begins; then all
    do, marked as oversubscribed, and the whole wait is told by each."""
    monkeypatch.setattr(turns, "ROUND_S", 0.1)
    path = directory / "gang.lock"
    other = Taker(path, (0, 1))
    other.queue(1)
    assert has_turn(other)
    gang = Gang(3)
    began: list[Any] = []
    done = threading.Event()

    asking = threading.Barrier(4)

    def run(number: int) -> None:
        asking.wait(patience(60))
        with turn(gang.rank(number), number, 1, (0, 1), paths=(path,)) as mine:
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
    assert has_turn(other)
    other.end()


def test_a_gang_of_two_hosts_takes_its_turn_on_both(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with a file of locks each: the gang begins when it has both, takes the first one
    while it waits for the second, and keeps others from both."""
    monkeypatch.setattr(turns, "ROUND_S", 0.1)
    paths = sorted(
        (directory / "here.lock", directory / "there.lock"),
        key=lambda path: Locks.of(path).identity,
    )
    others = [Taker(path, (0,)) for path in paths]
    others[1].queue(1)
    assert has_turn(others[1])
    gang, begun, done = Gang(2), threading.Barrier(3), threading.Event()

    def run(number: int) -> None:
        with turn(gang.rank(number), number, 1, (0,), paths=(paths[1 - number],)):
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
    assert has_turn(others[0]) and has_turn(others[1])
    for rank, other in zip(ranks, others, strict=True):
        rank.join()
        other.end()


def test_the_job_goes_on_where_there_is_no_file_of_locks(tmp_path: Path) -> None:
    """Of two files the first that can be opened counts; with neither there are no turns."""
    closed = tmp_path / "nowhere" / "turns.lock"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with turn(OneCard(), 0, 1, (0,), paths=(closed, link)) as mine:
        assert mine is None
    assert not (tmp_path / "target").exists()
    with turn(OneCard(), 0, 1, (0,), paths=(closed, tmp_path / "own.lock")) as mine:
        assert mine is not None and not mine.oversubscribed and mine.waited_s < patience(5)
    assert (tmp_path / "own.lock").stat().st_mode & 0o777 == 0o666


def test_the_file_is_the_hosts_unless_the_environment_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process of a host has the same by default; one that names another waits for none of
    the host's, as these tests do."""
    assert os.environ[turns.VARIABLE] not in map(str, turns.PATHS)
    path = tmp_path / "named.lock"
    monkeypatch.setenv(turns.VARIABLE, str(path))
    other = Taker(path, (0,))
    with turn(OneCard(), 0, 1, (0,)):
        other.queue(1)
        assert waits(other)
    assert has_turn(other)
    other.end()
    monkeypatch.delenv(turns.VARIABLE)
    assert turns.own_paths() == turns.PATHS
    assert str(turns.PATHS[0]) == "/tmp/nightgrid-turns.lock"


def test_a_file_that_was_tidied_up_is_made_anew(tmp_path: Path) -> None:
    """A new file takes the place of one that was removed, for whoever comes next."""
    path = tmp_path / "turns.lock"
    first = Locks.of(path)
    assert Locks.of(path) is first
    path.unlink()
    assert Locks.of(path) is not first and path.exists()


def test_nobody_waits_for_ever(directory: Path) -> None:
    """After hours without any change ahead of it a job goes on without a turn."""
    path = directory / "patience.lock"
    holder = Taker(path, (0,))
    holder.queue(1)
    assert has_turn(holder)
    now = [0.0]

    def clock() -> float:
        now[0] += 600.0
        return now[0]

    place = Place(Locks.of(path), (0,), 1, clock)
    while not place.wait(0.0):
        assert now[0] < 2 * turns.PATIENCE_S
    assert now[0] > turns.PATIENCE_S
    place.leave()
    holder.end()


def test_whoever_leaves_wakes_the_first_of_the_queue(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that would look again only after an hour hand turns on, in order, at once."""
    monkeypatch.setattr(turns, "FIRST_LOOK_S", 3600.0)
    monkeypatch.setattr(turns, "QUEUE_LOOK_S", 3600.0)
    path = directory / "woken.lock"
    holder, *others = (Taker(path, (0, 1)) for _ in range(4))
    holder.queue(1)
    assert has_turn(holder)
    for each in others:
        each.queue(1)
        assert waits(each)
    for each in others:
        holder.leave()
        assert has_turn(each)
        holder = each
    for each in others:
        each.end()


def test_one_turn_that_ends_makes_room_for_two(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes one of the cores that a wide job gave back wakes the next, which finds the gate
    open however long the waking takes. Nobody would look by itself within an hour."""
    wake = turns.wake

    def slowly(name: str) -> None:
        wake(name)
        time.sleep(0.2)

    monkeypatch.setattr(turns, "wake", slowly)
    monkeypatch.setattr(turns, "FIRST_LOOK_S", 3600.0)
    monkeypatch.setattr(turns, "QUEUE_LOOK_S", 3600.0)
    wide, *others = takers = [Taker(directory / "room.lock") for _ in range(3)]
    wide.queue(3)
    assert has_turn(wide)
    for each in others:
        each.queue(1)
        assert waits(each)
    wide.leave()
    assert all(map(has_turn, others))
    for each in takers:
        each.end()


def test_a_turn_lasts_for_jobs_that_follow_at_once_and_no_longer_than_that(
    directory: Path,
) -> None:
    """Another process waits meanwhile. It comes to turn when no job follows, when the time for
    several is over, and before a job of more threads."""
    path = directory / "kept.lock"
    now = [0.0]
    kept = KeptTurn(lambda: now[0])
    other = Taker(path, (0, 1))

    def job(threads: int = 1, *, another: bool) -> float:
        with turn(
            OneCard(), 0, threads, (0, 1), paths=[path], kept=kept, another_waits=lambda: another
        ) as had:
            assert had is not None
            now[0] += turns.KEPT_S / 3.5
            return had.waited_s

    job(another=True)
    other.queue(1)
    assert waits(other)
    assert job(another=True) == 0.0
    assert waits(other)
    job(another=False)
    assert has_turn(other)
    other.leave()

    job(another=True)
    other.queue(1)
    for _ in range(2):
        assert waits(other)
        assert job(another=True) == 0.0
    assert waits(other)
    job(another=True)  # the fourth
    assert has_turn(other)
    other.leave()

    job(another=True)
    other.queue(1)

    def have_it_and_leave() -> None:
        assert has_turn(other)
        other.leave()

    leaving = threading.Thread(target=have_it_and_leave)
    leaving.start()
    assert job(2, another=False) > 0.0
    leaving.join()
    kept.end()
    other.end()


def test_a_kept_turn_ends_with_a_job_that_fails(directory: Path) -> None:
    """Nothing follows upon it."""
    path = directory / "failing.lock"
    kept = KeptTurn()
    with contextlib.suppress(ValueError), turn(OneCard(), 0, 1, (0,), paths=[path], kept=kept):
        raise ValueError
    other = Taker(path, (0,))
    other.queue(1)
    assert has_turn(other)
    other.end()
