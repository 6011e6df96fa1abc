"""Outstanding calls to actors, and what is done with their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Called with the answer to a call: its value, or the exception that Ray has instead.
Then = Callable[[Any], None]


class Calls:
    """Calls whose answers are still to come."""

    def __init__(self) -> None:
        self._then: dict[Any, Then] = {}

    def __bool__(self) -> bool:
        return bool(self._then)

    def add(self, call: Any, then: Then) -> None:
        """Do this with the answer, when it is there."""
        self._then[call] = then

    def clear(self) -> None:
        """Forget every call."""
        self._then.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait until one answer is there, then handle all that are. With 0 it only looks."""
        import ray

        if not self._then:
            return
        calls = list(self._then)
        if timeout_s > 0:
            ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call, answer in zip(ready, answers_of(ready), strict=True):
            self._then.pop(call)(answer)


def answers_of(calls: Sequence[Any]) -> list[Any]:
    """The answers of calls that have them, in order. One question for all is many times faster,
    and one exception among them hides the rest."""
    import ray

    if not calls:
        return []
    try:
        return list(ray.get(list(calls)))
    except Exception:
        return [answer_of(call) for call in calls]


def answer_of(call: Any) -> Any:
    """The value of a call that has one, or its exception."""
    import ray

    try:
        return ray.get(call)
    except Exception as error:
        return error
