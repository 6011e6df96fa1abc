"""Ranks meet, exchange values in rank order, and notice when one of them dies."""

import contextlib
import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from patience import patience

from workloads.base import CollectiveFailed
from workloads.bench.collective import Listener, Rendezvous, joined, listen
from workloads.devices import device_for

CPU = device_for("cpu")


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


# ---------------------------------------------------------------- two servers

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def rank_on_a_server(rank: int) -> None:
    """One rank, talking to the test in lines: rank 0 says its port, rank 1 is told it."""
    if rank == 0:
        listener = listen(ADDRESSES[0], world_size=2, timeout_s=patience(30))
        print(listener.rendezvous.port, flush=True)
        port = listener.rendezvous.port
    else:
        listener, port = None, int(sys.stdin.readline())
    rendezvous = Rendezvous(
        address=ADDRESSES[0], port=port, timeout_s=patience(30), own_address=ADDRESSES[rank]
    )
    with _joined(rank, rendezvous, listener) as gang:
        print(json.dumps(gang.gather(rank)), flush=True)


@contextlib.contextmanager
def servers(hosts: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two shells, each in a network and a host name of its own, joined by a cable. As on Ubuntu,
    the name resolves to 127.0.1.1."""
    command = (
        f"mount --bind {hosts} /etc/hosts && hostname gaudi && echo ready && read go && "
        "exec {python} -c 'import test_collective; test_collective.rank_on_a_server({rank})'"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": ""}
    shells = [
        subprocess.Popen(
            [
                *("unshare", "--net", "--mount", "--uts", "sh", "-c"),
                command.format(python=sys.executable, rank=rank),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for shell in shells:
            assert shell.stdout is not None
            if (line := shell.stdout.readline()) != "ready\n":
                pytest.skip(f"this machine permits no network namespaces: {line}")
        first, second = (str(shell.pid) for shell in shells)
        cable = ["ip", "link", "add", "cable", "netns", first]
        commands = [[*cable, "type", "veth", "peer", "name", "cable", "netns", second]]
        for pid, address in zip((first, second), ADDRESSES, strict=True):
            inside = ["nsenter", "--target", pid, "--net", "ip"]
            commands += [
                [*inside, "address", "add", f"{address}/24", "dev", "cable"],
                [*inside, "link", "set", "cable", "up"],
                [*inside, "link", "set", "lo", "up"],
            ]
        for each in commands:
            done = subprocess.run(each, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine permits no cable between namespaces: {done.stderr}")
        yield shells
    finally:
        for shell in shells:
            shell.kill()
            shell.communicate()


@pytest.mark.slow
def test_ranks_of_two_servers_meet_where_each_name_is_a_loopback_address(tmp_path: Path) -> None:
    """Each binds to its node's address in Ray's table: by its name, rank 0 waited for 60 s."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 gaudi\n", encoding="ascii")
    with servers(hosts) as (first, second):
        assert first.stdin and first.stdout and second.stdin and second.stdout
        first.stdin.write("go\n")
        first.stdin.flush()
        second.stdin.write(f"go\n{first.stdout.readline()}")
        second.stdin.flush()
        for shell in (first, second):
            output = shell.communicate(timeout=patience(60))[0]
            assert output.splitlines()[-1:] == ["[0, 1]"], output
