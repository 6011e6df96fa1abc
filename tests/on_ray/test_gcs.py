"""Questions to the control store are asked beside the loop; its silence is seen, and told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_cases import Clock

from orchestrator.core.errors import ControlStoreLost
from orchestrator.on_ray.agent import end_stale_actors
from orchestrator.on_ray.gcs import (
    JOINING,
    SILENT_AFTER_S,
    Gcs,
    is_absence,
    outlived,
    within,
)
from orchestrator.worker.orphans import Owner

#: Fails what waits for something that does not come.
MOST_S = 30.0


class RpcError(Exception):
    """Named as Ray's is."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Gcs]:
    asked = Gcs(clock)
    yield asked
    assert asked.close(MOST_S)


def frozen(store: Gcs) -> threading.Event:
    answers, asked = threading.Event(), threading.Event()

    def act() -> None:
        asked.set()
        assert answers.wait(MOST_S)

    store.ask(act)
    assert asked.wait(MOST_S)
    return answers


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def asked(store: Gcs, act: Callable[[], Any]) -> Any:
    got: list[Any] = []
    store.ask(act, got.append)
    while not got:
        store.wait(MOST_S)
        store.collect()
    return got[0]


def test_answers_come_in_order_and_in_the_asking_thread(store: Gcs) -> None:
    seen: list[tuple[int, int]] = []
    threads: list[int] = []
    for number in range(20):
        store.ask(
            lambda number=number: (threads.append(threading.get_ident()), number)[1],
            lambda value: seen.append((value, threading.get_ident())),
        )
    while len(seen) < 20:
        store.wait(MOST_S)
        store.collect()
    assert seen == [(number, threading.get_ident()) for number in range(20)]
    assert threading.get_ident() not in threads


def test_an_answer_in_time_is_there_at_once(store: Gcs) -> None:
    got: list[int] = []
    store.ask(lambda: 7, got.append, wait_s=MOST_S)
    assert got == [7] and store.trouble == ""


def test_silence_is_told_and_ends(store: Gcs, clock: Clock) -> None:
    answers = frozen(store)
    clock.now += SILENT_AFTER_S
    assert store.silent_s == 0 and store.trouble == ""
    clock.now += 1
    assert store.silent_s == SILENT_AFTER_S + 1
    assert "has not answered since" in store.trouble and "for 6 s" in store.trouble
    late: list[int] = []
    store.ask(lambda: 1, late.append, wait_s=MOST_S)  # it does not wait behind another
    assert late == []
    answers.set()
    while not late:
        store.wait(MOST_S)
        store.collect()
    assert store.silent_s == 0 and store.trouble == ""


def test_errors_of_a_store_that_is_away_are_no_answers(store: Gcs, clock: Clock) -> None:
    for _ in range(3):
        error = asked(store, raising(RpcError("Timed out while waiting for GCS")))
        assert isinstance(error, RpcError) and is_absence(error)
        clock.now += 4
    assert store.silent_s == 12
    assert isinstance(asked(store, raising(ValueError("no such node"))), ValueError)
    assert store.silent_s == 0


def test_a_store_that_nobody_asked_was_not_silent(store: Gcs, clock: Clock) -> None:
    asked(store, lambda: 1)
    clock.now += 3600
    answers = frozen(store)
    assert store.silent_s == 0
    answers.set()


def test_a_head_that_was_started_anew_is_known(store: Gcs, clock: Clock) -> None:
    asked(store, raising(RuntimeError("RPC error: WrongClusterID: Perhaps the client …")))
    clock.now += SILENT_AFTER_S + 1
    assert store.replaced and "head was restarted" in store.trouble


def test_a_process_that_ray_would_end_gets_an_error(store: Gcs) -> None:
    """``ray.init`` and its like raise SystemExit."""
    assert isinstance(asked(store, raising(SystemExit(1))), SystemExit)


def test_closing_does_not_wait_for_a_frozen_store(clock: Clock) -> None:
    store = Gcs(clock)
    answers = frozen(store)
    assert not store.close(0.05)
    answers.set()


def test_what_waits_is_left_behind() -> None:
    assert within(MOST_S, lambda: None) and within(MOST_S, raising(OSError()))
    answers = threading.Event()
    assert not within(0.05, answers.wait)
    answers.set()


@pytest.mark.parametrize("name", JOINING)
def test_who_joins_a_cluster_outlives_its_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reads the limits when a process joins."""
    monkeypatch.delenv(name, raising=False)
    with outlived():
        assert os.environ[name] == JOINING[name]
    assert name not in os.environ
    monkeypatch.setenv(name, "7")
    with outlived():
        assert os.environ[name] == "7"
    assert os.environ[name] == "7"


def test_a_head_that_goes_while_a_driver_joins_is_no_crash(monkeypatch) -> None:
    """Ray speaks of a wrong token then."""

    def refused(**_: object) -> list[dict[str, str]]:
        raise RuntimeError(
            "RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted."
        )

    monkeypatch.setattr("ray.util.list_named_actors", refused)
    with (
        Owner(run_id="0123456789ab", invocation_id="i").marks_this_process(),
        pytest.raises(ControlStoreLost, match="the cluster's head went"),
    ):
        end_stale_actors()
