"""Telemetry of a card, read from outside the process that owns it.

Reading within the process would disturb what it measures, and on Gaudi acquire the card; vendors'
tools (NVML, hl-smi) read the same counters. Unknown values are None, not 0.
"""

from __future__ import annotations

import csv
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTelemetry:
    """One card at one moment; None: unknown. ``energy_j`` counts from the load of the driver."""

    power_w: float | None = None
    power_of: str = ""  # source of that figure, if a card has several
    energy_j: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None  # share of time with work, 0 to 100
    sm_clock_mhz: float | None = None  # Gaudi: clock of the MMEs
    #: Throttle reasons in NVML's words; empty: not throttled.
    throttled: frozenset[str] | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    lost: str = ""  # why it cannot be used: it is lost, or wants a reset


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a card open."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def csv_rows(text: str) -> list[dict[str, str]]:
    """Parse a tool's CSV by its header's names, without their units; complaints may precede it."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    header: list[str] = []
    for row in rows:
        header = [name.partition("[")[0].strip() for name in row]
        if "index" in header:
            break
    return [{name: value.strip() for name, value in zip(header, row, strict=False)} for row in rows]


def number_of(text: str | None) -> float | None:
    """Parse a figure with or without unit, such as ``672 MiB``; None for ``[N/A]`` and the like."""
    words = (text or "").split()
    try:
        value = float(words[0]) if words else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def telemetry_of(row: Mapping[str, str], chip: str) -> CardTelemetry:
    """Return the figures in a row of a vendor's tool, which names its temperature by ``chip``."""
    used_mib, total_mib = (number_of(row.get(f"memory.{what}")) for what in ("used", "total"))
    return CardTelemetry(
        power_w=number_of(row.get("power.draw")),
        temperature_c=number_of(row.get(f"temperature.{chip}")),
        utilization_percent=number_of(row.get(f"utilization.{chip}")),
        memory_used_bytes=None if used_mib is None else int(used_mib * _MIB),
        memory_total_bytes=None if total_mib is None else int(total_mib * _MIB),
    )


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a vendor's library; None if it raises (no permission, no data, card lost)."""
    try:
        return function(*arguments)
    except Exception:
        return None


def library_telemetry(
    ask: Callable[..., Any],
    sensor: Any,
    clock_of: Any,
    chip: str,
    throttled: tuple[str, Mapping[str, int]],
) -> CardTelemetry:
    """Read a card by NVML, or by HLML, which copies it: power in mW, energy in mJ; None for what
    the driver refuses.

    ``ask`` calls the function ``nvmlDeviceGet…`` of a name with the card and further arguments;
    ``throttled`` is the function of the throttle reasons, and the bit of each.
    """
    power_mw, energy_mj = ask("PowerUsage"), ask("TotalEnergyConsumption")
    temperature, clock_mhz = ask("Temperature", sensor), ask("ClockInfo", clock_of)
    utilization, memory = ask("UtilizationRates"), ask("MemoryInfo")
    function, bits = throttled
    reasons = ask(function)
    return CardTelemetry(
        power_w=None if power_mw is None else power_mw / 1000,
        energy_j=None if energy_mj is None else energy_mj / 1000,
        temperature_c=None if temperature is None else float(temperature),
        utilization_percent=None if utilization is None else float(getattr(utilization, chip)),
        sm_clock_mhz=None if clock_mhz is None else float(clock_mhz),
        throttled=None if reasons is None else throttle_names(int(reasons), bits),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
    )


def throttle_names(reasons: int, bits: Mapping[str, int]) -> frozenset[str]:
    """Decode a driver's bits into names of throttle reasons."""
    return frozenset(name for name, bit in bits.items() if reasons & bit)


# Decide when a card is free, without acquiring it. Pure.
#
# The driver frees a killed process's memory with a delay, and process lists are unreliable: a
# container shows only its own, some virtual machines none. So memory in use is compared with the
# card's idle value, too.

#: A card with more in use is not idle. Idle cards: Gaudi 512 MiB, Gaudi2 768, Gaudi3 672, H100
#: about 520 of its driver. Smallest recorded job: 3,219 MiB; bare CUDA context: 300 to 600.
IDLE_MEMORY_BYTES = 1536 * _MIB
#: Variation of an idle card's memory.
SLACK_BYTES = 256 * _MIB
#: A smaller drop between two readings is noise.
_FALLS_BY_BYTES = 16 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """Processes and memory on a card, by its vendor's tools."""

    holders: tuple[Holder, ...] = ()  # other processes; empty also if unknown
    used_bytes: int | None = None  # memory in use, the driver's own included; None: unknown
    reserved_bytes: int = 0  # the driver's share, if reported separately
    display: bool = False  # drives a display, with unknown memory

    @property
    def taken_bytes(self) -> int | None:
        """Memory in use by anything but the driver."""
        return None if self.used_bytes is None else max(0, self.used_bytes - self.reserved_bytes)


def idle_memory_bytes(use: CardUse) -> int | None:
    """Return an idle card's memory in use; None if it is busy or unknown."""
    taken = use.taken_bytes
    if use.holders or taken is None or (taken > IDLE_MEMORY_BYTES and not use.display):
        return None
    return taken


def occupation(card_index: int, use: CardUse, idle_bytes: int | None = None) -> str | None:
    """Return why not to take a card, None if free or unknown; ``idle_bytes``: when idle."""
    if use.holders:
        return f"card {card_index} is held by {', '.join(map(str, use.holders))}"
    taken = use.taken_bytes
    most = math.inf if use.display else IDLE_MEMORY_BYTES
    if taken is None or taken <= (most if idle_bytes is None else idle_bytes + SLACK_BYTES):
        return None
    if idle_bytes is None:
        compared = f"an idle one less than {IDLE_MEMORY_BYTES // _MIB}"
    else:
        compared = f"{idle_bytes // _MIB} when it was idle"
    return (
        f"card {card_index} has {taken // _MIB} MiB in use ({compared}) by a process that is not "
        "seen from here"
    )


@dataclass(slots=True, kw_only=True)
class ReleaseWait:
    """Timeout for a card to become free, extended while its memory falls."""

    card_index: int
    idle_bytes: int | None = None
    patience_s: float = 30.0  # while memory and processes do not change
    longest_s: float = 300.0  # in total
    _began: float | None = None
    _deadline: float = 0.0
    _least_bytes: int | None = None
    _first_bytes: int | None = None

    def reason(self, now: float, use: CardUse | None) -> str | None:
        """Return why to keep waiting; None if the card is free. ``now`` is a monotonic time."""
        if use is None or (why := occupation(self.card_index, use, self.idle_bytes)) is None:
            return None
        taken = use.taken_bytes
        if self._began is None:
            self._began, self._deadline = now, now + self.patience_s
            self._first_bytes = self._least_bytes = taken
        elif taken is not None:
            least = self._least_bytes
            if least is None or taken <= least - _FALLS_BY_BYTES:
                self._deadline, self._least_bytes = now + self.patience_s, taken
        return why

    def is_over(self, now: float) -> bool:
        """Tell if the wait has timed out."""
        if self._began is None:
            return False
        return now >= min(self._deadline, self._began + self.longest_s)

    def duration(self, now: float) -> str:
        """Describe how long the wait was, and the change in memory."""
        if self._began is None:
            return ""
        text = f"after {now - self._began:.0f} s"
        first, least = self._first_bytes, self._least_bytes
        if first is not None and least is not None and least < first:
            text += f", in which its memory fell from {first // _MIB} to {least // _MIB} MiB"
        return text


# Peak resident memory of this process during a job: Linux's high-water mark (VmHWM), reset by
# ``/proc/self/clear_refs``, costs nothing; a thread samples where that is not permitted.
# ``ru_maxrss`` cannot be reset.

_SAMPLE_INTERVAL_S = 0.05


def resident_bytes() -> int:
    """Return this process's resident memory."""
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
    """Reset the high-water mark to the resident size; False if not permitted."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")
    except OSError:
        return False
    return _high_water_bytes() is not None


class HostMemoryPeak:
    """Context manager that measures the peak since it was entered, in ``bytes``."""

    def __init__(self) -> None:
        self.bytes = 0
        self.method = ""  # "VmHWM" or "sampled"
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> HostMemoryPeak:
        self.bytes = resident_bytes()
        self.method = "VmHWM" if reset_high_water() else "sampled"
        if self.method == "sampled":
            self._sampler = threading.Thread(
                target=self._sample, name="host-memory-peak", daemon=True
            )
            self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_INTERVAL_S):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
        now = _high_water_bytes() if self.method == "VmHWM" else None
        self.bytes = max(self.bytes, now or 0, resident_bytes())


# Energy of this host's processors by Linux's powercap (Intel RAPL, also AMD).
#
# One counter per package in µJ, which wraps at ``max_energy_range_uj`` (about 20 minutes of full
# load), so readings are accumulated. Readable by root only since 2020; absent in virtual machines.

POWERCAP = Path("/sys/class/powercap")


class PackageEnergy:
    """Energy of all packages since the first reading, across counter wraps."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._root = root
        self._last_uj: dict[str, int] = {}
        self._total_uj = 0
        self._lock = threading.Lock()

    def read(self) -> float | None:
        """Return joules; None if a package cannot be read."""
        with self._lock:
            try:
                packages = [  # and not their parts: cores, memory
                    zone
                    for zone in sorted(self._root.glob("*-rapl:*"))
                    if (zone / "name").read_text(encoding="ascii").startswith("package-")
                ]
                now_uj = {zone.name: _integer(zone / "energy_uj") for zone in packages}
                for zone in packages:
                    step = now_uj[zone.name] - self._last_uj.get(zone.name, now_uj[zone.name])
                    if step < 0:
                        step += _integer(zone / "max_energy_range_uj")
                    self._total_uj += step
                    self._last_uj[zone.name] = now_uj[zone.name]
            except (OSError, ValueError):
                return None
            if not now_uj or now_uj.keys() != self._last_uj.keys():
                return None
            return self._total_uj / 1e6


HOST_ENERGY = PackageEnergy()


def _integer(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
