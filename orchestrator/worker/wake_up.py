"""Wake-ups between processes of one host: hints that may be lost, so that nobody has to look often.

A datagram to an abstract address (unix(7)): it needs no file, nobody waits for it to arrive, and
the address goes with the process. A process in another network namespace, of another container for
one, is not heard; whoever waits looks by itself from time to time.
"""

from __future__ import annotations

import contextlib
import select
import socket

_KIND = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC


class WakeUp:
    """A place to be woken at, until ``close``."""

    def __init__(self, name: str) -> None:
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):  # somebody has the address: then nobody wakes us
            self._socket = socket.socket(socket.AF_UNIX, _KIND)
            self._socket.bind(_address(name))

    def wait(self, seconds: float) -> None:
        """Wait to be woken, at most so long."""
        poll = select.poll()
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN)
        if poll.poll(max(1, round(seconds * 1000))) and self._socket is not None:
            with contextlib.suppress(OSError):
                while self._socket.recv(1):
                    pass

    def close(self) -> None:
        """Hear nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def wake(name: str) -> None:
    """Wake whoever waits there, if anybody does."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, _KIND) as sender:
        sender.sendto(b"!", _address(name))


def _address(name: str) -> bytes:
    return b"\0nightgrid " + name.encode()[:90]
