"""Outstanding calls to actors, and the progress that busy workers report. Nothing here blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.executor import Progress

#: What is done with the answer to a call: its value, or the exception that Ray has instead.
Then = Callable[[Any], None]


class Calls:
    """Calls whose answers are still to come."""

    def __init__(self) -> None:
        self._then: dict[Any, Then] = {}

    def add(self, call: Any, then: Then) -> None:
        """Do this with the answer, when it is there."""
        self._then[call] = then

    def clear(self) -> None:
        """Forget every call."""
        self._then.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait until one answer is there, then handle all that are."""
        import ray

        if not self._then:
            time.sleep(timeout_s)
            return
        calls = list(self._then)
        ready, _ = ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready:
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call, answer in zip(ready, answers_of(ready), strict=True):
            self._then.pop(call)(answer)


class ProgressPoll:
    """Asks every busy worker once a second, with one call outstanding for each."""

    interval_s = 1.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, Progress] = {}  # by worker id
        self._asked: dict[Any, str] = {}  # outstanding call -> worker id
        self._next_at = 0.0

    def known(self) -> Mapping[str, Progress]:
        """As last heard."""
        return dict(self._known)

    def forget(self, worker_id: str) -> None:
        """The worker is not busy any more."""
        self._known.pop(worker_id, None)

    def poll(self, busy: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Collect answers; when it is time, ask the busy workers (id, method) anew."""
        import ray

        if self._asked:
            calls = list(self._asked)
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
            answers = zip(ready, answers_of(ready), strict=True)
            heard = {self._asked.pop(call): answer for call, answer in answers}
            still_busy = {worker_id for worker_id, _ in busy()} if heard else set()
            for worker_id, answer in heard.items():
                # A worker's death is told by the call that runs its attempt.
                if isinstance(answer, Progress) and worker_id in still_busy:
                    self._known[worker_id] = answer
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + self.interval_s
        waiting = set(self._asked.values())
        for worker_id, method in busy():
            if worker_id not in waiting:
                self._asked[method.remote()] = worker_id


def answers_of(calls: Sequence[Any]) -> list[Any]:
    """The answers of calls that have them, in order. One question for all is many times faster,
    and one exception among them hides the rest."""
    import ray

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
