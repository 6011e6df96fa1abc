"""The state of a run as one value: counts, what each card runs, and when it may end.

The driver shows that value (``board.py`` makes it) in the terminal and writes it to
``status.json``, from where `nightgrid status` reads it on any machine that sees the results.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

STATUS_VERSION = 1
#: Largest number in a status: JavaScript, and a time, can hold it.
_LARGEST = 2**53

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStatus:
    """One card: its node, and what its worker does. ``job`` is empty when it is idle."""

    card: str  # e.g. "hpu-1/HPU3"
    worker_id: str = ""
    phase: str = "free"  # free, starting, idle, or a phase of the attempt
    phase_age_s: float = 0.0
    job: str = ""
    attempt_id: str = ""
    # Read from outside the worker's process; None where nobody knows.
    power_w: float | None = None
    temperature_c: float | None = None
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Rate that finished jobs achieved while they were timed: their work over their time.

    Tokens and training samples are never added up: there is one of these for each unit.
    """

    unit: str  # "tokens/s" or "samples/s"
    per_s: float
    jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt that came to nothing, whether or not it is tried again."""

    at: float  # seconds since the epoch
    job: str
    state: str  # FAILED, TIMED_OUT or LOST
    failure_class: str
    reason: str
    card: str  # its first one
    final: bool  # it is not tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment."""

    run: str
    at: float  # seconds since the epoch
    started_at: float  # by the clock as it is now: always as long ago as the run really takes
    total: int  # jobs of the grid
    done: int  # of those, terminal: reused ones included
    counts: Mapping[str, int]  # terminal jobs of this invocation by state, and "reused"
    attempts: int  # ended, probes and retries included
    emulated: bool  # whether any card is
    cards: tuple[CardStatus, ...]
    eta_s: float | None  # None when unknown
    eta_low_s: float | None = None  # while little of the run is done: the range that it is in
    eta_high_s: float | None = None
    #: How the run came to its cards (``forecast.py``), and how long after the command its first
    #: attempt began; None before that, and where it waited for cards that others held.
    start: str = ""
    first_attempt_s: float | None = None
    promised_low_s: float | None = None  # from the command to the last row, as it was planned
    promised_high_s: float | None = None
    stopping: str = ""  # the reason, once an end was asked for
    paused: str = ""  # why nothing new is started for now; empty while all is well
    waiting: str = ""  # for whose cards, while it has none or nothing to do on them
    trouble: str = ""  # what is wrong with the cluster, while work goes on
    slow_cards: tuple[str, ...] = ()  # sentences, the slowest first (``core/card_check.py``)
    finished: bool = False
    jobs_run: int = 0  # terminal after at least one attempt, in this invocation
    rates: tuple[Rate, ...] = ()
    failures: tuple[FailedAttempt, ...] = ()  # the last ones, newest first
    failure_counts: Mapping[str, int] = field(default_factory=dict)  # attempts by failure class
    #: Found out by whoever reads the status: no driver is there any more, and it did not finish.
    driver_died: bool = False

    def without_driver(self) -> RunStatus:
        """The status of a run whose driver has died: nothing runs, and nothing will."""
        idle = tuple(CardStatus(card=card.card) for card in self.cards)
        return replace(
            self, driver_died=True, cards=idle, eta_s=None, eta_low_s=None, eta_high_s=None
        )

    @property
    def elapsed_s(self) -> float:
        """Time since the run started."""
        return self.at - self.started_at

    @property
    def jobs_per_h(self) -> float | None:
        """Jobs that were run, by the hour; None before the first is done."""
        known = self.jobs_run and self.elapsed_s > 0
        return 3600 * self.jobs_run / self.elapsed_s if known else None

    @property
    def assigned(self) -> int:
        """Cards with an attempt on them."""
        return sum(1 for card in self.cards if card.attempt_id)

    @property
    def running(self) -> int:
        """Attempts on cards now; a gang counts once."""
        return len({card.attempt_id for card in self.cards if card.attempt_id})

    def to_json(self) -> str:
        """The content of ``status.json``, a line for each field."""
        values = {"version": STATUS_VERSION} | _values_of(self)
        lines = (f'"{name}": {_ENCODER.encode(value)}' for name, value in values.items())
        return "{\n" + ",\n".join(lines) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> RunStatus:
        """Read ``status.json`` back, leaving out what another version of this program added.

        Raises:
            ValueError: it is not JSON, of another version, or lacks a field.
        """
        try:
            values = dict(json.loads(text))
            version = values.pop("version")
            values.pop("driver_died", None)  # no driver can say it
            if version != STATUS_VERSION:
                raise ValueError(f"status version {version}; this program reads {STATUS_VERSION}")
            values["cards"] = tuple(_known(CardStatus, card) for card in values["cards"])
            values["rates"] = tuple(_known(Rate, rate) for rate in values.get("rates", ()))
            values["slow_cards"] = tuple(map(str, values.get("slow_cards", ())))
            failures = values.get("failures", ())
            values["failures"] = tuple(_known(FailedAttempt, failure) for failure in failures)
            return _known(cls, values)
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a run's status: {error}") from error


def _values_of(record: Any) -> dict[str, Any]:
    """The fields of a record; ``dataclasses.asdict`` would copy all that they hold."""
    return {each.name: getattr(record, each.name) for each in dataclasses.fields(record)}


_ENCODER = json.JSONEncoder(default=_values_of)


def _known(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """The record from those values that it has a field for.

    Raises:
        TypeError: a value is not of its field's type, or a number no finite one.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{values!r:.40} in the place of {kind.__name__}")
    hints = _hints(typing.cast(Any, kind))
    known = {name: value for name, value in values.items() if name in hints}
    for name, value in known.items():
        if not _is_a(value, hints[name]):
            raise TypeError(f"{name} is {value!r:.40}")
    return kind(**known)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _is_a(value: object, hint: Any) -> bool:
    """Return whether a value from JSON has the type of a field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple)  # its records have been looked at
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _is_a(item, arguments[1]) for item in value.values()
        )
    if arguments:  # X | None
        return any(_is_a(value, argument) for argument in arguments)
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        # A number of hundreds of digits is an int in Python, and no float.
        number = isinstance(value, kinds) and type(value) is not bool
        return number and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]
    return isinstance(value, hint)
