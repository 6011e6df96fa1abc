"""What to tell someone whose Ray cluster asks for a token that this process does not have.

Ray itself sends the token along (``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN_PATH``, since 2.52); without
one its errors come after twenty seconds and name a crashed cluster instead.
"""

from __future__ import annotations

import os

_MODE = "RAY_AUTH_MODE"


def asks_for_token(error: BaseException) -> bool:
    """Whether Ray refused for want of the right token. Its class is not in every version."""
    return type(error).__name__ == "AuthenticationError"


def token_advice(where: str, error: BaseException) -> str:
    """What is wrong with the token for the cluster at ``where``, and what to set."""
    mode = os.environ.get(_MODE, "")
    if mode.lower() != "token":
        why = f"none was sent, because {_MODE} is {mode or 'not set'}"
    elif "no authentication token" in str(error) or "couldn't find" in str(error):
        why = "there is none here"
    else:
        why = "the one that was sent is not the cluster's"
    return (
        f"{where} asks for a token, and {why}. Set {_MODE}=token and RAY_AUTH_TOKEN_PATH to a file "
        "that holds the cluster's token and that only you can read (docs/security.md)"
    )


def check_token(address: str) -> str | None:
    """What is wrong with this process's token for the control store at ``address``, if anything.

    ``ray.init`` would try for twenty seconds and then speak of a crashed cluster.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

    try:
        GcsClient(address=address)
    except Exception as error:  # whatever else it is, joining will say
        if asks_for_token(error):
            return token_advice(f"the Ray cluster at {address}", error)
    return None
