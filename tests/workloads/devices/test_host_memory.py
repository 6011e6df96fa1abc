"""The peak of this process's memory, which has to fall again between jobs."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import pytest
from patience import until

from workloads.devices.monitor import host
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes

BLOCK = 80_000_000


def touch(seen: Callable[[], object]) -> None:
    """Use new pages until they were seen: the heap could give some that are resident already."""
    with mmap.mmap(-1, BLOCK) as block:
        for page in range(0, BLOCK, mmap.PAGESIZE):
            block[page] = 1
        until(seen, 10)


@pytest.mark.parametrize("permitted", [True, False], ids=["high-water mark", "sampling"])
def test_a_peak_is_seen_and_forgotten(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:
        monkeypatch.setattr(host, "reset_high_water", lambda: False)
    before = resident_bytes()
    with HostMemoryPeak() as first:
        touch(lambda: first.method == "VmHWM" or first.bytes - before > 0.8 * BLOCK)
    assert first.method in ("VmHWM", "sampled")
    if not permitted:
        assert first.method == "sampled"
    assert first.bytes - before > 0.8 * BLOCK
    with HostMemoryPeak() as second:
        pass
    assert second.bytes < first.bytes - 0.5 * BLOCK


def test_a_peak_is_never_below_what_is_resident() -> None:
    with HostMemoryPeak() as peak:
        block = bytearray(BLOCK)
        assert peak.read() >= BLOCK
    assert peak.bytes >= resident_bytes() - BLOCK
    del block


def test_sampling_is_over_when_the_peak_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reading that began before could be kept in the place of the last one."""
    began, over = threading.Event(), threading.Event()

    def slowly() -> int:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            time.sleep(0.1)
            over.set()
        return 1

    monkeypatch.setattr(host, "reset_high_water", lambda: False)
    monkeypatch.setattr(host, "resident_bytes", slowly)
    with HostMemoryPeak():
        began.wait()
    assert over.is_set()
