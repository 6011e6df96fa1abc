"""From the words of a real failure to its class and to what becomes of the job: one table.

The device's own words are in ``tests/workloads/devices/test_devices.py``; here they go the whole
way of a worker's failure, and a job fails with each class until it is given up.
"""

from __future__ import annotations

import errno

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
)
from schedule_cases import Cluster, job, node, planned

from orchestrator.core.events import RunAttempt
from orchestrator.core.job import State
from orchestrator.core.outcome import FailureClass
from orchestrator.on_ray.claims import agent_failure
from orchestrator.scheduler.retry import POLICIES
from orchestrator.worker.worker import describe
from workloads import base
from workloads.devices import device_for

#: Device, exception as it was seen, class.
SEEN: list[tuple[str, BaseException, FailureClass]] = [
    (
        "cuda",
        RuntimeError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 "
            "GiB of which 3.34 GiB is free."
        ),
        FailureClass.OUT_OF_MEMORY,
    ),
    (
        "hpu",
        RuntimeError(
            "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 "
            "(1024)MB"
        ),
        FailureClass.OUT_OF_MEMORY,
    ),
    (
        "cuda",
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
        ),
        FailureClass.HOST_OUT_OF_MEMORY,
    ),
    ("hpu", MemoryError(), FailureClass.HOST_OUT_OF_MEMORY),
    (
        "hpu",
        base.Unsupported("fp16 on Gaudi needs Gaudi2 or newer"),
        FailureClass.UNSUPPORTED,
    ),
    (
        "cpu",
        base.BadConfiguration("tensor_parallel 3 does not divide 32 attention heads"),
        FailureClass.BAD_CONFIGURATION,
    ),
    (
        "hpu",
        RuntimeError("Graph compile failed. synStatus=synStatus 26 [Generic failure]."),
        FailureClass.COMPILE,
    ),
    (
        "hpu",
        RuntimeError("synStatus=26 [Generic failure] Device acquire failed."),
        FailureClass.ACQUIRE,
    ),
    (
        "cuda",
        RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
        FailureClass.ACQUIRE,
    ),
    (
        "cpu",
        base.CardFaulty("a product of 256 x 64 matrices has 12 wrong elements of 65,536"),
        FailureClass.CARD_FAULTY,
    ),
    (
        "cpu",
        RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[127.0.0.1]:23456"
        ),
        FailureClass.COLLECTIVE,
    ),
    (
        "cuda",
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error"),
        FailureClass.COLLECTIVE,
    ),
    ("cpu", SystemExit(3), FailureClass.CRASH),
    (
        "hpu",
        ModuleNotFoundError("No module named 'habana_frameworks'"),
        FailureClass.IMPORT,
    ),
    (
        "cuda",
        ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory"),
        FailureClass.IMPORT,
    ),
    (
        "cpu",
        base.DataMissing("/data/chatglm3-6b has no config.json, so it is not a model's directory"),
        FailureClass.DATA_MISSING,
    ),
    (
        "cpu",
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/AdvertiseGen/dev.json"),
        FailureClass.DATA_MISSING,
    ),
    ("cpu", KeyError("hidden_size"), FailureClass.ERROR),
    ("cuda", RuntimeError("CUDA error: an illegal memory access"), FailureClass.ERROR),
]


@pytest.mark.parametrize(
    ("device", "error", "expected"),
    SEEN,
    ids=[f"{expected}-{device}-{type(error).__name__}" for device, error, expected in SEEN],
)
def test_a_workers_exception_is_of_the_class_of_its_words(
    device: str, error: BaseException, expected: FailureClass
) -> None:
    """The row has one line with its words, and the end of the traceback."""
    try:
        raise error
    except BaseException as raised:
        failure = describe(raised, device=device_for(device), memory_bytes=None, node_name="n")
    assert failure.failure_class is expected
    words = str(error).split()
    assert not words or words[-1].rstrip("'\"") in failure.message
    assert failure.message.splitlines() == [failure.message]
    assert type(error).__name__ in failure.tail


#: Of Ray 2.60, whose memory monitor killed an actor of ours.
LOW_ON_MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "127.0.0.2, ID: 02a3efc02a770ecdfbb6b6403beac3babb7f79b35c9f84f091f7670b) was 5.25GB used / "
    "23.54GB limit (0.222962) OOM kill reason: Memory usage 5565751296B exceeded threshold of "
    "505530208B (2.0% of 25276510208B limit) Object store memory usage: [- objects spillable: 0"
)
#: What Ray has instead of an answer, and the class of what ran on that node.
RAYS: list[tuple[RayError, FailureClass]] = [
    (OutOfMemoryError(LOW_ON_MEMORY), FailureClass.HOST_OUT_OF_MEMORY),
    (RayError(LOW_ON_MEMORY), FailureClass.HOST_OUT_OF_MEMORY),
    (
        NodeDiedError("Task failed because the node it was running on is dead"),
        FailureClass.NODE_LOST,
    ),
    (ActorDiedError(), FailureClass.NODE_LOST),
    (
        ActorUnavailableError("the actor is temporarily unavailable", None),
        FailureClass.NODE_LOST,
    ),
]


@pytest.mark.parametrize(
    ("error", "expected"),
    RAYS,
    ids=[f"{type(error).__name__}-{expected}" for error, expected in RAYS],
)
def test_what_ray_says_of_a_lost_agent_is_a_class(error: RayError, expected: FailureClass) -> None:
    """With Ray's words at the end of the row."""
    failure = agent_failure(error)
    assert failure.failure_class is expected
    assert str(error).strip()[-200:] in failure.tail


@pytest.mark.parametrize("failure_class", FailureClass)
def test_a_job_that_always_fails_is_tried_as_often_as_its_class_says(
    failure_class: FailureClass,
) -> None:
    """Every attempt is a row with its failure, the last one final, with the state and the reason
    of the class; retries go to the other card or node where the class says so."""
    policy = POLICIES[failure_class]
    cluster = Cluster(planned(job()), card_failures=99, node_failures=99, breaker_failures=99)
    cluster.join(node("n1", cards=8), node("n2", cards=8))
    for _ in range(200):
        if cluster.finished is not None:
            break
        if cluster.running:
            cluster.ends(cluster.only(), State.FAILED, failure_class, took=60)
        elif cluster.starting:
            cluster.ready()
        elif cluster.stopping:
            cluster.stopped()
        else:
            cluster.tick(min(at for at in cluster.wakes if at > cluster.now) - cluster.now)
    tried = [c.attempt for c in cluster.log if isinstance(c, RunAttempt)]
    assert len(tried) == policy.retries + 1
    assert [row.final for row in cluster.rows] == [False] * policy.retries + [True]
    for row in cluster.rows:
        assert row.outcome is not None and row.outcome.failure is not None
        assert row.outcome.failure.failure_class is failure_class
        assert str(failure_class) in row.reason
    last = cluster.finals()["a"]
    assert last.state is policy.state and policy.reason in last.reason
    cards = [attempt.cards[0] for attempt in tried]
    if policy.elsewhere == "card":
        assert len(set(cards)) == len(cards)
    if policy.elsewhere == "node":
        assert len({card.node_id for card in cards}) == min(2, len(cards))
