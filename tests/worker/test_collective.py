"""Ranks meet, exchange values in rank order, and notice when one of them dies."""

import multiprocessing as mp
import os
import time
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from patience import patience

from workloads.base import CollectiveFailed
from workloads.bench.collective import Listener, OneCard, Rendezvous, joined, listen
from workloads.devices import device_for

CPU = device_for("cpu")


def test_the_collective_of_one_card_returns_its_input() -> None:
    assert OneCard().gather("x") == ["x"]


def _listen(timeout_s: float | None = None) -> Listener:
    return listen("127.0.0.1", world_size=2, timeout_s=timeout_s or patience(60))


def _joined(rank: int, rendezvous: Rendezvous, listener: Listener | None = None) -> Any:
    return joined(rendezvous=rendezvous, rank=rank, world_size=2, device=CPU, listener=listener)


def _exchange(
    rank: int, rendezvous: Rendezvous, listener: Listener | None = None
) -> dict[str, Any]:
    before = dict(os.environ)
    with _joined(rank, rendezvous, listener) as gang:
        gang.gather(None)
        seen = gang.gather({"rank": rank})
        sockets = psutil.Process().net_connections("inet")
        addresses = [each.laddr.ip for each in sockets if each.status == "LISTEN"]
        variables = (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"])
    return {
        "seen": seen,
        "variables": variables,
        "listening": {address.removeprefix("::ffff:") for address in addresses},
        "left": not dist.is_initialized() and dict(os.environ) == before,
    }


def _rank_one(channel: Any) -> None:
    """Meet twice, and die in the third gang."""
    for _ in range(2):
        channel.send(_exchange(1, channel.recv()))
    with _joined(1, channel.recv()) as gang:
        gang.gather(None)
        os._exit(9)


@pytest.mark.slow
def test_processes_exchange_values_meet_again_and_notice_a_death() -> None:
    """On loopback none listens anywhere else."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_rank_one, args=(theirs,), daemon=True)
    process.start()
    try:
        for _ in range(2):
            listener = _listen()
            mine.send(listener.rendezvous)
            ranks = [_exchange(0, listener.rendezvous, listener), mine.recv()]
            for number, rank in enumerate(ranks):
                assert rank["seen"] == [{"rank": 0}, {"rank": 1}] and rank["left"]
                assert rank["variables"] == (str(number), "2", str(listener.rendezvous.port))
                assert rank["listening"] == {"127.0.0.1"}
        listener = _listen()
        mine.send(listener.rendezvous)
        began = time.monotonic()
        with (
            pytest.raises(CollectiveFailed, match="rank 0, gather"),
            _joined(0, listener.rendezvous, listener) as gang,
        ):
            gang.gather(None)
            gang.gather(1)
        assert time.monotonic() - began < patience(60) and not dist.is_initialized()
    finally:
        process.kill()
        process.join()


def test_a_rank_that_never_comes_ends_the_wait() -> None:
    listener = _listen(timeout_s=1)
    with (
        pytest.raises(CollectiveFailed, match=r"rank 0, meeting at 127\.0\.0\.1"),
        _joined(0, listener.rendezvous, listener),
    ):
        pass


@pytest.mark.slow
def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(CollectiveFailed, match=r"rank 0 cannot listen on 203\.0\.113\.7"):
        listen("203.0.113.7", world_size=2, timeout_s=1)
