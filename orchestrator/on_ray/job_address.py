"""The address of a cluster's job server, which is its dashboard."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from orchestrator.errors import SubmitError

DEFAULT_PORT = 8265
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_TIMEOUT_S = 5.0


def is_job_address(address: str | None) -> bool:
    """Return whether this, or else the environment, names a job server and not a control store."""
    known = address or next(filter(None, map(os.environ.get, ADDRESS_VARIABLES)), "")
    return known.startswith(("http://", "https://"))


def resolve_job_address(address: str | None) -> str:
    """The URL of a job server that listens, from ``--address`` or the environment.

    Raises:
        SubmitError: none is given, it is of another kind, or nothing listens there.
    """
    named = {name: os.environ.get(name, "") for name in ADDRESS_VARIABLES}
    chosen = address or next((value for value in named.values() if value.startswith("http")), "")
    if not chosen:
        raise SubmitError(
            "no cluster to talk to: give --address http://HEAD:8265 (the dashboard's address), "
            f"or set {ADDRESS_VARIABLES[0]}"
        )
    if "://" not in chosen:
        chosen = f"http://{chosen}"
    try:
        parts = urlsplit(chosen)
        port = parts.port or (443 if parts.scheme == "https" else DEFAULT_PORT)
    except ValueError as error:
        raise SubmitError(f"'{chosen}' is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SubmitError(f"'{chosen}' is not a job server; it has the form http://HEAD:8265")
    try:
        socket.create_connection((parts.hostname, port), timeout=_TIMEOUT_S).close()
    except (OSError, ValueError) as error:  # a ValueError: no host can be named so
        raise SubmitError(
            f"nothing answers at {parts.hostname}:{port}: {error}. Is the head node up "
            "(`ray start --head`), its dashboard reachable from here (it listens on its own "
            "loopback unless given --dashboard-host), or an SSH tunnel needed?"
        ) from error
    return chosen if parts.port or parts.scheme == "https" else f"{chosen.rstrip('/')}:{port}"
