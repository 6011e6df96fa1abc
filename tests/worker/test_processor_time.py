"""Processor time of real processes, which the kernel counts."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from orchestrator.core.readings import SHORTEST_OF_HOST_S, ProcessorUse, use_between
from orchestrator.worker.cpu_slots import host_time, processor_reading, thread_times

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


def test_the_host_is_not_read_for_a_time_too_short_to_say_anything() -> None:
    """It is counted in ticks."""
    before = processor_reading()
    assert before.host is not None
    assert processor_reading(before).host is None
    earlier = dataclasses.replace(before, at=before.at - SHORTEST_OF_HOST_S)
    assert processor_reading(earlier).host is not None
