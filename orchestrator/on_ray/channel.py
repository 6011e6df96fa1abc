"""The driver's channel to the agent of one node: requests out, response batches back.

Requests wait until they are sent together, in one Ray call. A call that fetches responses is nearly
always outstanding; the next one is made when the last batch was handled. Ray may run calls in
another order than they were made, and loses one when a connection breaks: so everything is numbered
(``worker/protocol.py``), and each call sends all requests that are not confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.worker.protocol import Outbox, Request, ResponseBatch

#: Called with the answer to a call: its value, or the exception that Ray has instead.
Then = Callable[[Any], None]

_ASK_AGAIN_S = 1.0
SEND_AGAIN_S = 5.0
#: So long may Ray call an agent unavailable until it counts as lost.
_PATIENCE_S = 20.0


class Calls:
    """Outstanding calls to actors, and what is done with their answers."""

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
        for call in ready:
            self._then.pop(call)(answer_of(call))


def answer_of(call: Any) -> Any:
    """The value of a call that is done, or its exception; a timeout's if it is not."""
    import ray

    try:
        return ray.get(call, timeout=0)
    except Exception as error:
        return error


def ask_nodes(
    function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]], timeout_s: float
) -> dict[str, Any]:
    """Call a function on nodes of the joined cluster.

    Args:
        arguments: of the function, by Ray's id of the node.

    Returns:
        By the same ids, what it returned there, or the exception that came instead.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    calls: dict[str, Any] = {}
    for node_id, values in arguments.items():
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
        calls[node_id] = task.options(scheduling_strategy=strategy).remote(*values)
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    return {node_id: answer_of(call) for node_id, call in calls.items()}


class AgentChannel:
    """Sends requests to one agent and receives its responses.

    Args:
        arrived: called with each response batch; all its responses are new.
        lost: called once, with Ray's exception, when no response will come any more.
    """

    def __init__(
        self,
        agent: Any,
        *,
        calls: Calls,
        clock: Callable[[], float],
        arrived: Callable[[ResponseBatch], None],
        lost: Callable[[Exception], None],
    ) -> None:
        quiet: dict[str, Any] = {"enable_task_events": False}  # nothing for the dashboard
        self._submit = agent.submit.options(concurrency_group="submit", num_returns=0, **quiet)
        self._exchange = agent.exchange.options(concurrency_group="exchange", **quiet)
        self._agent = agent
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

    def show_job(self, label: str, worker_id: str, attempt_id: str) -> None:
        """Have Ray list a job of this label among its tasks, from now until it ends."""
        if not self._closed:
            named = self._agent.job.options(concurrency_group="jobs", num_returns=0, name=label)
            named.remote(worker_id, attempt_id)

    def close(self) -> None:
        """Stop sending and receiving."""
        self._closed = True

    def send(self) -> None:
        """Send what is queued, with all that is not confirmed; ask for responses unless a call for
        them is out."""
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
