"""Telemetry of a card, read from outside the process that owns it.

A process that holds a card cannot be asked while it computes, and asking from within would disturb
what it measures; on Gaudi it would even acquire the card. Vendors' tools (NVML, hl-smi) read the
same counters from outside. Whatever a tool does not say stays None: an unknown power is not zero.
"""

from __future__ import annotations

import csv
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTelemetry:
    """One card at one moment; every value may be unknown.

    ``energy_j`` is the card's own counter, which starts when the driver is loaded: only the
    difference of two readings means something.
    """

    power_w: float | None = None
    power_of: str = ""  # what is in that figure, where a card has several
    energy_j: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None  # share of time with work on the card, 0 to 100
    sm_clock_mhz: float | None = None  # of the units that compute; on Gaudi its MMEs
    #: Why the clock is lower than it could be, in NVML's words; empty: it is not held back.
    throttled: frozenset[str] | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardInventory:
    """A card's product, and its links to the other cards of its server."""

    product: str = ""  # as its vendor's tool calls it
    links: int | None = None  # that there are
    links_up: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a card open."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def csv_rows(text: str) -> list[dict[str, str]]:
    """Lines of a tool's CSV by the names in its header, without the units that stand there."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [name.partition("[")[0].strip() for name in next(rows, [])]
    return [{name: value.strip() for name, value in zip(header, row, strict=False)} for row in rows]


def number_of(text: str | None) -> float | None:
    """A figure as vendors' tools print it, with a unit or without: ``672 MiB``; None for ``[N/A]``,
    ``[Not Supported]`` and the like."""
    words = (text or "").split()
    try:
        value = float(words[0]) if words else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def bytes_of(text: str | None) -> int | None:
    """A figure in MiB as vendors' tools print it, in bytes."""
    mebibytes = number_of(text)
    return None if mebibytes is None else int(mebibytes * _MIB)


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a vendor's library; None where it raises: no permission, no data, the card is lost."""
    try:
        return function(*arguments)
    except Exception:
        return None


# Decide when a card is free to be taken, without asking it. Pure.
#
# A process that was killed is gone before its card's memory is: the driver gives that back a moment
# later. And the list of a card's processes is not to be relied upon: in a container it has only the
# container's own, in some virtual machines it is always empty. So memory in use speaks as well, in
# comparison with what the card had in use when it was idle.

#: A card with more in use is not idle, whoever asks first. Idle cards have: Gaudi 512 MiB, Gaudi2
#: 768, Gaudi3 672, an H100 about 520 as its driver's own. The smallest job on record had 3,219 MiB,
#: a bare CUDA context takes 300 to 600.
IDLE_MEMORY_BYTES = 1536 * _MIB
#: By so much the memory of an idle card may differ from one time to the other.
SLACK_BYTES = 256 * _MIB
#: Memory that falls by less between two looks does not fall.
_FALLS_BY_BYTES = 16 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """Processes and memory on a card, as its vendor's tools tell from outside."""

    holders: tuple[Holder, ...] = ()  # other processes; empty also where nobody can list them
    used_bytes: int | None = None  # memory in use, the driver's own included; None: unknown
    reserved_bytes: int = 0  # of that the driver's own, as far as it is told apart
    display: bool = False  # it draws pictures, too, and nobody knows for how much memory

    @property
    def taken_bytes(self) -> int | None:
        """Memory in use by anything but the driver."""
        return None if self.used_bytes is None else max(0, self.used_bytes - self.reserved_bytes)


def idle_memory_bytes(use: CardUse) -> int | None:
    """Memory that an idle card has in use; None if it is not idle now, or nobody knows."""
    taken = use.taken_bytes
    if use.holders or taken is None or (taken > IDLE_MEMORY_BYTES and not use.display):
        return None
    return taken


def occupation(card_index: int, use: CardUse, idle_bytes: int | None = None) -> str | None:
    """Reason why no process should take a card now; None where it is free or nobody can tell.

    Args:
        card_index: as messages call it.
        use: what the card says now.
        idle_bytes: what ``idle_memory_bytes`` gave when the card was idle; None if it never was.
    """
    if use.holders:
        return f"card {card_index} is held by {', '.join(map(str, use.holders))}"
    taken = use.taken_bytes
    if taken is None or taken <= _limit_bytes(use, idle_bytes):
        return None
    if idle_bytes is None:
        compared = f"an idle one less than {IDLE_MEMORY_BYTES // _MIB}"
    else:
        compared = f"{idle_bytes // _MIB} when it was idle"
    return (
        f"card {card_index} has {taken // _MIB} MiB in use ({compared}) by a process that is not "
        "seen from here"
    )


def _limit_bytes(use: CardUse, idle_bytes: int | None) -> float:
    """The most that a free card has in use."""
    if idle_bytes is not None:
        return idle_bytes + SLACK_BYTES
    return math.inf if use.display else IDLE_MEMORY_BYTES


@dataclass(slots=True, kw_only=True)
class ReleaseWait:
    """Waiting for a card to be free: how long is enough. Memory that falls is being given back, and
    is waited for; what is held stays held, and is given up after ``patience_s``."""

    card_index: int
    idle_bytes: int | None = None
    patience_s: float = 30.0  # with memory and processes that stay as they are
    longest_s: float = 300.0
    _began: float | None = None
    _deadline: float = 0.0
    _least_bytes: int | None = None
    _first_bytes: int | None = None

    def reason(self, now: float, use: CardUse | None) -> str | None:
        """Reason to go on waiting; None when the card may be taken. ``now`` is a monotonic time."""
        if use is None or (why := occupation(self.card_index, use, self.idle_bytes)) is None:
            return None
        taken = use.taken_bytes
        if self._began is None:
            self._began, self._deadline = now, now + self.patience_s
            self._first_bytes = self._least_bytes = taken
        elif taken is not None:
            if self._least_bytes is not None and taken <= self._least_bytes - _FALLS_BY_BYTES:
                self._deadline = now + self.patience_s
            if self._least_bytes is None or taken <= self._least_bytes - _FALLS_BY_BYTES:
                self._least_bytes = taken
        return why

    def is_over(self, now: float) -> bool:
        """Tell if the wait has been long enough."""
        if self._began is None:
            return False
        return now >= min(self._deadline, self._began + self.longest_s)

    def duration(self, now: float) -> str:
        """Say how long the wait was, and what the memory did."""
        if self._began is None:
            return ""
        text = f"after {now - self._began:.0f} s"
        first, least = self._first_bytes, self._least_bytes
        if first is not None and least is not None and least < first:
            text += f", in which its memory fell from {first // _MIB} to {least // _MIB} MiB"
        return text


# Compare the card that a process really has with the one it was given. Pure.
#
# Variables such as ``CUDA_VISIBLE_DEVICES`` are wishes: one that is changed before the device's
# library reads it, or an order of cards that is not that of the bus, shows another card, and all
# that is measured there would be written down for the wrong one.


@dataclass(frozen=True, slots=True, kw_only=True)
class CardIdentity:
    """Marks that tell a card from all others; empty where unknown."""

    uuid: str = ""  # "GPU-8dcb4b4c-…", with or without its prefix, in any case
    bus_id: str = ""  # "00000000:3B:00.0", with a domain of any length


def difference(has: CardIdentity, given: CardIdentity) -> str | None:
    """Difference between the card that a process has and the one it was given; None where they
    are the same or nobody can tell."""
    for name, one, other in (
        ("UUID", _uuid(has.uuid), _uuid(given.uuid)),
        ("bus id", _bus(has.bus_id), _bus(given.bus_id)),
    ):
        if one and other and one != other:
            return f"it has the card with the {name} {one} and was given {other}"
    return None


def _uuid(text: str) -> str:
    """Without the prefix that NVML has and CUDA has not. The one of a MIG instance is no card's."""
    lower = text.strip().lower()
    return "" if lower.startswith("mig-") else lower.removeprefix("gpu-")


def _bus(text: str) -> str:
    """NVML writes the domain with eight digits, the kernel with four, and some leave it out."""
    parts = text.strip().lower().split(":")
    if len(parts) < 2 or not all(parts):
        return ""
    domain = parts[0] if len(parts) == 3 else "0"
    try:
        number = int(domain, 16)
    except ValueError:
        return ""
    return ":".join([f"{number:04x}", *parts[-2:]])


# Peak resident memory of this process, for the duration of a job.
#
# Linux keeps a high-water mark (VmHWM) and lets a process reset its own through
# ``/proc/self/clear_refs``, so the peak costs nothing while a job runs. Where that is not
# permitted, a thread samples the resident size instead. ``ru_maxrss`` is no use in a warm worker:
# it never falls.

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


# The energy of this host's processors, as Linux tells it (powercap, Intel's RAPL; AMD's too).
#
# One counter a package, in microjoules; it wraps at ``max_energy_range_uj``, after some twenty
# minutes of full load, so readings are added up here. Since 2020 only root may read it, and a
# virtual machine has none: then nothing is known.

POWERCAP = Path("/sys/class/powercap")


class PackageEnergy:
    """The energy of all packages since the first reading, however often a counter wraps."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._root = root
        self._last_uj: dict[str, int] = {}
        self._total_uj = 0
        self._lock = threading.Lock()

    def read(self) -> float | None:
        """Joules; None where a package cannot be read."""
        with self._lock:
            packages = [zone for zone in sorted(self._root.glob("*-rapl:*")) if _is_package(zone)]
            try:
                now = {zone.name: _integer(zone / "energy_uj") for zone in packages}
                for zone in packages:
                    self._add(zone, now[zone.name])
            except (OSError, ValueError):
                return None
            if not now or now.keys() != self._last_uj.keys():
                return None
            return self._total_uj / 1e6

    def _add(self, zone: Path, energy_uj: int) -> None:
        step = energy_uj - self._last_uj.get(zone.name, energy_uj)
        if step < 0:
            step += _integer(zone / "max_energy_range_uj")
        self._total_uj += step
        self._last_uj[zone.name] = energy_uj


_HOST = PackageEnergy()


def host_telemetry() -> dict[int, CardTelemetry]:
    """The host as its only card, 0; empty where nothing can be read."""
    energy_j = _HOST.read()
    return {} if energy_j is None else {0: CardTelemetry(energy_j=energy_j)}


def _is_package(zone: Path) -> bool:
    """Tell if a zone is a processor, and not one of its parts (cores, memory), which it includes
    or which have names of their own."""
    try:
        return (zone / "name").read_text(encoding="ascii").startswith("package-")
    except (OSError, UnicodeDecodeError):
        return False


def _integer(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
