"""The asker's side of the process server: one worker process, and the end of it.

``process_server.py`` says what travels over the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any


class ServedProcess:
    """The asker's side of one worker process; ``kill`` returns when it is really gone."""

    def __init__(
        self,
        server: str,
        *,
        name: str,
        environment: Mapping[str, str],
        log: str,
        cwd: str,
        channel: int,
    ) -> None:
        """Ask the server listening at ``server`` for a process; ``channel`` is its end of a
        socket pair and is closed here.

        Raises:
            OSError: the server is gone.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(server)
        request = {"name": name, "environment": dict(environment), "log": log, "cwd": cwd}
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._socket, [data], [channel])
        self._socket.sendall(data[sent:])
        os.close(channel)
        self._answers = self._socket.makefile("r")
        self.exit: Mapping[str, Any] | None = None
        self.pid: int = self._next()["pid"]

    def _next(self) -> Mapping[str, Any]:
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the process server is gone")
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Ask for the end of the process and its children; ``wait`` says when they are gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self) -> Mapping[str, Any]:
        """Wait until the process and its children are gone: ``exit`` (code, or minus the signal),
        ``asked`` and ``host_oom``. For one thread only.

        Raises:
            ConnectionError: the server itself died, and with it the process.
        """
        if self.exit is None:
            self.exit = self._next()
            self._socket.close()
        return self.exit


class HeldServer:
    """A server that others use, too, on which this process holds what it asks for there.

    Raises:
        OSError: it is gone.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(server)
            self._socket.sendall(json.dumps({"hold": True}).encode() + b"\n")
        except OSError:
            self._socket.close()
            raise

    def release(self) -> None:
        """Have all that this process asked for killed; ``wait`` says when it is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait(self) -> None:
        """Wait until the server is gone, or has done what ``release`` asks. For one thread only."""
        answer = b""
        with self._socket, contextlib.suppress(OSError):
            answer = self._socket.recv(4096)
        if not answer:
            wait_for_end(self._server)


def end_process(server: str, name: str) -> None:
    """Kill the process of this name, if there is one, and wait until it is gone.

    Raises:
        OSError: the server is gone, and with it every process of it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(server)
        connection.sendall(json.dumps({"end": name}).encode() + b"\n")
        while connection.recv(4096):
            pass


def wait_for_end(server: str) -> None:
    """Wait until a server whose guardian has ended is gone, and with it every process of it."""
    with contextlib.suppress(OSError):  # nobody listens any more
        while True:
            end_process(server, "")  # answered by one that has not noticed yet
