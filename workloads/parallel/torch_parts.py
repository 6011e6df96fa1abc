"""Parts of torch that strategies need and that older releases lack: refused by name."""

from __future__ import annotations

import inspect
import pkgutil

from workloads.base import Unsupported

#: The release that strategies are tested with, which has all that they need.
_TESTED = "2.13"


def require(strategy: str, *names: str) -> None:
    """Make sure that this torch has what a strategy uses.

    Args:
        strategy: as the job names it.
        names: ``module:attribute``; for a parameter, ``module:function(parameter)``.

    Raises:
        Unsupported: something is missing.
    """
    import torch

    if missing := [name.replace(":", ".") for name in names if not _has(name)]:
        raise Unsupported(
            f"strategy {strategy}: torch {torch.__version__} has no {' and no '.join(missing)}, "
            f"which torch {_TESTED} has; install that or a newer one, or choose another strategy"
        )


def _has(name: str) -> bool:
    name, _, parameter = name.rstrip(")").partition("(")
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return not parameter or parameter in inspect.signature(found).parameters
