"""Passports of a run's cards: collected from attempts, written, and slow cards named at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from orchestrator.domain.events import RecordRow
from orchestrator.domain.passport import FIGURES, Passport, slow_cards
from orchestrator.errors import StoreError
from orchestrator.results import paths
from orchestrator.results.passports import earlier_passports, passports_table, read_passports
from orchestrator.results.store import Store


class PassportBook:
    """The passports of one run, those of its earlier drivers included."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store, self._wall = store, wall
        self._now = list(read_passports(store.path))
        self._before = earlier_passports(store.path)
        #: Sentences about the slow cards, the slowest first.
        self.slow: tuple[str, ...] = ()

    def saw(self, record: RecordRow) -> tuple[str, ...]:
        """Take note of an attempt that has ended; the slow cards that are new."""
        taken = _passports(record, self._store.run, self._wall())
        if not taken:
            return ()
        self._now += taken
        # Rows matter, this does not: on a full disk they are written with the next one.
        with contextlib.suppress(OSError, StoreError):
            self._store.write_file(paths.PASSPORTS, passports_table(self._now))
        known, self.slow = self.slow, tuple(map(str, slow_cards(self._now, self._before)))
        return tuple(each for each in self.slow if each not in known)


def _passports(record: RecordRow, run: str, at: float) -> list[Passport]:
    if record.attempt is None or record.outcome is None:
        return []
    found = []
    for rank in record.outcome.ranks:
        if not rank.passport or rank.worker is None:
            continue
        card = record.attempt.cards[rank.rank]
        threads = rank.passport.get("threads")
        found.append(
            Passport(
                run=run,
                taken_at=at,
                node=rank.worker.node_name,
                card_index=card.index,
                accelerator=str(card.accelerator),
                device_name=rank.worker.device_name,
                emulated=rank.worker.emulated,
                threads=None if threads is None else int(threads),
                **{name: rank.passport.get(name) for name in FIGURES},
            )
        )
    return found
