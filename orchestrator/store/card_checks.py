"""Tables of card checks, with the fields of ``CardCheck`` as columns.

Each run's driver writes its own (``CARD_CHECKS``); a card's history spans a results directory.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.card_check import CardCheck, SlowCard, slow_cards, spread_of_runs
from orchestrator.core.errors import StoreError
from orchestrator.store import disk
from orchestrator.store.files import CARD_CHECKS
from orchestrator.store.reader import runs
from orchestrator.store.schema import arrow_type, rules_of
from workloads.util.files import SMALL_BYTES
from workloads.util.statistics import Spread

if TYPE_CHECKING:
    import pyarrow as pa

#: Newest runs that make up the history.
_MOST_RUNS = 50


def card_checks_table(checks: Iterable[CardCheck]) -> bytes:
    """The content of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = _schema()
    rows = [{name: getattr(check, name) for name in columns.names} for check in checks]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=columns), buffer)
    return buffer.getvalue()


def read_card_checks(run: Path) -> tuple[CardCheck, ...]:
    """The card checks of a run; none if the file cannot be read, since no figure needs them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.suppress(OSError, ValueError, TypeError, pa.ArrowException):
        data = disk.read(run / CARD_CHECKS, SMALL_BYTES, follow=False)
        table = pq.read_table(io.BytesIO(data))
        table = table.select([name for name in _schema().names if name in table.column_names])
        known = pa.schema([_schema().field(name) for name in table.column_names])
        return tuple(CardCheck(**row) for row in table.cast(known).to_pylist())
    return ()


def earlier_card_checks(run: Path) -> tuple[CardCheck, ...]:
    """The card checks of the other runs beside this one, of the newest."""
    with contextlib.suppress(StoreError):
        others = [name for name in runs(run.parent) if name != run.name][:_MOST_RUNS]
        return tuple(check for name in others for check in read_card_checks(run.parent / name))
    return ()


def slow_cards_of(run: Path) -> tuple[SlowCard, ...]:
    """The slow cards of a run, compared with their neighbours and with earlier runs."""
    now = read_card_checks(run)
    return slow_cards(now, earlier_card_checks(run)) if now else ()


def spread_between_runs(run: Path) -> Spread:
    """Spread of this run's cards' speed over the runs of its results directory; may be empty."""
    now = read_card_checks(run)
    cards = {check.card for check in now}
    earlier = (check for check in earlier_card_checks(run) if check.card in cards)
    return spread_of_runs([*now, *earlier]) if now else Spread()


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, arrow_type(rule.kind)) for name, rule in rules_of(CardCheck).items()])
