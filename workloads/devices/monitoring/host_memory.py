"""Peak resident memory of this process, for the duration of a job.

Linux keeps a high-water mark (VmHWM) and lets a process reset its own through
``/proc/self/clear_refs``, so the peak costs nothing while a job runs. Where that is not permitted,
a thread samples the resident size instead. ``ru_maxrss`` is no use in a warm worker: it never
falls.
"""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

_SAMPLE_INTERVAL_S = 0.05


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def _high_water_bytes() -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def reset_high_water() -> bool:
    """Start the mark again from the resident size; False where the kernel does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")
    except OSError:
        return False
    return _high_water_bytes() is not None


class HostMemoryPeak:
    """A context that knows the peak since it was entered.

    Example:
        >>> with HostMemoryPeak() as peak:
        ...     block = bytearray(10_000_000)
        >>> peak.bytes > 10_000_000
        True
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.method = ""  # "VmHWM" or "sampled"
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> HostMemoryPeak:
        self.bytes = resident_bytes()
        if reset_high_water():
            self.method = "VmHWM"
        else:
            self.method = "sampled"
            self._sampler = threading.Thread(
                target=self._sample, name="host-memory-peak", daemon=True
            )
            self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_INTERVAL_S):
            self.bytes = max(self.bytes, resident_bytes())

    def read(self) -> int:
        """The peak so far, in bytes."""
        now = _high_water_bytes() if self.method == "VmHWM" else None
        self.bytes = max(self.bytes, now or 0, resident_bytes())
        return self.bytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
        self.read()
