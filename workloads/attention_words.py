"""Arguments of attention functions beyond queries, keys and values, as transformers passes them.

An attention function of ours gets every such argument and computes by some of them. One that it
does not know may change what the model computes, and must never be passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.base import Unsupported

#: Words that change the result where they are set; others only say what was asked for.
_CHANGING = ("softcap", "sliding_window", "position_bias", "s_aux")


def refuse_unknown(attention: str, words: Mapping[str, Any]) -> None:
    """Check words that an attention function does not compute by.

    Args:
        attention: what the function is called in a message.
        words: all that it was given and has no parameter for.

    Raises:
        Unsupported: one of them would change the result.
    """
    for name in _CHANGING:
        if words.get(name) is not None:
            raise Unsupported(f"{attention} does not know {name}, which this model uses")
