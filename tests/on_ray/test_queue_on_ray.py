"""The queue as it lies in a control store, here one in memory: two drivers at any two moments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.on_ray.run_queue import (
    ARRIVAL_S,
    GRACE_S,
    NAMESPACE,
    SILENCE_S,
    QueueOptions,
    RunQueue,
    Ticket,
    Watch,
    standing,
    submitted_ticket,
)


class Store:
    def __init__(self) -> None:
        self.values: dict[tuple[bytes, bytes], bytes] = {}
        self.dead: set[str] = set()
        self.drivers: dict[str, str] = {}
        self.before: Callable[[], None] = lambda: None

    def internal_kv_put(self, key, value, overwrite, namespace, timeout) -> int:
        self.before()
        added = (namespace, key) not in self.values
        if added or overwrite:
            self.values[namespace, key] = value
        return int(added)

    def internal_kv_keys(self, prefix: bytes, namespace: bytes, timeout: float) -> list[bytes]:
        self.before()
        return [key for space, key in self.values if space == namespace and key.startswith(prefix)]

    def internal_kv_multi_get(self, keys, namespace, timeout) -> Mapping[bytes, bytes]:
        self.before()
        found = {key: self.values.get((namespace, key)) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def internal_kv_del(self, key: bytes, prefix: bool, namespace: bytes, timeout: float) -> int:
        self.before()
        return int(self.values.pop((namespace, key), None) is not None)

    def get_all_job_info(self, **_: Any) -> dict[str, Any]:
        self.before()
        return {
            driver: SimpleNamespace(
                job_id=bytes.fromhex(driver),
                is_dead=driver in self.dead,
                entrypoint=command,
                config=SimpleNamespace(ray_namespace="nightgrid-1"),
            )
            for driver, command in self.drivers.items()
        }


@pytest.fixture
def store() -> Store:
    return Store()


def joins(store: Store, driver: str, since: float, **options: Any) -> RunQueue:
    run = options.pop("run", driver)
    store.drivers[driver] = f"run {run}"
    return RunQueue(
        run=run,
        run_id=f"id of {run}",
        kinds=("HPU",),
        options=QueueOptions(since=since, **options),
        client=lambda: store,
        driver=lambda: driver,
        clock=lambda: 0.0,
    )


@pytest.mark.parametrize("earlier", ["aa", "bb"])
def test_at_no_moment_do_two_claim(store: Store, earlier: str) -> None:
    moments = 0
    while True:
        store.values.clear()
        since = {"aa": 1.0, "bb": 1.0, earlier: 0.0}
        first, second = (joins(store, name, since[name]) for name in ("aa", "bb"))
        found, calls = [], 0

        def meanwhile(second: RunQueue = second, at: int = moments) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                store.before, before = lambda: None, store.before
                found.append(second.look())  # noqa: B023
                store.before = before

        store.before = meanwhile
        found.append(first.look())
        store.before = lambda: None
        last = [first.look(), second.look()]
        assert [each.may_claim for each in last].count(True) == 1
        # Whoever was let in in between still is.
        named = dict(zip(("bb", "aa") if len(found) == 2 else ("aa",), found, strict=True))
        now = {"aa": last[0], "bb": last[1]}
        assert all(now[name].may_claim for name, each in named.items() if each.may_claim)
        if calls <= moments:
            break
        moments += 1
    assert moments > 10


def test_a_killed_driver_leaves_and_its_successor_is_known(store: Store) -> None:
    old = joins(store, "aa", 1.0, run="night", supervised=True)
    waits = joins(store, "bb", 2.0)
    assert old.look().may_claim and not waits.look().may_claim
    store.dead.add("aa")
    assert not waits.look().may_claim
    new = joins(store, "cc", 1.0, run="night", supervised=True)
    assert new.look().may_claim and not waits.look().may_claim
    new.leave()
    assert waits.look().may_claim
    store.dead.add("bb")
    assert joins(store, "dd", 3.0).look().may_claim


def test_programs_without_a_ticket_are_named(store: Store) -> None:
    store.drivers["ee"] = "python train.py --key=hf_abcdefghijklmnopqrstuvwxyz0123456789"
    queue = joins(store, "aa", 1.0)
    queue.look()
    assert len(queue.strangers) == 1 and "train.py" in queue.strangers[0]
    assert "hf_abcdef" not in queue.strangers[0]


def test_submitted_runs_are_expected(store: Store) -> None:
    job = {
        "status": "PENDING",
        "start_time": 500,
        "metadata": {"made_by": "nightgrid", "run": "sent", "kinds": "HPU", "priority": "1"},
    }
    store.values[b"job", b"_ray_internal_job_info_job-1"] = json.dumps(job).encode()
    queue = joins(store, "aa", 1.0)
    assert queue.look().why.startswith("sent (on its way")
    for ended in ({"status": "SUCCEEDED"}, {"metadata": None}, {"metadata": {"made_by": "me"}}):
        assert submitted_ticket("job-1", job | ended) is None
    del store.values[b"job", b"_ray_internal_job_info_job-1"]
    assert queue.look().may_claim
    assert all(space == NAMESPACE for space, _ in store.values)


# ---------------------------------------------------------------- who may claim


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
