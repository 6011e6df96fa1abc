"""The peak of this process's memory, which has to fall again between jobs."""

from __future__ import annotations

import threading
import time

import pytest

from workloads.devices.monitoring import host_memory
from workloads.devices.monitoring.host_memory import HostMemoryPeak, resident_bytes

BLOCK = 80_000_000


def touch() -> None:
    block = bytearray(BLOCK)
    time.sleep(0.2)  # long enough for the sampling way to see it
    del block


@pytest.mark.parametrize("permitted", [True, False], ids=["high-water mark", "sampling"])
def test_a_peak_is_seen_and_forgotten(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was freed inside still counts; the next measurement starts from what is left."""
    if not permitted:
        monkeypatch.setattr(host_memory, "reset_high_water", lambda: False)
    before = resident_bytes()
    with HostMemoryPeak() as first:
        touch()
    assert first.method in ("VmHWM", "sampled")
    if not permitted:
        assert first.method == "sampled"
    assert first.bytes - before > 0.8 * BLOCK
    with HostMemoryPeak() as second:
        pass
    assert second.bytes < first.bytes - 0.5 * BLOCK


def test_a_peak_is_never_below_what_is_resident() -> None:
    """A block that stays is in the peak as well."""
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

    monkeypatch.setattr(host_memory, "reset_high_water", lambda: False)
    monkeypatch.setattr(host_memory, "resident_bytes", slowly)
    with HostMemoryPeak():
        began.wait()
    assert over.is_set()
