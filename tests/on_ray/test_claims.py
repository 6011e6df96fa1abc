"""Claims while the control store is silent: nothing is found, nothing given up too soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
from core_cases import Clock

from orchestrator import __version__
from orchestrator.core.errors import ClusterError, ControlStoreLost
from orchestrator.core.events import Event, MoreCards
from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import Failure
from orchestrator.core.topology import legal_card_sets
from orchestrator.on_ray import claims
from orchestrator.on_ray.agent import PlacedAgent, usable_cards
from orchestrator.on_ray.channel import Calls
from orchestrator.on_ray.claims import (
    AGENT_PATIENCE_S,
    BEREFT_PATIENCE_S,
    CLAIM_PATIENCE_S,
    ORPHANED_AGENT_PATIENCE_S,
    RETRY_S,
    SILENCE_PATIENCE_S,
    Claim,
    Claims,
)
from orchestrator.on_ray.gcs import Gcs, RayNode
from orchestrator.on_ray.run_queue import Standing, Ticket
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.worker.protocol import HostFacts
from workloads.devices import device_class
from workloads.devices.monitor.host import CardTelemetry

HPU_1 = {
    "NodeID": "id-1",
    "Alive": True,
    "NodeName": "hpu-1",
    "NodeManagerAddress": "127.0.0.3",
    "NodeManagerHostname": "host",
    "Resources": {"HPU": 2.0, "emulated": 1.0, "server_cards": 2.0},
}


class ScriptedStore:
    def __init__(self) -> None:
        self.asked: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.silent_s = 0.0
        self.replaced = False

    trouble = Gcs.trouble  # the real words

    def nodes(self) -> None:
        raise AssertionError("asked in the loop's own thread")

    def ask(self, act: Any, then: Any = lambda _: None, *, wait_s: float = 0.0) -> None:
        self.asked.append((act, then))

    def collect(self) -> None:
        """Answers come when the test gives them."""

    def close(self, wait_s: float) -> None:
        self.waited_s = wait_s

    def answer(self, value: Any) -> None:
        self.asked.pop(0)[1](value)


class Channel:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_at: float | None = None

    @property
    def heard_at(self) -> float:
        return self._clock.now if self._heard_at is None else self._heard_at

    @heard_at.setter
    def heard_at(self, at: float) -> None:
        if self._heard_at is not None:
            self._heard_at = at

    def fall_silent(self) -> None:
        self._heard_at = self._clock.now

    def close(self) -> None:
        """Nothing is sent any more."""


class Queue:
    strangers = ("python train.py",)

    def look(self) -> None:
        raise AssertionError("asked in the loop's own thread")

    leave = look


class Case:
    def __init__(self, queue: Queue | None = None) -> None:
        self.clock, self.store = Clock(), ScriptedStore()
        self.left: list[Failure] = []
        self.may_come: list[set[Accelerator]] = []  # as it was reported
        self.claims = Claims(
            run="case",
            accelerators=None,
            log_dir=None,
            preload=(),
            clock=self.clock,
            calls=Calls(),
            gcs=self.store,  # type: ignore[arg-type]
            report=self.heard,
            arrived=lambda *_: None,
            left=lambda _, failure: self.left.append(failure),
            queue=queue,  # type: ignore[arg-type]
        )

    def heard(self, event: Event) -> None:
        if isinstance(event, MoreCards):
            self.may_come.append({*event.kinds})

    @property
    def held_cards(self) -> list[tuple[int, ...]]:
        return [node.card_indices for node in self.claims.foreign.values()]

    def pass_s(self, seconds: float, *, silent: bool) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1
            self.store.silent_s = self.store.silent_s + 1 if silent else 0.0
            self.claims.poll()


@pytest.fixture
def case() -> Case:
    return Case()


def facts(cards: tuple[str, ...]) -> HostFacts:
    return HostFacts(
        threads=1,
        version=__version__,
        server="socket",
        log_dir="logs",
        cards=cards,
    )


def claimed(case: Case, node: RayNode = HPU_1) -> Claim:
    case.claims.poll()
    case.store.answer({"id-1": node})
    (claim,) = case.claims.by_node.values()
    return claim


def loses_its_node(case: Case) -> None:
    [claim] = case.claims.by_node.values()
    case.claims.lose(claim, claims.node_lost("it went"))


def joins(case: Case, claim: Claim) -> Channel:
    channel = Channel(case.clock)
    claim.channel, claim.joined = channel, True  # type: ignore[assignment]
    return channel


def joined(case: Case) -> Channel:
    return joins(case, claimed(case))


def test_one_question_at_a_time(case: Case) -> None:
    case.pass_s(30, silent=True)
    assert len(case.store.asked) == 1
    case.store.answer({})
    case.pass_s(1, silent=False)
    assert len(case.store.asked) == 1


def test_no_patience_runs_out_while_it_is_silent(case: Case) -> None:
    claim = claimed(case)
    case.pass_s(SILENCE_PATIENCE_S - 5, silent=True)
    case.store.silent_s = 0.0
    case.store.asked = case.store.asked[-1:]
    case.store.answer({"id-1": HPU_1})
    assert case.claims.by_node == {"id-1": claim} and case.left == []
    case.claims.poll()


def test_a_silence_is_told_when_it_begins_and_when_it_ends(case: Case) -> None:
    case.pass_s(3, silent=False)
    assert case.may_come == []
    case.pass_s(30, silent=True)
    assert case.may_come == [{*Accelerator}]
    case.pass_s(3, silent=False)
    assert case.may_come == [{*Accelerator}, set()]


def test_it_is_lost_when_it_stays_silent_and_no_node_is_left(case: Case) -> None:
    case.pass_s(SILENCE_PATIENCE_S, silent=True)
    with pytest.raises(ControlStoreLost, match=r"has not answered since .* for 91 s, and no node"):
        case.pass_s(1, silent=True)


def test_the_cluster_is_given_up_before_its_jobs_are(case: Case) -> None:
    """For the next driver to go on, before the schedule says that no card is left."""
    joined(case)
    case.pass_s(20, silent=True)
    loses_its_node(case)
    with pytest.raises(ControlStoreLost, match="no node of the cluster is left"):
        case.pass_s(60, silent=True)
    assert BEREFT_PATIENCE_S < case.clock.now - 20 < ScheduleSettings().wait_for_nodes_s - 10


def test_a_silence_after_all_nodes_have_left_has_its_own_patience(case: Case) -> None:
    joined(case)
    case.pass_s(1, silent=False)
    loses_its_node(case)
    case.pass_s(BEREFT_PATIENCE_S + 5, silent=False)
    case.pass_s(BEREFT_PATIENCE_S, silent=True)
    with pytest.raises(ControlStoreLost):
        case.pass_s(1, silent=True)


def test_one_that_was_started_anew_is_not_waited_for(case: Case) -> None:
    case.store.replaced = True
    with pytest.raises(ControlStoreLost, match="head was restarted"):
        case.pass_s(10, silent=True)
    assert case.clock.now < 10


def test_nodes_that_work_are_kept_for_as_long_as_they_work(case: Case) -> None:
    joined(case)
    case.pass_s(7200, silent=True)
    case.store.replaced = True
    case.pass_s(7200, silent=True)
    assert case.left == []


def test_a_silent_agent_is_lost_with_its_node(case: Case) -> None:
    """Also where nobody waits for the stop of a worker, as while eight of them start."""
    channel = joined(case)
    case.pass_s(600, silent=False)
    channel.fall_silent()
    case.pass_s(AGENT_PATIENCE_S, silent=False)
    assert case.left == []
    case.pass_s(1, silent=False)
    assert [failure.message for failure in case.left] == ["its agent has not answered for 60 s"]


def test_agents_of_a_cluster_that_was_started_anew_are_not_waited_for(case: Case) -> None:
    """Ray told of one after 4 min 20 s in a rehearsal, and all cards stood still until then."""
    channel = joined(case)
    channel.fall_silent()
    case.store.replaced = True
    with pytest.raises(ControlStoreLost, match="no node of the cluster is left"):
        case.pass_s(ORPHANED_AGENT_PATIENCE_S + 1, silent=True)
    assert len(case.left) == 1


def test_time_in_which_nobody_listened_is_no_silence(case: Case) -> None:
    channel = joined(case)
    channel.fall_silent()
    case.pass_s(30, silent=False)
    case.clock.now += 3600
    case.claims.poll()
    case.pass_s(AGENT_PATIENCE_S - 31, silent=False)
    assert case.left == []
    case.pass_s(2, silent=False)
    assert len(case.left) == 1


def test_errors_while_it_is_away_take_no_node(case: Case) -> None:
    """A question that timed out is no list without nodes."""
    joined(case)

    class RpcError(Exception):
        """Named as Ray's is."""

    case.store.asked = case.store.asked[1:]
    case.pass_s(1, silent=True)
    case.store.answer(RpcError("Timed out while waiting for GCS to become available."))
    assert len(case.claims.joined()) == 1
    case.pass_s(2, silent=False)
    case.store.answer({})  # this is one
    assert case.claims.joined() == []


def test_a_cluster_without_a_card_is_still_given_up(case: Case) -> None:
    with pytest.raises(ClusterError, match="no card could be had for 60 s") as caught:
        for _ in range(70):
            case.pass_s(1, silent=False)
            case.store.answer({})
            case.claims.poll()
    assert not isinstance(caught.value, ControlStoreLost)


def test_a_cluster_that_lost_its_only_server_is_not_given_up_here(case: Case) -> None:
    """The schedule waits a quarter of an hour for servers; giving up sooner ended the night."""
    joined(case)
    for _ in range(16 * 60):
        case.pass_s(1, silent=False)
        case.store.answer({})
        case.claims.poll()
    assert len(case.left) == 1 and case.claims.joined() == []
    case.pass_s(1, silent=False)
    case.store.answer({"id-2": {**HPU_1, "NodeID": "id-2"}})
    assert [claim.ray_id for claim in case.claims.by_node.values()] == ["id-2"]


def test_the_reason_of_a_lost_node_names_the_silence(case: Case) -> None:
    claim = claimed(case)
    case.store.silent_s = 64.0
    joins(case, claim)
    case.claims.lose(claim, claims.node_lost("its agent does not answer"))
    [failure] = case.left
    assert "control store has not answered since" in failure.message
    assert failure.message.endswith("for 64 s; its agent does not answer")
    assert claim.node.name == "hpu-1"


@pytest.mark.parametrize("silent", [True, False])
def test_a_silent_store_is_not_waited_for_at_the_end(case: Case, silent: bool) -> None:
    case.pass_s(1, silent=silent)
    case.claims.close()
    assert (case.store.waited_s == 0) == silent


@pytest.mark.parametrize("joined_now", [True, False], ids=["connected", "gone"])
def test_agents_are_called_at_the_end_only_through_a_connection(case, monkeypatch, joined_now):
    """Outside one Ray would join some cluster for the call, or wait for one that is gone."""
    monkeypatch.setattr("ray.is_initialized", lambda: joined_now)
    claim = claimed(case)
    joins(case, claim)
    agent = MagicMock()
    agent.close.remote.side_effect = ConnectionError
    claim.placed = PlacedAgent(group=None, agent=agent, facts=None)
    case.claims.close()
    assert agent.close.remote.called is joined_now
    assert not case.claims.by_node and case.store.waited_s
    ended, _ = case.store.asked[-1]
    if not joined_now:
        ended()  # no call of Ray's


RIVAL = Ticket(run="first", run_id="i", host="h", kinds=("HPU",), since=0.0, driver="d", turn=True)


def test_nothing_is_claimed_out_of_turn_and_nothing_given_up() -> None:
    case = Case(Queue())
    waits = Standing(turn_due=False, may_claim=False, ahead=(RIVAL,))
    for _ in range(4000):
        case.pass_s(1, silent=False)
        while case.store.asked:
            look = case.store.asked[0][0].__name__ == "look"
            case.store.answer(waits if look else {"id-1": HPU_1})
    assert case.claims.by_node == {} and case.may_come == [{Accelerator.HPU}]
    assert case.claims.waits_for == "first (on h) has the cards"
    case.pass_s(2, silent=False)
    case.store.answer(Standing(turn_due=False, may_claim=True, ahead=()))
    case.store.answer({"id-1": HPU_1})
    assert list(case.claims.by_node) == ["id-1"] and case.claims.waits_for == ""
    case.store.answer(None)  # no card is free
    assert case.claims.by_node == {} and case.may_come == [{Accelerator.HPU}]
    assert case.claims.waits_for.endswith(
        "not free; other programs on the cluster: python train.py"
    )
    for nodes in [{"id-1": HPU_1}] * 200 + [{}]:  # type: ignore[var-annotated]
        case.pass_s(1, silent=False)
        while case.store.asked:
            about_nodes = case.store.asked[0][0].__name__ == "nodes"
            case.store.answer(nodes if about_nodes else None)
    assert case.may_come == [{Accelerator.HPU}, set()] and case.claims.waits_for == ""


def test_cards_of_a_node_that_others_give_back_are_claimed_later(monkeypatch) -> None:
    case = Case()
    real = HPU_1 | {"Resources": {"HPU": 3.0}}
    first = claimed(case, real)
    first.node = replace(first.node, card_indices=(0, 2))
    joins(case, first)
    case.store.asked.clear()

    def look() -> None:
        case.pass_s(RETRY_S + 1, silent=False)
        case.store.answer({"id-1": real})

    look()
    case.store.answer(None)  # it is not free yet
    assert case.claims.by_node == {"id-1": first}
    assert case.may_come == [{Accelerator.HPU}] and case.held_cards == [(1,)]
    look()
    assert list(case.claims.by_node) == ["id-1", "id-1+1"]
    monkeypatch.setattr(Calls, "add", lambda _, call, then: then(call))
    monkeypatch.setattr(claims, "AgentChannel", lambda *_, **__: Channel(case.clock))
    case.store.answer(PlacedAgent(group=None, agent=MagicMock(), facts=facts(cards=("1",))))
    later = case.claims.by_node["id-1+1"]
    assert later.joined and later.node.card_indices == (1,) and later.node.name == "hpu-1"
    assert later.node.server_id == first.node.server_id == "id-1"
    pair = legal_card_sets([first.node, later.node], first.node.accelerator, 2)
    assert {card.index for card in pair[0]} == {0, 1}
    look()
    assert case.may_come == [{Accelerator.HPU}, set()]
    assert len(case.claims.joined()) == 2 and not case.store.asked  # all three are ours
    case.pass_s(2, silent=False)
    case.store.answer({})
    assert case.claims.by_node == {} and len(case.left) == 2


def test_cards_that_others_keep_are_no_node_that_comes_and_goes(case: Case) -> None:
    real = HPU_1 | {"Resources": {"HPU": 3.0}}
    first = claimed(case, real)
    first.node = replace(first.node, card_indices=(0, 2))
    joins(case, first)
    case.store.asked.clear()

    def look(seconds: float) -> None:
        case.pass_s(seconds, silent=False)
        [question] = [each for each in case.store.asked if each[0].__name__ == "nodes"]
        case.store.asked.remove(question)
        question[1]({"id-1": real})

    look(1)
    assert "id-1+1" in case.claims.by_node
    look(CLAIM_PATIENCE_S + 1)
    assert list(case.claims.by_node) == ["id-1"]
    look(RETRY_S + 1)
    assert "id-1+1" in case.claims.by_node
    assert case.may_come == [{Accelerator.HPU}] and case.held_cards == [(1,)]
    case.claims.lose(first, claims.node_lost("its agent died"))  # the later claim lives on
    assert list(case.claims.by_node) == ["id-1+1"]
    look(RETRY_S + 1)
    assert list(case.claims.by_node) == ["id-1+1", "id-1"]
    look(CLAIM_PATIENCE_S + 1)
    assert case.may_come == [{Accelerator.HPU}]


def test_a_node_that_does_not_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    monkeypatch.setattr(Calls, "add", lambda _, call, then: then(call))
    claimed(case)
    case.store.answer(None)
    case.pass_s(6, silent=False)
    case.store.answer({"id-1": HPU_1})
    assert case.may_come == [{Accelerator.HPU}]
    broken = PlacedAgent(group=None, agent=None, facts=ValueError("no disk"))
    case.pass_s(1, silent=False)
    case.store.answer(broken)
    case.store.answer({"id-1": HPU_1})
    assert case.may_come == [{Accelerator.HPU}, set()] and case.claims.waits_for == ""


def test_a_cluster_that_can_have_no_queue_is_used_without_one() -> None:
    case = Case(Queue())
    case.claims.poll()
    case.store.answer(ValueError("no such call"))
    case.store.answer({"id-1": HPU_1})
    assert list(case.claims.by_node) == ["id-1"]


SOUND = CardTelemetry(power_w=1.0)
LOST = CardTelemetry(lost="GPU is lost")


@pytest.mark.parametrize(
    ("kind", "ids", "here", "usable", "left_out"),
    [
        ("GPU", "01234567", dict.fromkeys(range(8), SOUND) | {3: LOST}, "0124567", "GPU3: GPU is"),
        ("GPU", "012345678", dict.fromkeys(range(8), SOUND), "01234567", "'8' is no card"),
        ("GPU", "0123456", dict.fromkeys(range(8), SOUND), "0123456", ""),
        ("HPU", "0123", dict.fromkeys(range(4, 8), SOUND), "4567", ""),
        ("HPU", "0123", dict.fromkeys((2, 3, 6, 7), SOUND), "2367", ""),
        ("HPU", "4567", dict.fromkeys(range(4, 7), SOUND), "456", "'7' is no card"),
        ("HPU", "01", dict.fromkeys(range(1, 8), SOUND), "1", "'0' is no card"),
        ("GPU", "01", {}, "01", ""),
    ],
    ids=["lost", "more than there are", "fewer", "counted", "counted with a gap", "gone", "part",
         "no tool"],
)  # fmt: skip
def test_an_agent_has_the_cards_that_its_vendors_tool_has(
    kind: str,
    ids: str,
    here: dict[int, CardTelemetry],
    usable: str,
    left_out: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator(kind)
    monkeypatch.setattr(device_class(accelerator.device), "telemetry", staticmethod(lambda: here))
    cards, lines = usable_cards(accelerator, tuple(ids))
    assert cards == tuple(usable)
    assert len(lines) == bool(left_out) and left_out in "".join(lines)


def test_cards_by_uuid_are_resolved_and_parts_of_cards_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = device_class("cuda")
    monkeypatch.setattr(device, "telemetry", staticmethod(lambda: {0: SOUND, 1: SOUND}))
    monkeypatch.setattr(device, "uuids", staticmethod(lambda: {0: "GPU-aa", 1: "GPU-bb"}))
    cards, lines = usable_cards(Accelerator("GPU"), ("GPU-bb", "MIG-cc"))
    assert cards == ("1",) and "MIG instance" in lines[0]


def test_a_node_joins_with_the_cards_that_can_be_used(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that cannot are named, and not claimed again as if others had them."""
    monkeypatch.setattr(Calls, "add", lambda _, call, then: then(call))
    monkeypatch.setattr(claims, "AgentChannel", lambda *_, **__: Channel(case.clock))
    claim = claimed(case)
    whole = claim.node
    report = replace(facts(("0",)), cards_left_out=("HPU1: it is lost",))
    case.store.answer(PlacedAgent(group=None, agent=MagicMock(), facts=report))
    assert claim.joined and claim.node.server_cards == 2 and claim.node.card_indices == (0,)
    assert "hpu-1: Ray gave 2 cards, and 1 of them can be used: HPU1: it is lost" in caplog.text
    assert claims.unclaimed(whole, case.claims.by_node) is None
