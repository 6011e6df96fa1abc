"""The Ray executor on a real, emulated cluster: which cards workers get, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import outside_device
import psutil
import pytest
import ray
from command_line import ROOT
from core_cases import a_job
from patience import alive, commands_naming, patience, until
from ray.util import placement_group, remove_placement_group
from ray_bench import Bench, emulated_node

from orchestrator.core.events import MoreCards, NodeLeft, StartWorker, StopWorker
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import FailureClass
from orchestrator.core.topology import legal_card_sets
from orchestrator.on_ray import claims, executor
from orchestrator.on_ray.claims import node_lost
from orchestrator.util.host import usable_cores

pytestmark = pytest.mark.ray


def gone_soon(pid: int) -> bool:
    return until(lambda: not alive(pid), 5, every_s=0.02)


def until_free(gpus: int) -> None:
    assert until(lambda: ray.available_resources().get("GPU", 0) == gpus, 20)


def test_a_mixed_cluster_is_discovered(bench: Bench) -> None:
    hpu, gpu, cpu = (bench.node(name) for name in ("hpu-1", "gpu-1", "cpu-1"))
    assert (hpu.accelerator, hpu.card_indices, hpu.server_cards) == ("HPU", (4, 5, 6, 7), 8)
    assert (gpu.accelerator, gpu.card_indices, gpu.server_cards) == ("GPU", (0, 1), 2)
    assert (cpu.accelerator, cpu.card_indices, cpu.server_cards) == ("CPU", (0,), 1)
    assert all(node.emulated for node in (hpu, gpu, cpu))
    assert {node.memory_bytes_per_card for node in (hpu, gpu, cpu)} == {512 * 2**20}
    assert hpu.device_name == "emulated HPU on CPU"
    free = ray.available_resources()
    assert [free.get(kind, 0.0) for kind in ("HPU", "GPU", "CPU")] == [0.0, 0.0, 0.0]


def test_every_worker_sees_only_its_own_card(bench: Bench) -> None:
    cards = tuple(reversed(bench.node("hpu-1").cards))
    workers = [bench.start(card)[0] for card in cards]
    assert [worker.info.visible_cards for worker in workers] == ["7", "6", "5", "4"]
    gpus = [bench.start(card)[0] for card in reversed(bench.node("gpu-1").cards)]
    assert [worker.info.visible_cards for worker in gpus] == ["1", "0"]
    assert len({worker.info.pid for worker in workers + gpus}) == 6
    assert gpus[0].info.niceness == os.getpriority(os.PRIO_PROCESS, 0)
    cards_on_host = 8 + 2 + 1
    assert gpus[0].info.threads == max(1, len(usable_cores()) // cards_on_host)
    bench.stop(*workers, *gpus)


@pytest.mark.parametrize(("count", "legal"), [(2, [(4, 5), (6, 7)]), (4, [(4, 5, 6, 7)])])
def test_gangs_get_aligned_cards(bench: Bench, count: int, legal: list[tuple[int, ...]]) -> None:
    """Each process of a gang sees all of its cards, as Habana documents it."""
    sets = legal_card_sets([bench.node("hpu-1")], Accelerator.HPU, count)
    assert [tuple(card.index for card in cards) for cards in sets] == legal
    workers = bench.start(*sets[-1])
    outcome = bench.ended(bench.run(sets[-1], workers, "ok")).outcome
    assert outcome.state is State.SUCCEEDED
    assert [rank.rank for rank in outcome.ranks] == list(range(count))
    seen = [rank.worker.visible_cards for rank in outcome.ranks if rank.worker]
    assert seen == [",".join(map(str, legal[-1]))] * count
    met = {rank.result.details["rendezvous"] for rank in outcome.ranks if rank.result}
    assert len(met) == 1 and str(workers[0].info.pid) in met.pop()
    bench.stop(*workers)


def test_a_warm_worker_takes_one_attempt_after_another(bench: Bench) -> None:
    card = bench.node("cpu-1").cards[0]
    workers = bench.start(card)
    pids = set()
    for _ in range(3):
        outcome = bench.ended(bench.run((card,), workers, "ok")).outcome
        assert outcome.state is State.SUCCEEDED and outcome.ranks[0].worker
        pids.add(outcome.ranks[0].worker.pid)
    assert pids == {workers[0].info.pid}
    bench.stop(*workers)


def test_a_segfault_becomes_a_failure_and_the_card_is_free(bench: Bench) -> None:
    card = bench.node("hpu-1").cards[1]
    (worker,) = bench.start(card)
    attempt_id = bench.run((card,), [worker], "segfault")
    outcome = bench.ended(attempt_id).outcome
    assert outcome.state is State.FAILED and outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.CRASH
    assert "SIGSEGV" in outcome.failure.message
    assert "about to read address zero" in outcome.failure.tail
    stopped = bench.stopped(worker.worker_id)
    assert stopped.failure == outcome.failure
    positions = [bench.seen.index(bench.ended(attempt_id)), bench.seen.index(stopped)]
    assert positions == sorted(positions)
    (again,) = bench.start(card)
    assert again.info.pid != worker.info.pid and again.info.visible_cards == "5"
    bench.stop(again)


def test_a_killed_agent_takes_its_workers_along_and_its_cards_come_back(bench, monkeypatch) -> None:
    """When Ray loses the agent, the processes beneath it end: attempt, worker, node; then the node
    is claimed anew. A card that another program took meanwhile is claimed when that gives it back,
    and a gang spans both claims."""
    node = bench.node("gpu-1")
    card = node.cards[1]
    (worker,) = bench.start(card)
    attempt_id = bench.run((card,), [worker], "sleep:600")
    bench.wait_for_phase(worker.worker_id, "measure")
    claim = bench.executor.claims.of(node.node_id)
    assert claim is not None and claim.placed is not None
    since = len(bench.seen)
    others = placement_group([{"GPU": 1}])  # it waits for a card
    with monkeypatch.context() as patch:
        patch.setattr(claims, "RETRY_S", 600.0)
        ray.kill(claim.placed.agent)
        outcome = bench.ended(attempt_id).outcome
        assert outcome.state is State.LOST and outcome.failure is not None
        assert outcome.failure.failure_class is FailureClass.NODE_LOST
        assert "its agent died" in outcome.failure.message
        bench.stopped(worker.worker_id)
        bench.wait_for(lambda e: isinstance(e, NodeLeft), since=since)
        assert gone_soon(worker.info.pid)
        assert others.wait(patience(60))
        until_free(1)
    bench.executor.claims.retry_at.clear()
    first = bench.joined_again(node.node_id, since)
    bench.wait_for(lambda e: isinstance(e, MoreCards) and bool(e.kinds), since=since)
    remove_placement_group(others)
    rest = bench.joined_again(f"{node.node_id}+1", since)
    assert {*first.card_indices, *rest.card_indices} == {0, 1}
    [pair] = legal_card_sets([first, rest], Accelerator.GPU, 2)
    workers = bench.start(*pair)
    outcome = bench.ended(bench.run(pair, workers, "ok")).outcome
    assert outcome.state is State.SUCCEEDED and len(outcome.ranks) == 2
    met = {rank.result.details["rendezvous"] for rank in outcome.ranks if rank.result}
    seen = [rank.worker.visible_cards for rank in outcome.ranks if rank.worker]
    assert len(met) == 1 and seen == ["0", "1"]
    bench.stop(*workers)
    since = len(bench.seen)
    with monkeypatch.context() as patch:  # and now whole again, for the other tests
        patch.setattr(claims, "RETRY_S", 600.0)
        for part in (first, rest):
            claim = bench.executor.claims.of(part.node_id)
            assert claim is not None
            bench.executor.claims.lose(claim, node_lost("the test gives it up"))
        until_free(2)
    bench.executor.claims.retry_at.clear()
    assert bench.joined_again(node.node_id, since).card_indices == (0, 1)


def tasks_named(bench: Bench, name: str) -> list[dict[str, Any]]:
    """The tasks of this name, as the source of `ray list tasks` has them: the emulated cluster has
    no dashboard that could be asked."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    from ray.util.state.common import protobuf_to_task_state_dict

    with init_grpc_channel(bench.cluster.address) as channel:
        source = gcs_service_pb2_grpc.TaskInfoGcsServiceStub(channel)
        told = source.GetTaskEvents(gcs_service_pb2.GetTaskEventsRequest(limit=10_000), timeout=30)
    tasks = [protobuf_to_task_state_dict(each) for each in told.events_by_task]
    return [task for task in tasks if task["name"] == name]


def running_task(bench: Bench, label: str, but: str = "") -> dict[str, Any]:
    """The one running task of this name, but not the one of this id."""
    running: list[dict[str, Any]] = []

    def look() -> bool:
        tasks = [task for task in tasks_named(bench, label) if task["task_id"] != but]
        running[:] = [task for task in tasks if task["state"] == "RUNNING"]
        return len(running) == 1

    bench.until(look, 40)
    return running[0]


def held(task: dict[str, Any], resource: str) -> dict[str, float]:
    """The cards that a task holds, by the placement group's name for their kind."""
    prefix = f"{resource}_group_"
    resources: dict[str, float] = task["required_resources"]
    return {n: v for n, v in resources.items() if n.startswith(prefix) and n.count("_") == 2}


def test_a_job_is_a_task_that_holds_its_cards_while_it_runs(bench: Bench) -> None:
    """Within its node's placement group, of which the rest stays free: the agent holds no card."""
    import ray

    pair = bench.node("hpu-1").cards[:2]
    workers = bench.start(*pair)
    label = a_job(model="sleep:601", accelerator=pair[0].accelerator, cards=2).label
    attempt_id = bench.run(pair, workers, "sleep:601")
    task = running_task(bench, label)
    ((group, count),) = held(task, "HPU").items()
    assert count == 2.0 and task["node_id"] == pair[0].node_id
    assert until(lambda: ray.available_resources().get(group) == 2.0, 20)
    bench.stop(*workers)
    bench.ended(attempt_id)
    ended = ["FINISHED"]
    assert until(lambda: [one["state"] for one in tasks_named(bench, label)] == ended, 30)
    assert until(lambda: ray.available_resources().get(group) == 4.0, 20)


def test_a_job_outlives_the_process_of_its_task_and_ends_when_that_is_cancelled(
    bench: Bench,
) -> None:
    """Ray's memory monitor ends tasks, too. A cancelled job has a row."""
    import ray

    card = bench.node("gpu-1").cards[0]
    (worker,) = bench.start(card)
    label = a_job(model="sleep:602", accelerator=card.accelerator, cards=1).label
    attempt_id = bench.run((card,), [worker], "sleep:602")
    first = running_task(bench, label)
    psutil.Process(first["worker_pid"]).kill()
    second = running_task(bench, label, but=first["task_id"])
    assert list(held(second, "GPU").values()) == [1.0]
    ray.cancel(ray.ObjectRef(bytes.fromhex(second["task_id"]) + (1).to_bytes(4, "little")))
    outcome = bench.ended(attempt_id).outcome
    assert outcome.state is State.LOST and outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.CANCELLED
    assert bench.stopped(worker.worker_id).failure is not None


def test_an_agent_that_does_not_answer_costs_its_node_until_it_is_claimed_anew(bench, monkeypatch):
    import ray

    monkeypatch.setattr(executor, "STOP_PATIENCE_S", 1.0)
    node = bench.node("gpu-1")
    busy, idle = bench.start(*node.cards)
    attempt_id = bench.run((node.cards[0],), [busy], "sleep:600")
    bench.wait_for_phase(busy.worker_id, "measure")
    claim = bench.executor.claims.of(node.node_id)
    assert claim is not None and claim.placed is not None
    agent = psutil.Process(
        ray.get(claim.placed.agent.__ray_call__.remote(lambda self: os.getpid()))
    )
    agent.suspend()
    before = len(bench.seen)
    bench.executor.perform(StopWorker(worker_id=busy.worker_id, reason="no progress"))
    outcome = bench.ended(attempt_id).outcome
    assert outcome.state is State.LOST and outcome.failure is not None
    assert "its agent has not answered for 1 s" in outcome.failure.message
    monkeypatch.undo()
    bench.stopped(busy.worker_id)
    stopped = bench.stopped(idle.worker_id)
    assert stopped.failure is not None
    assert stopped.failure.failure_class is FailureClass.NODE_LOST
    bench.joined_again(node.node_id, before)
    assert not alive(busy.info.pid) and not alive(idle.info.pid)
    (again,) = bench.start(node.cards[0])
    bench.stop(again)


def test_a_hang_that_holds_the_interpreter_is_stopped(bench: Bench) -> None:
    """No Python code can run in it."""
    card = bench.node("hpu-1").cards[0]
    (worker,) = bench.start(card)
    attempt_id = bench.run((card,), [worker], "hold-gil")
    bench.wait_for_phase(worker.worker_id, "measure")
    asked = time.monotonic()
    bench.executor.perform(StopWorker(worker_id=worker.worker_id, reason="no progress for 600 s"))
    stopped = bench.stopped(worker.worker_id, timeout_s=10)
    assert time.monotonic() - asked < patience(5) and stopped.failure is None
    assert not alive(worker.info.pid)
    outcome = bench.ended(attempt_id).outcome
    assert outcome.state is State.LOST and outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.HANG
    assert "no progress for 600 s" in outcome.failure.message


def test_a_worker_that_cannot_start_says_why(bench: Bench) -> None:
    card = bench.node("gpu-1").cards[0]
    bench.executor.perform(StartWorker(worker_id="broken-1", card=card))
    failure = bench.stopped("broken-1").failure
    assert failure is not None and failure.failure_class is FailureClass.IMPORT
    assert "habana_frameworks" in failure.message
    (again,) = bench.start(card)
    bench.stop(again)


def test_a_node_of_another_packages_device_joins_works_and_takes_everything_along(bench, tmp_path):
    with outside_device.installed(tmp_path):
        kind = Accelerator("XPU")
        bench.cluster.add(emulated_node("xpu-1", kind, (0, 1), 2))
        node = bench.node("xpu-1")
        (told,) = [each for each in ray.nodes() if each["NodeID"] == node.node_id]
        cards = {name: told["Resources"].get(name, 0) for name in ("XPU", "HPU", "GPU", "CPU")}
        assert cards == {"XPU": 2, "HPU": 0, "GPU": 0, "CPU": 0}
        assert node.accelerator is kind and node.card_indices == (0, 1)
        (worker,) = bench.start(node.cards[1])
        assert worker.info.visible_cards == "1"
        outcome = bench.ended(bench.run((node.cards[1],), [worker], "ok")).outcome
        assert outcome.state is State.SUCCEEDED
        attempt_id = bench.run((node.cards[1],), [worker], "sleep:600")
        bench.wait_for_phase(worker.worker_id, "measure")
        bench.remove("xpu-1")
        outcome = bench.ended(attempt_id, timeout_s=60).outcome
        assert outcome.state is State.LOST and outcome.failure is not None
        assert outcome.failure.failure_class is FailureClass.NODE_LOST
        stopped = bench.stopped(worker.worker_id, timeout_s=60)
        assert stopped.failure is not None
        assert stopped.failure.failure_class is FailureClass.NODE_LOST
        bench.wait_for(lambda e: isinstance(e, NodeLeft) and e.node_id == node.node_id, 60)
        assert gone_soon(worker.info.pid)
    # the rest of the cluster works on
    card = bench.node("cpu-1").cards[0]
    workers = bench.start(card)
    assert bench.ended(bench.run((card,), workers, "ok")).outcome.state is State.SUCCEEDED
    bench.stop(*workers)


_DRIVER = """
import time
from orchestrator.core.topology import parse_emulation
from orchestrator.on_ray.local_cluster import emulate

with emulate(parse_emulation("1x2", [])) as cluster:
    print(cluster.directory, flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_of_a_driver_that_was_killed() -> None:
    """By themselves Ray's agents stay for a minute."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdout is not None
        directory = driver.stdout.readline().strip()
        assert len(commands_naming(directory)) >= 3
        driver.kill()
    assert until(lambda: not commands_naming(directory), 30, every_s=0.2)
    assert until(lambda: not Path(directory).exists(), 30)
