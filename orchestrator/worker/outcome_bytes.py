"""The outcome of a rank as bytes: made by its worker process, carried by the agent, read by the
driver.

A short job costs little more than its outcome does, so records travel as tuples of their values,
without names and classes, and what a process is (``WorkerInfo``) only when it has changed. Both
ends are of one version (``on_ray/claims.py``). The result is pickled apart, as bytes among the
values: a workload may put classes of its own into it, which others cannot read, and all else must
arrive.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar

from orchestrator.core.job import State
from orchestrator.core.outcome import RankOutcome, WorkerInfo
from orchestrator.core.readings import ProcessorUse, Turn
from orchestrator.worker.wire import pickled, unpickled
from workloads.base import Item, Result, Sample

T = TypeVar("T")

#: In the place of a WorkerInfo: the process is as its outcomes have said before.
_AS_BEFORE = "as before"


class _Values(Generic[T]):
    """The values of a kind of record as a tuple, and back. Anything else, None or a record of a
    derived kind, stays as it is."""

    def __init__(self, kind: type[T]) -> None:
        self.names = tuple(each.name for each in fields(kind))  # type: ignore[arg-type]
        self._kind, self._get = kind, attrgetter(*self.names)

    def of(self, record: T | None) -> Any:
        return self._get(record) if type(record) is self._kind else record

    def record(self, values: Any) -> Any:
        if type(values) is not tuple:
            return values
        return self._kind(**dict(zip(self.names, values, strict=True)))


_OUTCOME, _RESULT = _Values(RankOutcome), _Values(Result)
_SAMPLE, _ITEM = _Values(Sample), _Values(Item)
_USE, _TURN = _Values(ProcessorUse), _Values(Turn)
#: Where values stand that do not travel as they are.
_STATE, _PROCESSOR, _ITS_TURN, _WORKER, _ITS_RESULT = map(
    _OUTCOME.names.index, ("state", "processor", "turn", "worker", "result")
)
_SAMPLES, _ITEMS = map(_RESULT.names.index, ("samples", "items"))


def packed(outcome: RankOutcome, told: WorkerInfo | None = None) -> bytes:
    """The bytes of an outcome; ``told`` is the worker's info that its last outcome had."""
    values = list(_OUTCOME.of(outcome))
    values[_STATE] = outcome.state.value
    values[_PROCESSOR] = _USE.of(outcome.processor)
    values[_ITS_TURN] = _TURN.of(outcome.turn)
    if told is not None and outcome.worker is told:
        values[_WORKER] = _AS_BEFORE
    result = _RESULT.of(outcome.result)
    if type(result) is tuple:
        parts = list(result)
        parts[_SAMPLES] = [_SAMPLE.of(each) for each in result[_SAMPLES]]
        parts[_ITEMS] = [_ITEM.of(each) for each in result[_ITEMS]]
        result = tuple(parts)
    values[_ITS_RESULT] = pickled(result)
    return pickled(tuple(values))


def unpacked(data: bytes, before: WorkerInfo | None = None) -> RankOutcome:
    """The outcome of which ``packed`` made these bytes; ``before`` is what is known of its worker.

    Raises:
        Exception: of many kinds: a workload has put a class of its own into its result.
    """
    values = _values_of(data, before)
    result = unpickled(values["result"])
    if type(result) is tuple:
        named = dict(zip(_RESULT.names, result, strict=True))
        named["samples"] = tuple(_SAMPLE.record(each) for each in named["samples"])
        named["items"] = tuple(_ITEM.record(each) for each in named["items"])
        result = Result(**named)
    return RankOutcome(**(values | {"result": result}))


def without_result(data: bytes, before: WorkerInfo | None = None) -> RankOutcome:
    """The outcome that ``unpacked`` returns, but without its result, which need not be readable."""
    return RankOutcome(**(_values_of(data, before) | {"result": None}))


def _values_of(data: bytes, before: WorkerInfo | None) -> dict[str, Any]:
    """The fields of an outcome; its result is bytes."""
    values = dict(zip(_OUTCOME.names, unpickled(data), strict=True))
    values["state"] = State(values["state"])
    values["processor"] = _USE.record(values["processor"])
    values["turn"] = _TURN.record(values["turn"])
    if values["worker"] == _AS_BEFORE:
        values["worker"] = before
    return values
