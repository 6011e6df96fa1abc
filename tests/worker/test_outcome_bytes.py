"""Outcomes from a worker process to the driver: nothing is lost, little is repeated."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from core_cases import a_worker
from scripted_worker import unreadable_result

from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, RankOutcome
from orchestrator.core.readings import Energy, ProcessorUse, Turn
from orchestrator.worker.outcome_bytes import packed, unpacked, without_result
from workloads.base import Item, Result, Sample


def filled(kind: type, **known: Any) -> Any:
    """A record in which every field has a value of its own; no type is checked at run time."""
    names = [each.name for each in dataclasses.fields(kind)]
    return kind(**({name: f"{kind.__name__}.{name}" for name in names} | known))


def an_outcome(**changes: Any) -> RankOutcome:
    """Every field of every record differs from its default and from all others."""
    result = filled(
        Result,
        samples=tuple(filled(Sample, repeat=number) for number in range(3)),
        items=(filled(Item),),
        details={"a": "b"},
        metrics={"c": 1.0},
        trace=b"\0\xff",
    )
    known = {
        "state": State.SUCCEEDED,
        "result": result,
        "failure": Failure(failure_class=FailureClass.HANG, message="as asked"),
        "worker": a_worker(),
        "energy": Energy(energy_j=7.0, duration_s=2.0, source="power"),
        "processor": filled(ProcessorUse),
        "turn": filled(Turn),
    }
    return filled(RankOutcome, **(known | changes))


BARE = RankOutcome(rank=0, state=State.LOST, started_at=1.0, ended_at=2.0)


@pytest.mark.parametrize("state", list(State))
def test_every_field_arrives(state: State) -> None:
    """Of an outcome that has all, and of one that has none."""
    full, bare = an_outcome(state=state), dataclasses.replace(BARE, state=state)
    for outcome in (full, bare):
        arrived = unpacked(packed(outcome))
        assert arrived == outcome
        assert arrived.state is state
    assert unpacked(packed(full)).result.samples == full.result.samples  # type: ignore[union-attr]


def test_a_worker_is_described_when_it_has_changed() -> None:
    """The same info as the last outcome's is left out, and is that of whoever reads; one that is
    another is sent, and so is none."""
    info = a_worker(versions={str(number): "x" * 20 + str(number) for number in range(30)})
    outcome = an_outcome(worker=info)
    first, second = packed(outcome), packed(outcome, info)
    assert len(second) < len(first) - 600
    known = dataclasses.replace(info)
    assert unpacked(second, known).worker is known
    assert unpacked(second) == dataclasses.replace(outcome, worker=None)
    other = dataclasses.replace(info, threads=7)
    assert unpacked(packed(dataclasses.replace(outcome, worker=other), info), known).worker == other
    assert unpacked(packed(BARE, info), known).worker is None
    assert unpacked(packed(BARE, None), known).worker is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wider(Result):
    """A workload's own kind of result."""

    more: str = ""


def test_a_result_of_a_workload_s_own_kind_stays_one() -> None:
    """With what it has beyond ours."""
    wider = Wider(samples=(), stop_reason="confidence", more="x")
    outcome = dataclasses.replace(BARE, result=wider)
    arrived = unpacked(packed(outcome))
    assert type(arrived.result) is Wider and arrived == outcome


def test_all_but_a_result_that_cannot_be_read_arrives() -> None:
    """A workload has put a class of its own into it."""
    info = a_worker()
    outcome = an_outcome(worker=info, result=unreadable_result())
    data = packed(outcome)
    with pytest.raises(ModuleNotFoundError, match="module_of_a_workload_elsewhere"):
        unpacked(data)
    without = dataclasses.replace(outcome, result=None)
    assert without_result(data) == without
    assert without_result(packed(outcome, info), info) == without


def test_short_outcomes_are_small() -> None:
    """A row of a short job costs little more than its outcome does: no names, no classes."""
    sample = Sample(
        repeat=0,
        batch=0,
        warmup=False,
        complete=True,
        wall_s=1.0,
        cpu_s=0.0,
        items=1,
        input_tokens=1,
        output_tokens=1,
        computed_tokens=1,
    )
    info = a_worker()
    outcome = dataclasses.replace(
        BARE,
        worker=info,
        result=Result(samples=(sample,), stop_reason="max_repeats", synthetic_data=True),
        turn=Turn(waited_s=0.0, oversubscribed=False),
        processor=ProcessorUse(cores=1.0, wait_share=0.0, stolen_share=None, host_load=None),
    )
    assert len(packed(outcome, info)) < 400
