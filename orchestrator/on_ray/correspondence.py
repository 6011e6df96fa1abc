"""The driver's side of the letters to one node and of the answers from there.

Letters wait until they are sent together, in one Ray call. A call that fetches a bag is outstanding
nearly always; the next is made when the last one's bag was dealt with, and takes along the letters
that came of it, so that a node at work costs one call for each bag. Ray may run calls in another
order than they were made, and lose one when a connection breaks: everything is numbered
(``worker/letters.py``), what is not confirmed is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.on_ray.calls import Calls
from orchestrator.worker.letters import Bag, Letter
from orchestrator.worker.wire import packed, unpacked

_ASK_AGAIN_S = 1.0
_SEND_AGAIN_S = 5.0
#: So long may Ray call an agent unavailable until it counts as lost.
_PATIENCE_S = 20.0


class Correspondence:
    """Letters to one agent and the bags from there.

    Args:
        arrived: called with each bag, whose answers are all new.
        lost: called once, with Ray's exception, when no answer will come any more.
    """

    def __init__(
        self,
        agent: Any,
        *,
        calls: Calls,
        clock: Callable[[], float],
        arrived: Callable[[Bag], None],
        lost: Callable[[Exception], None],
    ) -> None:
        quiet: dict[str, Any] = {"enable_task_events": False}  # nothing for the dashboard
        self._post = agent.post.options(concurrency_group="post", num_returns=0, **quiet)
        self._mail = agent.mail.options(concurrency_group="mail", **quiet)
        self._calls = calls
        self._clock = clock
        self._arrived = arrived
        self._lost = lost
        self._closed = False
        self._outbox: list[Letter] = []
        self._posted = 0
        self._unconfirmed: dict[int, tuple[float, bytes]] = {}  # by number: when sent, and what
        self._acknowledged = 0
        self._ask_at: float | None = 0.0  # None while a call for a bag is outstanding
        self.heard_at = clock()  # when the agent last said something

    def put(self, letter: Letter) -> None:
        """Have a letter sent with the next ``send``."""
        self._outbox.append(letter)

    def close(self) -> None:
        """Neither send nor hear anything any more."""
        self._closed = True

    def send(self) -> None:
        """Send what waits, all in one call; ask for the next bag if none was asked for."""
        if self._closed:
            return
        now = self._clock()
        post: tuple[int, bytes] | None = None
        if self._outbox:
            self._posted += 1
            post = (self._posted, packed(self._outbox))
            self._outbox.clear()
            self._unconfirmed[self._posted] = (now, post[1])
        if self._ask_at is not None and self._ask_at <= now:
            self._ask_at = None
            self._calls.add(self._mail.remote(self._acknowledged, post), self._came)
        elif post is not None:
            self._post.remote(*post)

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
        bag: Bag = unpacked(value)
        self.heard_at = now
        for number in [number for number in self._unconfirmed if number <= bag.received]:
            del self._unconfirmed[number]
        for number, (sent_at, data) in self._unconfirmed.items():
            if now - sent_at > _SEND_AGAIN_S:
                self._unconfirmed[number] = (now, data)
                self._post.remote(number, data)
        self._acknowledged = bag.first + len(bag.answers) - 1
        self._ask_at = now
        self._arrived(bag)
