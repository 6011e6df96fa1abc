"""The queue of runs: who may claim cards, as tickets come, go, die and fall silent."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.on_ray.run_queue import (
    ARRIVAL_S,
    GRACE_S,
    SILENCE_S,
    Ticket,
    Watch,
    standing,
)


def ticket(number: int, **values: object) -> Ticket:
    known: dict[str, object] = {
        "run": f"run-{number}",
        "run_id": f"id-{number}",
        "host": "h",
        "kinds": ("HPU",),
        "since": float(number),
        "driver": f"driver-{number}",
    }
    return Ticket(**known | values)  # type: ignore[arg-type]


def test_first_come_first_served() -> None:
    first, second = ticket(1), ticket(2)
    assert standing(first, [second]).turn_due
    waits = standing(second, [first])
    assert not waits.turn_due and waits.why == "run-1 (on h) came first or has a higher priority"
    assert not standing(first, [replace(second, taking=True)]).turn_due
    began = replace(first, turn=True)
    assert standing(began, [second]).may_claim
    assert standing(second, [began]).why == "run-1 (on h) has the cards"


def test_priority_overtakes_those_that_wait_and_preempts_nobody() -> None:
    has, waits, urgent = ticket(1, turn=True), ticket(2), ticket(3, priority=5)
    assert [each.run for each in standing(waits, [has, urgent]).ahead] == ["run-1", "run-3"]
    assert [each.run for each in standing(urgent, [has, waits]).ahead] == ["run-1"]
    assert standing(has, [waits, urgent]).may_claim


def test_runs_of_other_cards_do_not_wait_for_each_other() -> None:
    gpu, hpu = ticket(1, kinds=("GPU",), turn=True), ticket(2)
    both = ticket(3, kinds=("GPU", "HPU"))
    assert standing(hpu, [gpu]).turn_due
    assert standing(both, [gpu, hpu]).ahead == (gpu, hpu)


def test_a_killed_driver_leaves_the_queue() -> None:
    """One that waited at once; one that had its turn, and has a supervisor, after its grace."""
    watch = Watch()
    waiting, having = ticket(1, supervised=True), ticket(2, turn=True, supervised=True)
    alone = ticket(3, turn=True)
    everybody = {"driver-1", "driver-2", "driver-3"}
    assert watch.counting(0.0, [waiting, having, alone], everybody) == [waiting, having, alone]
    assert watch.counting(1.0, [waiting, having, alone], set()) == [having]
    times = range(2, int(GRACE_S) + 2, 5)
    counting = [watch.counting(float(at), [having], set()) for at in times]
    assert counting[0] == [having] and watch.counting(GRACE_S + 9, [having], set()) == []


def test_a_frozen_driver_holds_up_nobody_and_has_its_place_when_it_is_back() -> None:
    """Its beat does not change for a minute in which the queue could be looked at."""
    watch = Watch()
    frozen = ticket(1)
    seen = [bool(watch.counting(float(at), [frozen], {"driver-1"})) for at in range(0, 90, 2)]
    assert seen == [at < SILENCE_S for at in range(0, 90, 2)]
    assert watch.counting(91.0, [replace(frozen, beat=1)], {"driver-1"})


def test_nobody_is_silent_while_the_control_store_is() -> None:
    watch = Watch()
    assert watch.counting(0.0, [ticket(1)], {"driver-1"})
    assert watch.counting(600.0, [ticket(1)], {"driver-1"})


def test_a_submitted_run_keeps_its_place_while_its_driver_starts() -> None:
    """One that was sent first goes first, though its driver takes longer to start; two minutes."""
    watch = Watch()
    sent = replace(ticket(0, submission="job-0", since=0.5), driver="")
    mine = ticket(1)
    looks = [watch.counting(float(at), [], {"driver-1"}, [sent]) for at in range(0, 140, 4)]
    assert [bool(look) for look in looks] == [at < ARRIVAL_S for at in range(0, 140, 4)]
    assert not standing(mine, looks[0]).turn_due
    assert Watch().counting(0.0, [replace(sent, beat=5)], {""}, [sent]) == [replace(sent, beat=5)]


def test_of_two_turns_the_first_in_the_queue_claims() -> None:
    """A driver that was frozen may come back to a turn that was given on meanwhile."""
    back, other = ticket(1, turn=True), ticket(2, turn=True)
    assert standing(back, [other]).may_claim and not standing(other, [back]).may_claim


def test_tickets_of_another_version_are_left_out() -> None:
    text = ticket(7).to_json()
    assert Ticket.from_json(text) == ticket(7)
    assert Ticket.from_json(text[:-1] + ', "more": 1}') == ticket(7)
    assert Ticket.from_json("{}") is None and Ticket.from_json("no") is None


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(["HPU", "GPU"])), max_size=6))
def test_of_one_kind_one_run_claims_and_somebody_always_may(wishes: list[tuple[int, str]]) -> None:
    waiting = [
        ticket(number, priority=priority, kinds=(kind,))
        for number, (priority, kind) in enumerate(wishes, 1)
    ]
    served: list[Ticket] = []
    having: list[Ticket] = []
    while waiting or having:
        for mine in list(waiting):
            if standing(mine, [*waiting, *having]).turn_due:
                waiting.remove(mine)
                having.append(replace(mine, turn=True))
        claiming = [mine for mine in having if standing(mine, [*waiting, *having]).may_claim]
        assert claiming == having != []
        assert len({each.kinds for each in claiming}) == len(claiming)
        served.append(having.pop(0))
    for kind in ("HPU", "GPU"):
        runs = [each.run for each in served if each.kinds == (kind,)]
        order = sorted(
            (-priority, number) for number, (priority, k) in enumerate(wishes, 1) if k == kind
        )
        assert runs == [f"run-{number}" for _, number in order]
