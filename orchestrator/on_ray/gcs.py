"""Calls to Ray's global control store (GCS) outside the driver's loop.

A call to a frozen or lost GCS blocks for a minute or for ever, while agents work on without it (Ray
2.60). So one thread makes the calls in order, and the loop collects the answers. Ray ends a process
whose GCS is away for a minute, from C++, without an exception; ``outlived`` prevents that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.util import output
from workloads.util.processes import variables

#: A node as ``ray.nodes()`` has it.
RayNode = Mapping[str, Any]
Act = Callable[[], Any]
#: Called with the answer: a value or an exception.
Then = Callable[[Any], None]

#: Environment of a driver while it joins. Ray reads the first once, at its first use in a process;
#: the second is really a number of attempts, each of up to 40 s.
JOINING = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 24 * 3600),  # longer than any night
    "RAY_gcs_server_port_wait_time_s": "1",
}
#: An answer takes milliseconds; on a busy machine, seconds.
SILENT_AFTER_S = 5.0
_ANSWER_S = 10
ALIVE = 0  # GcsNodeInfo.ALIVE
_REPLACED = "WrongClusterID"


def outlived() -> contextlib.AbstractContextManager[None]:
    """Let a process that joins a cluster within the block outlive its GCS.

    Also shortens joining a dying one from 15 minutes to one. Variables that the user set win.
    Processes started outside the block do not outlive the GCS, as they would without a driver.
    """
    return variables({name: v for name, v in JOINING.items() if name not in os.environ})


def gcs_client(address: str = "") -> Any:
    """Ray's client of the GCS at an address; empty: of the joined cluster."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

    return GcsClient(address=address or ray.get_runtime_context().gcs_address)


class Gcs:
    """Calls to the GCS, whose callbacks run in the loop's thread, by ``collect``.

    ``replaced``: the head was restarted with a new GCS, which rejects this process's calls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._questions: queue.SimpleQueue[tuple[Act, Then] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Then, Any]] = queue.SimpleQueue()
        self._there = threading.Event()  # an answer waits
        self._open = 0  # questions without an answer that was collected
        self._answered_at = clock()
        self.replaced = False
        self._away = False  # what came last was no answer
        self._client: Any = None
        self._thread = threading.Thread(target=self._work, name="control store", daemon=True)
        self._thread.start()

    def ask(self, act: Act, then: Then = lambda _: None, *, wait_s: float = 0.0) -> None:
        """Queue ``act`` for the thread and ``then`` for ``collect``; wait up to ``wait_s``."""
        if not self._open and not self._away:  # silence counts from the first call
            self._answered_at = self._clock()
        self._open += 1
        self._questions.put((act, then))
        if wait_s and self._open == 1:
            self.wait(wait_s)
            self.collect()

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer to collect."""
        self._there.wait(timeout_s)

    def collect(self) -> None:
        """Run the callbacks of all available answers."""
        self._there.clear()
        while not self._answers.empty():
            then, value = self._answers.get()
            self._open -= 1
            then(value)

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer while calls are open; 0 while it answers in time."""
        if not self._open and not self._away:
            return 0.0
        silent = self._clock() - self._answered_at
        return silent if silent > SILENT_AFTER_S else 0.0

    @property
    def trouble(self) -> str:
        """Describe the outage and when it began; empty while the store answers in time."""
        if not (silent_s := self.silent_s):
            return ""
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        if self.replaced:
            return f"the cluster's head was restarted, and its control store lost at {since}"
        return f"the cluster's control store has not answered since {since}, for {silent_s:.0f} s"

    def nodes(self) -> dict[str, RayNode]:
        """Living nodes by id, for ``ask``: ``ray.nodes()`` may hang or abort the process."""
        if self._client is None:
            self._client = gcs_client()
        infos = self._client.get_all_node_info(timeout=_ANSWER_S)
        return {
            info.node_id.hex(): {
                "NodeID": info.node_id.hex(),
                "Alive": True,
                "NodeName": info.node_name,
                "NodeManagerAddress": info.node_manager_address,
                "NodeManagerHostname": info.node_manager_hostname,
                "Resources": dict(info.resources_total),
                "Labels": dict(info.labels),
            }
            for info in infos.values()
            if info.state == ALIVE
        }

    def close(self, patience_s: float) -> bool:
        """Finish open calls and stop; return False if that takes longer than ``patience_s``."""
        self._questions.put(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            act, then = question
            try:
                value = act()
            except (Exception, SystemExit) as error:  # Ray exits where it should raise
                value = error
            self._away = is_absence(value)
            if not self._away:
                self._answered_at = self._clock()
            elif _REPLACED in str(value):
                self.replaced = True
            self._answers.put((then, value))
            self._there.set()


def is_absence(value: Any) -> bool:
    """Return whether an answer is an exception that says that the GCS is unreachable."""
    if not isinstance(value, BaseException):
        return False
    silent = type(value).__name__ in ("RpcError", "GetTimeoutError")
    return silent or "GCS" in str(value) or _REPLACED in str(value)


def first_answer(address: str, *, patience_s: float) -> Any:
    """Query a GCS before joining: its answer or exception, None if silent. Prints that it waits."""
    answer: Any = None

    def ask() -> None:
        nonlocal answer
        try:
            answer = gcs_client(address).get_all_node_info(timeout=patience_s)
        except Exception as error:
            answer = error

    words = (
        f"waiting up to {patience_s:.0f} s for the control store of the Ray cluster at {address}, "
        "which does not answer"
    )
    notice = threading.Timer(SILENT_AFTER_S, output.say_aside, [words])
    notice.start()
    try:
        return answer if within(patience_s, ask) else None
    finally:
        notice.cancel()


#: Calls that ``within`` left waiting. With any, an orderly exit would hang in Ray's exit handlers.
left_waiting: list[threading.Thread] = []


def within(patience_s: float, act: Act) -> bool:
    """Call something that may hang; return whether it ended in time, else leave its thread."""

    def attempt() -> None:
        with contextlib.suppress(Exception):  # it has an end, which is all that is wanted
            act()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        left_waiting.append(thread)
    return not thread.is_alive()
