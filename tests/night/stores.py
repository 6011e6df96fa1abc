"""The stores of simulated nights, real and in memory, and what they have promised the driver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from disk_model import NOWHERE
from shapes import is_late, must

from orchestrator.core.errors import StoreError, StoreFull, StoreLocked
from orchestrator.core.measurement import Measurement
from orchestrator.store.log import RowLog
from orchestrator.store.store import Store

if TYPE_CHECKING:
    from nights import Night


class Lock:
    """The run's lock: who holds it, and whether that driver lives. What ``RunLock`` promises, which
    has tests of its own with real processes."""

    def __init__(self, night: Night, driver: int) -> None:
        self.night, self.driver = night, driver
        self.silence_means_death_s = float("inf")

    def acquire(self) -> None:
        holder = self.night.holder
        if holder is not None and holder in self.night.living:
            raise StoreLocked(f"driver {holder} holds the run")
        must(
            holder is None or holder not in self.night.living or holder == self.driver,
            f"drivers {holder} and {self.driver} hold the run at once",
        )
        self.night.holder = self.driver

    def still_mine(self) -> None:
        if self.night.holder != self.driver:
            raise StoreLocked("taken over")

    def release(self) -> None:
        if self.night.holder == self.driver and self.driver in self.night.living:
            self.night.holder = None


class DiskStore(Store):
    """The real store, on the night's disk, with the night's lock."""

    def __init__(self, night: Night, driver: int) -> None:
        log = RowLog(NOWHERE / "night" / "rows", f"{night.tally.drivers:016x}")
        lock: Any = Lock(night, driver)
        super().__init__(NOWHERE, "night", lock=lock, log=log)
        self.night = night


class MemoryStore:
    """A store without a disk, with the promises of the real one."""

    def __init__(self, night: Night, driver: int) -> None:
        self._lock = Lock(night, driver)
        self.night = night

    def __enter__(self) -> MemoryStore:
        self._lock.acquire()
        for row in list(self.night.journal.values()):
            self._keep(row)
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def begin(self, *rows: Measurement) -> None:
        """Write attempts in the journal."""
        self.night.step()
        self._lock.still_mine()
        self.night.journal |= {row.attempt_id: row for row in rows}

    def append(self, *measurements: Measurement) -> None:
        self.night.step()
        self._lock.still_mine()
        if self.night.is_full:
            raise StoreFull("cannot write: no space left")
        for measurement in measurements:
            self._keep(measurement)

    def _keep(self, measurement: Measurement) -> None:
        key = measurement.attempt_id
        if measurement.attempt_number == 0:
            key += measurement.invocation_id
        if is_late(measurement):
            key += " late"
        must(key not in self.night.kept, f"attempt {key} has two rows")
        self.night.kept[key] = measurement
        self.night.journal.pop(measurement.attempt_id, None)

    def to_parquet(self) -> None:
        self.night.step()
        self._lock.still_mine()

    def make_reserve(self) -> None:
        if self.night.is_full:
            raise StoreFull("cannot write: no space left")

    def attempts_set_aside(self, _: Iterable[str]) -> dict[str, int]:
        return {}


class Promises:
    """The store as the driver sees it; remembers what the store has promised."""

    def __init__(self, night: Night, store: DiskStore | MemoryStore) -> None:
        self.night, self.store = night, store

    def begin(self, *rows: Measurement) -> None:
        """Write attempts in the journal."""
        for row in rows:  # after a power failure a number may be given away once more
            self.night.journalled.setdefault(row.attempt_id, []).append(row)
        try:
            self.store.begin(*rows)
        except StoreFull:
            self.night.no_room = True
            raise

    def append(self, *measurements: Measurement) -> None:
        night = self.night
        night.handed += measurements
        ids = {measurement.attempt_id for measurement in measurements}
        night.rowed |= ids
        if night.trips():
            raise StoreError("the file system was away for a moment")
        try:
            path = self.store.append(*measurements)
        except StoreFull:
            night.waiting |= ids
            night.no_room = True
            raise
        night.waiting -= ids
        night.no_room = False
        for measurement in measurements:
            if not is_late(measurement):
                key = measurement.attempt_id, measurement.invocation_id
                night.promised[key] = measurement
                night.files[key] = path.name if path else ""
        night.unsafe -= ids

    def to_parquet(self) -> None:
        self.store.to_parquet()

    def make_reserve(self) -> None:
        self.store.make_reserve()
        self.night.no_room = False
