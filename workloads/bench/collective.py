"""Collective operations of a gang, a process per card, over ``hccl`` (Gaudi), ``nccl`` (NVIDIA) or
``gloo`` (CPU). All have a time limit: ranks would otherwise wait for a dead one for ever."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from workloads.base import CollectiveFailed
from workloads.util.processes import variables

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: gloo's variable: the network interface to whose address a group binds.
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address and port of rank 0, where the ranks of one attempt meet."""

    address: str
    port: int
    #: Of the joining rank's node, in Ray's table of nodes; "": groups of the host take its name's.
    own_address: str = ""
    timeout_s: float = 300.0  # for meeting, and for every collective operation


class OneCard:
    """The collective of a job on one card: nothing to wait for."""

    def gather(self, value: Any) -> list[Any]:
        """The value itself, as the only rank's."""
        return [value]


#: A gloo group for pickled objects, kept off the cards' links; none if the default is gloo.
_groups: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCollective:
    """The collective of a gang, over the default process group of torch.distributed."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank; values are pickled. CollectiveFailed if
        a rank died or did not come within the time limit."""
        import torch.distributed as dist

        # Serves as the barrier too: ``dist.barrier`` uses the card and distorts memory figures.
        values: list[Any] = [None] * self.world_size
        with _naming_the_rank(self.rank, "gather"):
            if dist.get_backend() != "gloo" and "host" not in _groups:
                _groups["host"] = dist.new_group(backend="gloo")
            dist.all_gather_object(values, value, group=_groups.get("host"))
        return values


@dataclass(slots=True)
class Listener:
    """Rank 0's open port, held from the moment it is announced until the gang has met."""

    rendezvous: Rendezvous
    store: Any = field(repr=False)  # torch.distributed.TCPStore


def listen(address: str, world_size: int, timeout_s: float = 300.0) -> Listener:
    """Open a port on ``address`` of this host for a gang; the system chooses a free one.
    CollectiveFailed if nothing can listen there."""
    try:
        store = _open_store(address, 0, world_size, timedelta(seconds=timeout_s))
    except (RuntimeError, OSError) as error:
        raise CollectiveFailed(f"rank 0 cannot listen on {address}: {error}") from error
    return Listener(
        rendezvous=Rendezvous(address=address, port=store.port, timeout_s=timeout_s), store=store
    )


@contextlib.contextmanager
def joined(
    *,
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    device: Device,
    listener: Listener | None = None,
) -> Iterator[TorchCollective]:
    """Join the gang's process group for the block; without a ``listener``, rank 0 opens the port.
    CollectiveFailed if the ranks did not meet within the time limit."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise CollectiveFailed(f"rank {rank} is still a member of an earlier gang")
    timeout = timedelta(seconds=rendezvous.timeout_s)
    with variables(_gang_variables(rendezvous, rank, world_size)):
        with _naming_the_rank(rank, f"meeting at {rendezvous.address}:{rendezvous.port}"):
            device.register_collective()
            at = (rendezvous.address, rendezvous.port, world_size)
            if listener is not None:
                store = listener.store
            elif rank == 0:
                store = _open_store(*at, timeout)
            else:
                store = dist.TCPStore(*at, timeout=timeout, wait_for_workers=False)
            dist.init_process_group(
                device.collective_backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
        try:
            yield TorchCollective(rank=rank, world_size=world_size)
        finally:
            _groups.clear()
            if dist.is_initialized():
                # Errors from dead peers must not mask the job's.
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()


def _open_store(address: str, port: int, world_size: int, timeout: timedelta) -> Any:
    """Open a listening TCPStore. On loopback it gets a socket: torch's own listens on every
    interface, and objects from any client are unpickled."""
    import torch.distributed as dist

    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if not _is_loopback(address):
        return dist.TCPStore(address, port, world_size, **options)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as server:
        at = (address, server.getsockname()[1], world_size)
        options["master_listen_fd"] = server.fileno()
        try:
            store = dist.TCPStore(*at, **options)
        except (RuntimeError, NotImplementedError):  # torch before 2.6: its newer server cannot
            store = dist.TCPStore(*at, use_libuv=False, **options)
        server.detach()  # the store closes it
        return store


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name
        return address == "localhost"


def _gang_variables(rendezvous: Rendezvous, rank: int, world_size: int) -> dict[str, str]:
    """The variables by which DeepSpeed, accelerate and others recognise a running gang."""
    values = {
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    # By default gloo takes the address of the host's name: on Ubuntu that is 127.0.1.1, by
    # /etc/hosts, where ranks on other nodes wait for it until they give up.
    address = rendezvous.address if _is_loopback(rendezvous.address) else rendezvous.own_address
    interface = _interface_of(address)
    if interface and (_is_loopback(address) or not os.environ.get(_GLOO_INTERFACE)):
        values[_GLOO_INTERFACE] = interface
    return values


def _interface_of(address: str) -> str:
    """Name of this host's network interface that has the address; "" if none has."""
    if _is_loopback(address):
        address = "127.0.0.1"
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""


@contextlib.contextmanager
def _naming_the_rank(rank: int, doing: str) -> Iterator[None]:
    """Name the rank and its operation in errors of torch.distributed."""
    try:
        yield
    except (RuntimeError, ValueError, ConnectionError, TimeoutError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CollectiveFailed(f"rank {rank}, {doing}: {first_line}") from error
