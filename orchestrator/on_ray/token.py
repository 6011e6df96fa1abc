"""Advice for users whose Ray cluster asks for a token that this process does not have.

Ray itself sends the token along (since 2.52). Where it has none to send, it tries for twenty
seconds and then speaks of a crashed cluster; where it was told of a file that is not there, it
aborts the process. So the token is looked for here first, in Ray's order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError
from workloads import files
from workloads.environment import variables

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


_TOKEN_BYTES = 32
#: With these Ray takes its token from somewhere else, or has the cluster manager judge it.
_KUBERNETES = "RAY_ENABLE_K8S_TOKEN_AUTH"


def new_token(directory: Path) -> dict[str, str | None]:
    """Write a random token into ``directory``, for this user alone, and return the variables by
    which a process asks for it and sends it (None: not set).

    Raises:
        OSError: it cannot be written.
    """
    path = directory / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_TOKEN_BYTES))
    return {MODE: "token", TOKEN: None, TOKEN_PATH: str(path), _KUBERNETES: None}


@contextlib.contextmanager
def ray_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset) for the block, and have this process's Ray follow them within it
    and after it: it keeps the token that it once read, which may be another cluster's.

    Raises:
        ClusterError: this version of Ray knows no tokens, so a cluster cannot be closed to others.
    """
    try:
        with variables(values):
            _read_environment_again()
            yield
    finally:
        _read_environment_again()


def _read_environment_again() -> None:
    """Have Ray forget what it knows of tokens. If the environment names one that is not there, it
    goes on with what it has, since it aborts the process where it finds none."""
    try:
        from ray import _raylet

        loader: Any = _raylet.AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled
        config: Any = _raylet.Config  # type: ignore[attr-defined]
    except (ImportError, AttributeError) as error:
        raise ClusterError(
            "this version of Ray cannot ask for a token, so that everyone who reaches a cluster's "
            "ports could run code here; install Ray 2.52 or later (pip install 'ray>=2.52')"
        ) from error
    if missing_token() is None:
        config.initialize("")  # first: threads that still end would look for a token that is gone
        loader.instance().reset_cache()


def asks_for_token(error: object) -> bool:
    """Return whether Ray refused for want of the right token. Its class is not in every version."""
    return type(error).__name__ == "AuthenticationError"


def take_own_token() -> None:
    """Send the token that Ray keeps for its user, where nothing else is set. ``ray.init`` does so,
    and a request to the cluster before that must not be refused."""
    with contextlib.suppress(ImportError):  # Ray before 2.60 does not
        from ray._private.authentication import authentication_token_setup as ray_token

        logging.getLogger(ray_token.__name__).setLevel(logging.ERROR)
        ray_token.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def missing_token() -> str | None:
    """Reason why this process, which is set to send a token, has none; None if it has one or needs
    none."""
    if os.environ.get(MODE, "").lower() != "token" or os.environ.get(TOKEN):
        return None
    named = os.environ.get(TOKEN_PATH)
    path = Path(named).expanduser() if named else Path.home() / ".ray" / "auth_token"
    try:
        there = bool(files.read_text(path, limit_bytes=files.MIB).strip())
    except (OSError, ValueError) as error:
        return f"{MODE} is token, but {path} cannot be read: {error}. {_ADVICE}"
    return None if there else f"{MODE} is token, but {path} is empty. {_ADVICE}"


def token_advice(where: str) -> str:
    """Advice on the variable to set, once the cluster at ``where`` has refused us."""
    mode = os.environ.get(MODE, "")
    if mode.lower() == "token":
        why = "the one that was sent is not the cluster's"
    else:
        why = f"none was sent, because {MODE} is {mode or 'not set'}"
    return f"{where} asks for a token, and {why}. {_ADVICE}"


_ADVICE = (
    f"Set {MODE}=token and {TOKEN_PATH} to a file that holds the cluster's token and that only you "
    "can read (docs/security.md)"
)
