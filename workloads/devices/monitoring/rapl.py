"""The energy of this host's processors, as Linux tells it (powercap, Intel's RAPL; AMD's too).

One counter a package, in microjoules; it wraps at ``max_energy_range_uj``, after some twenty
minutes of full load, so readings are added up here. Since 2020 only root may read it, and a virtual
machine has none: then nothing is known.
"""

from __future__ import annotations

import threading
from pathlib import Path

from workloads.devices.monitoring.telemetry import CardTelemetry

ROOT = Path("/sys/class/powercap")


class PackageEnergy:
    """The energy of all packages since the first reading, however often a counter wraps."""

    def __init__(self, root: Path = ROOT) -> None:
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


def telemetry() -> dict[int, CardTelemetry]:
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
