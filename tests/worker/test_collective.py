"""Ranks meet, exchange values in rank order, and notice when one of them dies."""

import multiprocessing as mp
import os
import time
from typing import Any

import psutil
import pytest
from patience import patience

from workloads.base import CollectiveFailed
from workloads.bench.collective import OneCard, Rendezvous, joined, listen
from workloads.devices import device_for

CPU = device_for("cpu")


def test_the_collective_of_one_card_returns_its_input() -> None:
    """With one rank there is nobody to wait for."""
    assert OneCard().gather("x") == ["x"]


def _exchange(rank: int, rendezvous: Rendezvous, listener: Any = None) -> dict[str, Any]:
    before = dict(os.environ)
    with joined(
        rendezvous=rendezvous, rank=rank, world_size=2, device=CPU, listener=listener
    ) as gang:
        gang.gather(None)
        seen = gang.gather({"rank": rank})
        sockets = psutil.Process().net_connections("inet")
        listening = {_version_4(each.laddr.ip) for each in sockets if each.status == "LISTEN"}
        variables = (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"])
    import torch.distributed as dist

    return {
        "seen": seen,
        "variables": variables,
        "listening": listening,
        "left": not dist.is_initialized() and dict(os.environ) == before,
    }


def _version_4(address: str) -> str:
    """An address as IP version 4 has it: a socket of version 6 shows it as ``::ffff:…``."""
    return address.removeprefix("::ffff:")


def _die(rendezvous: Rendezvous) -> None:
    with joined(rendezvous=rendezvous, rank=1, world_size=2, device=CPU) as gang:
        gang.gather(None)
        os._exit(9)


@pytest.fixture
def spawn() -> Any:
    """Start processes that import everything anew, and leave none behind."""
    context = mp.get_context("spawn")
    started: list[Any] = []

    def start(target: Any, *args: Any) -> Any:
        process = context.Process(target=target, args=args)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.join(patience(20))
        process.kill()


def _rank_one(rendezvous: Rendezvous, channel: Any) -> None:
    channel.send(_exchange(1, rendezvous))
    channel.send(_exchange(1, channel.recv()))


@pytest.mark.slow
def test_two_processes_exchange_values_and_can_meet_again(spawn: Any) -> None:
    """Values come in rank order on both; leaving is clean enough to join another gang; on loopback
    none listens anywhere else."""
    mine, theirs = mp.get_context("spawn").Pipe()
    first = listen("127.0.0.1", world_size=2, timeout_s=patience(60))
    spawn(_rank_one, first.rendezvous, theirs)
    here = _exchange(0, first.rendezvous, first)
    there = mine.recv()
    second = listen("127.0.0.1", world_size=2, timeout_s=patience(60))
    mine.send(second.rendezvous)
    again = _exchange(0, second.rendezvous, second)

    assert here["seen"] == there["seen"] == again["seen"] == [{"rank": 0}, {"rank": 1}]
    assert here["variables"] == ("0", "2", str(first.rendezvous.port))
    assert there["variables"] == ("1", "2", str(first.rendezvous.port))
    assert here["left"] and there["left"] and again["left"]
    assert mine.recv()["left"]
    assert here["listening"] == there["listening"] == {"127.0.0.1"}


@pytest.mark.slow
def test_the_death_of_a_rank_is_an_error_in_the_others(spawn: Any) -> None:
    """Who waits for a dead rank gets CollectiveFailed with its own rank, and can go on."""
    listener = listen("127.0.0.1", world_size=2, timeout_s=patience(60))
    spawn(_die, listener.rendezvous)
    began = time.monotonic()
    with (
        pytest.raises(CollectiveFailed, match="rank 0, gather"),
        joined(
            rendezvous=listener.rendezvous,
            rank=0,
            world_size=2,
            device=CPU,
            listener=listener,
        ) as gang,
    ):
        gang.gather(None)
        gang.gather(1)
    assert time.monotonic() - began < patience(60)
    import torch.distributed as dist

    assert not dist.is_initialized()


def test_a_rank_that_never_comes_ends_the_wait() -> None:
    """The time limit of the rendezvous holds for meeting."""
    listener = listen("127.0.0.1", world_size=2, timeout_s=2)
    with (
        pytest.raises(CollectiveFailed, match=r"rank 0, meeting at 127\.0\.0\.1"),
        joined(
            rendezvous=listener.rendezvous,
            rank=0,
            world_size=2,
            device=CPU,
            listener=listener,
        ),
    ):
        pass


@pytest.mark.slow
def test_an_address_that_is_not_ours_is_refused() -> None:
    """Rank 0 says where it could not listen."""
    with pytest.raises(CollectiveFailed, match=r"rank 0 cannot listen on 203\.0\.113\.7"):
        listen("203.0.113.7", world_size=2, timeout_s=2)
