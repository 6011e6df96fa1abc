"""Ray's global control store (GCS), asked beside the driver's loop.

A call into a GCS that is frozen or gone waits for it: a minute, or for ever. What runs on the nodes
does not need it: agents are called directly, and Ray 2.60 keeps that up. So one thread calls the
GCS, one question after the other; the loop goes on, takes up answers when they are there, and can
say since when there were none.

Ray ends a process whose GCS is away for a minute, from C++, without an exception and without the
last rows (``RAY_gcs_rpc_server_reconnect_timeout_s``). A driver decides for itself when to give up
(``outlived``).
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
#: Called with the answer: its value, or the exception that came instead.
Then = Callable[[Any], None]

#: Variables of a driver's environment while it joins. Ray reads the first once, when its library is
#: first used in a process; the second is in truth a number of attempts, each of up to 40 s.
JOINING = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 24 * 3600),  # longer than any night
    "RAY_gcs_server_port_wait_time_s": "1",
}
#: An answer takes milliseconds; on a busy machine, seconds.
SILENT_AFTER_S = 5.0
_ANSWER_S = 10
_LAST_ANSWER_S = 5
ALIVE = 0  # GcsNodeInfo.ALIVE
_REPLACED = "WrongClusterID"


def outlived() -> contextlib.AbstractContextManager[None]:
    """Let a process that joins a cluster within the block live on without its GCS, and fail to join
    one that dies in that moment after a minute, not after a quarter of an hour; unless its
    environment says otherwise: Ray reads it then. What it starts before or after does not live on:
    it would without a driver, too."""
    return variables({name: v for name, v in JOINING.items() if name not in os.environ})


class Gcs:
    """Questions to the GCS, each answered in the loop's own thread by ``collect``.

    A head that was started anew has a GCS of its own, which knows nothing of the cluster
    that was: ``replaced``. To this process it stays silent.

    Args:
        clock: seconds that never jump.
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
        """Have ``act`` called beside the loop, and ``then`` with its answer by ``collect``. With
        ``wait_s``, wait so long for it: mostly it is there in a moment."""
        if not self._open and not self._away:  # one that nobody asked was not silent
            self._answered_at = self._clock()
        self._open += 1
        self._questions.put((act, then))
        if wait_s and self._open == 1:
            self.wait(wait_s)
            self.collect()

    def wait(self, timeout_s: float) -> None:
        """Wait until an answer is there to be collected, not longer."""
        self._there.wait(timeout_s)

    def collect(self) -> None:
        """Do what is to be done with the answers that are there."""
        self._there.clear()
        while not self._answers.empty():
            then, value = self._answers.get()
            self._open -= 1
            then(value)

    @property
    def silent_s(self) -> float:
        """Time for which it has not answered although it was asked; 0 while it answers in time."""
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
        """The nodes that are alive, by id; for ``ask``. (``ray.nodes()`` waits for ever, and
        aborts the process when the head was started anew.)

        Raises:
            Exception: of Ray's: it does not answer in time, or does not know this cluster.
        """
        if self._client is None:
            import ray
            from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

            self._client = GcsClient(address=ray.get_runtime_context().gcs_address)
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
        """Ask nothing more, once what was asked is done; false if that takes longer than this."""
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
    """Return whether a value that came in place of an answer says that the GCS cannot be
    reached."""
    if not isinstance(value, BaseException):
        return False
    silent = type(value).__name__ in ("RpcError", "GetTimeoutError")
    return silent or "GCS" in str(value) or _REPLACED in str(value)


def first_answer(address: str, *, patience_s: float) -> Any:
    """Ask a GCS as a process does that is to join its cluster. Returns the answer, or the
    exception that came instead; None if nothing came in this time. Says that it waits."""
    answer: Any = None

    def ask() -> None:
        nonlocal answer
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

        try:
            answer = GcsClient(address=address).get_all_node_info(timeout=patience_s)
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


def answers() -> bool:
    """Return whether the GCS of the cluster that this process has joined answers it
    now."""
    from ray._private.worker import global_worker

    worker: Any = global_worker  # whose types do not know it
    try:
        worker.gcs_client.get_all_node_info(timeout=_LAST_ANSWER_S)
    except Exception:
        return False
    return True


#: Calls that ``within`` left waiting. A process that has some cannot end in an orderly way: Ray's
#: handlers at exit would wait as well.
left_waiting: list[threading.Thread] = []


def within(patience_s: float, act: Act) -> bool:
    """Call something that may wait for a GCS which is gone; whether it came to its end
    in this time. What does not is left behind in a thread of its own (``left_waiting``)."""

    def attempt() -> None:
        with contextlib.suppress(Exception):  # it has an end, which is all that is wanted
            act()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience_s)
    if thread.is_alive():
        left_waiting.append(thread)
    return not thread.is_alive()
