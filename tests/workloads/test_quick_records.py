"""Records that are made faster are the same records."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field

import pytest

from orchestrator.domain.measurement import Measurement, Metrics
from workloads.api import Result, Sample
from workloads.quick_records import quickly_made


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """As dataclasses make it."""

    first: int
    second: str = "two"
    third: list[int] = field(default_factory=list)


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    """The same."""

    first: int
    second: str = "two"
    third: list[int] = field(default_factory=list)


def test_a_record_has_what_it_was_given_and_its_defaults() -> None:
    """Each has a list of its own."""
    one, other = Quick(first=1), Quick(first=1)
    assert dataclasses.asdict(one) == dataclasses.asdict(Plain(first=1))
    assert one == other and hash(dataclasses.replace(one, third=())) is not None  # type: ignore[arg-type]
    assert one.third is not other.third
    assert repr(Quick(first=3, second="x", third=[4])) == "Quick(first=3, second='x', third=[4])"
    assert type(one) is Quick


def test_a_record_is_frozen_once_it_is_made() -> None:
    """By assignment and by deletion."""
    one = Quick(first=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.first = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.first  # type: ignore[misc]


def test_a_record_is_copied_replaced_and_pickled() -> None:
    """As any other."""
    one = Quick(first=1, third=[2])
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.replace(one, second="three") == Quick(first=1, second="three", third=[2])
    assert inspect.signature(Quick) == inspect.signature(Plain)


def test_wrong_fields_are_refused_as_always() -> None:
    """One that is missing, one that nobody knows, and one without its name."""
    for arguments, named in (((), {}), ((), {"first": 1, "fourth": 4}), ((1,), {})):
        with pytest.raises(TypeError):
            Quick(*arguments, **named)  # type: ignore[arg-type]


def test_a_record_of_a_derived_class_stays_one() -> None:
    """It may have slots of its own."""

    class Derived(Quick):
        __slots__ = ()

    assert type(Derived(first=1)) is Derived
    assert Derived(first=1).second == "two"


def test_classes_that_cannot_be_made_so_are_refused() -> None:
    """Without slots, by position, with something to do afterwards, and of a base with fields."""

    @dataclass(frozen=True, kw_only=True)
    class Open:
        first: int

    @dataclass(frozen=True, slots=True)
    class Positional:
        first: int

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Worked:
        first: int

        def __post_init__(self) -> None:
            """Nothing."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class More(Plain):
        fourth: int = 4

    for kind in (Open, Positional, Worked, More):
        with pytest.raises(TypeError):
            quickly_made(kind)


def test_records_of_every_short_job_are_made_so() -> None:
    """Those with many fields."""
    for kind in (Measurement, Metrics, Result, Sample):
        assert hasattr(kind.__init__, "__wrapped__")
