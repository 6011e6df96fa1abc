"""Processor time of real processes, which the kernel counts."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from orchestrator.core.readings import SHORTEST_OF_HOST_S, ProcessorUse, use_between
from orchestrator.host.processor_time import (
    TICK_S,
    OwnThreads,
    host_time,
    processor_reading,
    thread_times,
)

BUSY_S = 0.6
CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting"
)


def _spend(busy: bool, channel: Connection) -> None:
    """Compute or sleep on the one core, and send what the process got of it."""
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
    """Shares of processes that computed or slept at the same time on one core."""
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


def test_a_process_beside_a_busy_one_waits_and_one_that_sleeps_does_not() -> None:
    """Three processes on one core, one of them asleep: the other two each wait for about half of
    the time, or more under load; the third waits for next to nothing."""
    first, second, asleep = _together(True, True, False)
    for use in (first, second):
        assert use.wait_share is not None and use.wait_share > 0.3
        assert use.cores < 0.7
        assert use.cores + use.wait_share == pytest.approx(1.0, abs=0.15)
    assert asleep.wait_share is not None and asleep.wait_share < 0.05
    assert asleep.cores < 0.05


def test_the_host_is_counted() -> None:
    """A process that computes keeps a processor of its host busy."""
    (use,) = _together(True)
    assert use.host_load is not None and 0 < use.host_load <= (os.cpu_count() or 1) * 1.1
    assert use.stolen_share is not None and 0 <= use.stolen_share <= 1


def test_kernels_that_count_nothing_say_so(tmp_path: Path) -> None:
    """Files that are absent, empty, all zero or of another form: not known, and no figure."""
    assert thread_times(tmp_path / "none") is None
    (tmp_path / "7").mkdir()
    assert thread_times(tmp_path) is None
    (tmp_path / "7" / "schedstat").write_text("0 0 0\n")
    assert thread_times(tmp_path) is None
    (tmp_path / "7" / "schedstat").write_text("nonsense\n")
    assert thread_times(tmp_path) is None
    (tmp_path / "7" / "schedstat").write_text("5000000000 1000000000 12\n")
    found = thread_times(tmp_path)
    assert found is not None and (found[7].ran_s, found[7].waited_s) == (5.0, 1.0)
    for text in ("", "cpu 1 2\n", "cpu 0 0 0 0 0 0 0 0 0 0\n", "cpu a b c d e f g h\n"):
        (tmp_path / "stat").write_text(text)
        assert host_time(tmp_path / "stat") is None
    (tmp_path / "stat").write_text("cpu  100 0 50 900 10 0 50 25 0 0\ncpu0 1\n")
    host, tick = host_time(tmp_path / "stat"), os.sysconf("SC_CLK_TCK")
    assert host is not None and (host.busy_s, host.stolen_s) == (200 / tick, 25 / tick)


def _numbers() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def _gone(thread: threading.Thread) -> bool:
    """Return whether the kernel has forgotten the thread, which takes a moment after its end."""
    deadline = time.monotonic() + 10
    while thread.native_id in _numbers() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread.native_id not in _numbers()


def _seen(threads: OwnThreads) -> set[int]:
    times = threads.times()
    assert times is not None
    return set(times)


def test_threads_that_come_and_go_are_seen() -> None:
    """One begins, another takes its place so that there are as many as before, it ends: each
    reading has the threads of its moment, with files that stay open and with new ones."""
    threads = OwnThreads()
    assert _seen(threads) == _seen(threads) == _numbers()
    for _ in range(3):
        go_on = threading.Event()
        helper = threading.Thread(target=go_on.wait)
        helper.start()
        assert helper.native_id in _seen(threads)
        assert _seen(threads) == _numbers()
        another = threading.Thread(target=go_on.wait)
        go_on.set()
        assert _gone(helper)
        go_on.clear()
        another.start()
        assert another.native_id in _seen(threads) and helper.native_id not in _seen(threads)
        go_on.set()
        assert _gone(another)
    assert _seen(threads) == _numbers()


def test_kept_files_tell_the_time_of_now() -> None:
    """What a thread has computed since the last reading is in the next."""
    threads, own = OwnThreads(), threading.get_native_id()
    before = (threads.times() or {})[own]
    began = time.thread_time()
    while time.thread_time() - began < 0.05:
        pass
    after = (threads.times() or {})[own]
    assert after.ran_s - before.ran_s == pytest.approx(0.05, abs=0.02)


def _abuse(directory: Path, channel: Connection) -> None:
    """In a forked process: read, close what is open, open other files there, and read again."""
    time.sleep(0.01)  # the kernel counts a new process at its first tick, or when it has slept
    threads = OwnThreads()
    channel.send((os.getpid(), _seen(threads), _seen(threads)))
    os.closerange(channel.fileno() + 1, 256)
    (directory / "mine").write_text("7 7\n")
    mine = [os.open(directory / "mine", os.O_RDONLY) for _ in range(64)]
    channel.send((_numbers(), _seen(threads), _seen(threads)))
    channel.send([os.pread(each, 9, 0) for each in mine])


def test_a_process_reads_its_own_threads_whatever_it_was_forked_from_and_has_closed(
    tmp_path: Path,
) -> None:
    """A job may close descriptors that it did not open; those that it opens then stay its own."""
    processor_reading()
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_abuse, args=(tmp_path, theirs), daemon=True)
    process.start()
    theirs.close()
    pid, *seen = mine.recv()
    assert seen == [{pid}] * 2
    numbers, *seen = mine.recv()
    assert seen == [numbers] * 2
    assert mine.recv() == [b"7 7\n"] * 64
    process.join()


def test_the_host_is_read_where_it_says_something() -> None:
    """Not at the end of a short part, and at its beginning once a tick; at the end of a longer
    one always."""
    first = processor_reading()
    again = processor_reading()
    assert first.host is not None and again.host is not None
    assert again.host == first.host or again.at - first.at > TICK_S
    assert processor_reading(first).host is None
    long_ago = dataclasses.replace(first, at=first.at - SHORTEST_OF_HOST_S)
    assert first.host.at is not None
    last = processor_reading(long_ago)
    assert last.host is not None and last.host.at == last.at
