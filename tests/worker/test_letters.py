"""Letters and answers: each arrives once and in order, whatever calls are lost or overtaken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.on_ray.calls import Calls, Then
from orchestrator.on_ray.correspondence import Correspondence
from orchestrator.worker.letters import Answers, Bag, InOrder, Letter, Stop, Stopped
from orchestrator.worker.wire import packed, unpacked


def stopped(*names: str) -> tuple[Stopped, ...]:
    return tuple(Stopped(name) for name in names)


def test_answers_come_again_until_they_are_acknowledged() -> None:
    """And keep their numbers."""
    answers = Answers()
    for answer in stopped("a", "b"):
        answers.put(answer)
    assert answers.wait(0) == (1, stopped("a", "b"))
    assert answers.wait(0) == (1, stopped("a", "b"))
    answers.acknowledge(1)
    answers.put(Stopped("c"))
    assert answers.wait(0) == (2, stopped("b", "c"))
    answers.acknowledge(1)  # told late
    assert answers.wait(0) == (2, stopped("b", "c"))
    answers.acknowledge(3)
    assert answers.wait(0) == (4, ())


def test_posts_that_overtake_others_wait_for_them_and_none_is_read_twice() -> None:
    """In whichever order they come."""
    posts = InOrder()
    assert posts.add(2, b"two") == []
    assert posts.add(3, b"three") == [] and posts.received == 0
    assert posts.add(1, b"one") == [b"one", b"two", b"three"]
    assert posts.add(2, b"two") == [] and posts.received == 3


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ray(Calls):
    """Calls that the test carries out, or loses."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[[], Any], Then | None]] = []

    def add(self, call: Any, then: Then) -> None:
        self.made.append((call, then))


class Agent:
    """Answers as a ``NodeAgent`` does, and says when it was told to stop a worker."""

    def __init__(self, ray: Ray) -> None:
        self._ray = ray
        self._answers, self._posts = Answers(), InOrder()
        self.read: list[Letter] = []
        self.post, self.mail = (Method(self, name) for name in ("_post", "_mail"))

    def remote(self, name: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        call = lambda: getattr(self, name)(*arguments)  # noqa: E731
        if name == "_post":  # nobody waits for its answer
            self._ray.made.append((call, None))
        return call

    def _post(self, number: int, letters: bytes) -> None:
        for post in self._posts.add(number, letters):
            for letter in unpacked(post):
                self.read.append(letter)
                self._answers.put(Stopped(letter.worker_id))

    def _mail(self, acknowledged: int, post: tuple[int, bytes] | None) -> bytes:
        if post is not None:
            self._post(*post)
        self._answers.acknowledge(acknowledged)
        return packed(Bag(*self._answers.wait(0), self._posts.received, None, None, False))


class Method:
    def __init__(self, agent: Agent, name: str) -> None:
        self._agent, self._name = agent, name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return self._agent.remote(self._name, arguments)


class Line:
    """A correspondence over calls that can be lost."""

    def __init__(self) -> None:
        self.ray, self.clock = Ray(), Clock()
        self.agent = Agent(self.ray)
        self.heard: list[str] = []
        self.lost: list[Exception] = []
        self.letters = Correspondence(
            self.agent,
            calls=self.ray,
            clock=self.clock,
            arrived=lambda bag: self.heard.extend(answer.worker_id for answer in bag.answers),
            lost=self.lost.append,
        )

    def write(self, *names: str) -> None:
        for name in names:
            self.letters.put(Stop(name, "test"))
        self.letters.send()

    def carry_out(self, error: Exception | None = None, *, arrives: bool = True) -> None:
        """Carry out the oldest call; with an error, its answer is lost, and where it never
        ``arrives``, so is the call."""
        call, then = self.ray.made.pop(0)
        value = call() if arrives else None
        if then is not None:
            then(error or value)


def unavailable() -> Exception:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the connection broke", None)


def test_letters_go_with_the_call_that_asks_for_answers() -> None:
    """One call for both, while there is one to be made; else a call of their own."""
    line = Line()
    line.write("a", "b")
    assert len(line.ray.made) == 1
    line.write("c")
    assert len(line.ray.made) == 2
    line.carry_out()
    line.carry_out()
    assert [letter.worker_id for letter in line.agent.read] == ["a", "b", "c"]
    assert line.heard == ["a", "b"]
    line.letters.send()
    line.carry_out()
    assert line.heard == ["a", "b", "c"] and not line.lost


def test_an_answer_that_is_lost_is_told_again_and_handled_once() -> None:
    """The call did its work; what it said never came."""
    line = Line()
    line.write("a")
    line.carry_out(unavailable())
    assert line.heard == [] and len(line.agent.read) == 1
    line.letters.send()
    assert not line.ray.made, "not at once"
    line.clock.now += 1.0
    line.letters.send()
    line.carry_out()
    assert line.heard == ["a"] and len(line.agent.read) == 1
    line.letters.send()
    line.carry_out()
    assert line.heard == ["a"]


def test_a_post_that_is_lost_is_sent_again_and_keeps_its_place() -> None:
    """The next one waits for it at the agent."""
    line = Line()
    line.letters.send()
    line.write("a")
    line.write("b")
    ask, lost, overtaking = line.ray.made
    line.ray.made = [overtaking, ask]
    del lost
    line.clock.now += 10.0
    line.carry_out()
    assert line.agent.read == []
    line.carry_out()  # the bag says that nothing was received, so all is sent again
    while line.ray.made:
        line.carry_out()
    assert [letter.worker_id for letter in line.agent.read] == ["a", "b"]
    line.letters.send()
    line.carry_out()
    assert line.heard == ["a", "b"]


def test_an_agent_that_stays_away_is_lost() -> None:
    """Unavailable for a while is not; dead is at once."""
    line = Line()
    for _ in range(25):
        line.letters.send()
        if line.ray.made:
            line.carry_out(unavailable(), arrives=False)
        line.clock.now += 1.0
    assert [type(error).__name__ for error in line.lost] == ["ActorUnavailableError"]
    line = Line()
    line.letters.send()
    line.carry_out(RuntimeError("it died"), arrives=False)
    assert [str(error) for error in line.lost] == ["it died"]
