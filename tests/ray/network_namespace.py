"""A network of a stranger's own beside this machine's: another host, as far as sockets can tell."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WAIT = "import sys; print('here', flush=True); sys.stdin.read()"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherHost:
    """The host of strangers.

    Attributes:
        gateway: the address of this machine as it is seen from there.
        address: of the strangers.
        prefix: goes before every command that is to run there.
    """

    gateway: str
    address: str
    prefix: tuple[str, ...] = ()

    def python(self, *arguments: str) -> list[str]:
        return [*self.prefix, sys.executable, *arguments]


SECOND_LOOPBACK = OtherHost(gateway="127.0.0.213", address="127.0.0.214")


@contextlib.contextmanager
def other_host() -> Iterator[OtherHost]:
    """A network namespace, joined to this one by a pair of virtual cables; where this user may
    make none, a second loopback address, at which only sockets of all interfaces answer. All of it
    ends with the block."""
    if shutil.which("unshare") is None:
        yield SECOND_LOOPBACK
        return
    holder = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", _WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        made = holder.stdout.readline() == "here\n" and _join_networks(holder.pid)
        if made:
            number = os.getpid() % 250
            yield OtherHost(
                gateway=f"10.213.{number}.1",
                address=f"10.213.{number}.2",
                prefix=("nsenter", f"--net=/proc/{holder.pid}/ns/net"),
            )
        else:
            yield SECOND_LOOPBACK
    finally:
        holder.stdin.close()
        holder.wait(10)
        holder.stdout.close()


def _join_networks(pid: int) -> bool:
    number, here, there = os.getpid() % 250, f"ngt{os.getpid()}", f"ngs{os.getpid()}"
    ip = shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if ip is None or shutil.which("nsenter") is None:
        return False
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net")
    commands: Sequence[Sequence[str]] = (
        (ip, "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(pid)),
        (ip, "address", "add", f"10.213.{number}.1/24", "dev", here),
        (ip, "link", "set", here, "up"),
        (*inside, ip, "address", "add", f"10.213.{number}.2/24", "dev", there),
        (*inside, ip, "link", "set", there, "up"),
        (*inside, ip, "link", "set", "lo", "up"),
    )
    return all(
        subprocess.run(command, capture_output=True, check=False).returncode == 0
        for command in commands
    )
