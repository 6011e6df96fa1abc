"""The driver's channel to one node's agent: requests out, response batches back.

A call for responses is nearly always outstanding. Ray may reorder calls, or lose one with a
connection, so messages are numbered (``worker/protocol.py``) and resent until confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.worker.protocol import Outbox, Request, ResponseBatch

#: Called with the answer to a call: its value or exception.
Then = Callable[[Any], None]

_ASK_AGAIN_S = 1.0
SEND_AGAIN_S = 5.0
#: Time for which Ray may report an agent unavailable before it counts as lost.
_PATIENCE_S = 20.0


class Calls:
    """Outstanding calls, and their callbacks."""

    def __init__(self) -> None:
        self._then: dict[Any, Then] = {}

    def __bool__(self) -> bool:
        return bool(self._then)

    def add(self, call: Any, then: Then) -> None:
        """Register a callback for a call's answer."""
        self._then[call] = then

    def clear(self) -> None:
        """Forget every call."""
        self._then.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer (0: do not wait), then handle all available ones."""
        import ray

        if not self._then:
            return
        calls = list(self._then)
        if timeout_s > 0:
            ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in ready:
            self._then.pop(call)(answer_of(call))


def answer_of(call: Any) -> Any:
    """Return a call's value or exception; a timeout exception if it is not done."""
    import ray

    try:
        return ray.get(call, timeout=0)
    except Exception as error:
        return error


def task_on(node_id: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function on the node of this id in Ray, once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=strategy).remote(*arguments, **named)


def ask_nodes(
    function: Callable[..., Any],
    arguments: Mapping[str, Sequence[Any]],
    timeout_s: float,
) -> dict[str, Any]:
    """Call a function on nodes, with arguments by Ray's node id; return values or exceptions. Calls
    without an answer in time are ended. (Without an environment of their own, calls and jobs share
    Ray's idle processes, of which each takes a second to start.)"""
    import ray

    calls = {i: task_on(i, function, *them) for i, them in arguments.items()}
    silent: list[Any] = []
    if calls:
        _, silent = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    answers = {node_id: answer_of(call) for node_id, call in calls.items()}
    for call in silent:
        ray.cancel(call, force=True)
    return answers


class AgentChannel:
    """Sends requests to one agent and receives its responses."""

    def __init__(
        self,
        agent: Any,
        *,
        calls: Calls,
        clock: Callable[[], float],
        arrived: Callable[[ResponseBatch], None],  # called with each batch of new responses
        lost: Callable[[Exception], None],  # called once, with Ray's exception
    ) -> None:
        quiet: dict[str, Any] = {"enable_task_events": False}  # nothing for the dashboard
        self._submit = agent.submit.options(concurrency_group="submit", num_returns=0, **quiet)
        self._exchange = agent.exchange.options(concurrency_group="exchange", **quiet)
        self._calls, self._clock = calls, clock
        self._arrived, self._lost = arrived, lost
        self._closed = False
        self._outbox = Outbox[Request]()
        self._sent = 0  # number of the last request that was sent
        self._send_at = 0.0  # when what is not confirmed is sent again
        self._received = 0
        self._ask_at: float | None = 0.0  # None while a call for responses is outstanding
        self.heard_at = clock()  # when the agent last said something

    def put(self, request: Request) -> None:
        """Queue a request for the next ``send``."""
        self._outbox.put(request)

    def close(self) -> None:
        """Stop sending and receiving."""
        self._closed = True

    def send(self) -> None:
        """Send queued and unconfirmed requests; call for responses unless a call is out."""
        if self._closed:
            return
        now = self._clock()
        first, requests = self._outbox.pending()
        last = first + len(requests) - 1
        if last > self._sent or (requests and now >= self._send_at):
            self._sent, self._send_at = last, now + SEND_AGAIN_S
            self._submit.remote(first, requests)
        if self._ask_at is not None and self._ask_at <= now:
            self._ask_at = None
            self._calls.add(self._exchange.remote(self._received), self._came)

    def _came(self, value: Any) -> None:
        from ray.exceptions import ActorUnavailableError

        if self._closed:
            return
        now = self._clock()
        if isinstance(value, ActorUnavailableError) and now - self.heard_at < _PATIENCE_S:
            self._ask_at = now + _ASK_AGAIN_S
            return
        if isinstance(value, Exception):
            self._lost(value)
            return
        batch: ResponseBatch = value
        self.heard_at = self._ask_at = now
        self._outbox.confirm(batch.received)
        self._received = batch.first + len(batch.responses) - 1
        self._arrived(batch)
