"""The queue as it lies in a control store, here one in memory: two drivers at any two moments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.on_ray.run_queue import NAMESPACE, QueueOptions, RunQueue, submitted_ticket


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


def test_one_after_the_other(store: Store) -> None:
    first, second = (joins(store, name, at) for name, at in (("aa", 1.0), ("bb", 2.0)))
    assert first.look().may_claim
    waits = second.look()
    assert not waits.may_claim and waits.why.startswith("aa (on ")
    assert first.look().may_claim and not second.look().may_claim
    first.leave()
    assert second.look().may_claim
    second.leave()
    assert not store.values


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
