"""Values as bytes between the processes of one run, and nowhere else: driver, agents and workers.

The one place where anything is unpickled. These bytes come through Ray, or through a socket pair
between a process and its parent, from processes that may run code here anyway (docs/security.md).
Results, files of others and downloads are never read so.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


def pickled(value: Any) -> bytes:
    """Pickle a value for ``unpickled`` in another process of the run."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpickled(data: bytes) -> Any:
    """Return the value of which ``pickled`` made these bytes.

    Raises:
        Exception: of many kinds: the other process is of another version.
    """
    return pickle.loads(data)


def send(channel: Connection, message: tuple[Any, ...]) -> None:
    """Send as ``Connection.send`` does, with the pickler that is in C alone."""
    channel.send_bytes(pickled(message))
