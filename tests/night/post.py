"""Letters between a driver and a node, over calls that get lost, come twice, or overtake others.

The real ``Correspondence`` on one side, the real ``Answers`` and ``InOrder`` on the other, and
between them a Ray that keeps no promise but one: a call that is made may arrive at any time, or
never. Checked is what both sides count on: every letter is read once and in order, and every answer
is heard once and in order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from shapes import Broken, Tally, must

from orchestrator.on_ray.calls import Calls, Then
from orchestrator.on_ray.correspondence import Correspondence
from orchestrator.scheduling.invariants import InvariantViolated
from orchestrator.worker.letters import Answers, Bag, InOrder, Stop, Stopped
from orchestrator.worker.wire import packed, unpacked

LETTERS = 60
#: With three calls in ten lost, all has come through long before.
PATIENCE = 4000


class LossyRay(Calls):
    """Calls under way, of which any may come next."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[Callable[[], Any], Then | None]] = []

    def add(self, call: Any, then: Then) -> None:
        """A call whose answer is waited for."""
        self.under_way.append((call, then))


class LossyNode:
    """An agent that reads letters and answers each."""

    def __init__(self, ray: LossyRay) -> None:
        self.ray = ray
        self.answers, self.posts = Answers(), InOrder()
        self.read: list[str] = []
        self.post, self.mail = Remote(self, self._post), Remote(self, self._mail)

    def _post(self, number: int, letters: bytes) -> None:
        for post in self.posts.add(number, letters):
            for letter in unpacked(post):
                self.read.append(letter.worker_id)
                self.answers.put(Stopped(letter.worker_id))

    def _mail(self, acknowledged: int, post: tuple[int, bytes] | None) -> bytes:
        if post is not None:
            self._post(*post)
        self.answers.acknowledge(acknowledged)
        return packed(Bag(*self.answers.wait(0), self.posts.received, None, None, False))


class Remote:
    """A method of an actor."""

    def __init__(self, node: LossyNode, act: Callable[..., Any]) -> None:
        self.node, self.act = node, act

    def options(self, **_: Any) -> Remote:
        """Which make no difference here."""
        return self

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        """Make the call."""
        call = lambda: self.act(*arguments)  # noqa: E731
        if self.act.__name__ == "_post":  # nobody waits for its answer
            self.node.ray.under_way.append((call, None))
        return call


def run_post(seed: int) -> Tally:
    """One exchange of letters; a violation names its seed."""
    try:
        return _exchange(Random(f"post {seed}"))
    except (Exception, Broken) as error:
        kind = error if isinstance(error, Broken) else repr(error)
        raise InvariantViolated(f"{kind}\nreplay: run_post({seed}) of tests/night") from error


def _exchange(draw: Random) -> Tally:
    from ray.exceptions import ActorUnavailableError

    now, heard, tally = 0.0, [], Tally()
    ray = LossyRay()
    node = LossyNode(ray)
    gone: list[Exception] = []
    letters = Correspondence(
        node,
        calls=ray,
        clock=lambda: now,
        arrived=lambda bag: heard.extend(answer.worker_id for answer in bag.answers),
        lost=gone.append,
    )
    lost_share = draw.choice([0.0, 0.1, 0.3])
    names = [f"w{number}" for number in range(LETTERS)]
    written = 0
    for _ in range(PATIENCE):
        if heard == names == node.read:
            break
        while written < LETTERS and draw.random() < 0.3:
            letters.put(Stop(names[written], "test"))
            written += 1
        letters.send()
        now += draw.uniform(0.0, 1.0)
        while ray.under_way and draw.random() < 0.7:
            tally.events += 1
            call, then = ray.under_way.pop(draw.randrange(len(ray.under_way)))
            arrives, answered = draw.random() >= lost_share, draw.random() >= lost_share
            value = call() if arrives else None
            if arrives and draw.random() < 0.05:  # Ray may run a call again after a broken link
                call()
            if then is not None:
                then(value if arrives and answered else ActorUnavailableError("away", None))
            letters.heard_at = now  # a node that stays away for long is lost: another test
        known = node.read == names[: len(node.read)]
        must(known, f"letters were read out of order or twice: {node.read[-3:]}")
        must(
            heard == names[: len(heard)], f"answers were heard out of order or twice: {heard[-3:]}"
        )
    must(node.read == names, f"{LETTERS - len(node.read)} letters never arrive")
    must(heard == names, f"{LETTERS - len(heard)} answers are never heard")
    must(not gone, f"the node counts as lost: {gone}")
    return tally
