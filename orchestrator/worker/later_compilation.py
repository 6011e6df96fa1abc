"""Imports of libraries that decorate functions with ``torch.compile``.

The decorator compiles nothing, yet it imports all of torch's compiler: six tenths of a second of
CPU for functions that most jobs never call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any


@contextlib.contextmanager
def compiling_when_called() -> Iterator[None]:
    """Have a function that is decorated within the block handed to ``torch.compile`` at its first
    call; nothing changes where torch is not imported yet."""
    torch: Any = sys.modules.get("torch")
    at_once = getattr(torch, "compile", None)
    if at_once is None:
        yield
        return

    def later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: later(function, **options)
        if not isinstance(model, FunctionType):  # a module is no function afterwards, either
            return at_once(model, **options)
        return _compiled_when_called(model, functools.partial(at_once, model, **options))

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = at_once


def _compiled_when_called(
    function: FunctionType, compiled: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    once = functools.cache(compiled)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return once()(*args, **kwargs)

    # By these a compiler that meets it, or is given it, reads the function itself: it follows no
    # cache. What torch.compile returns has them, too.
    vars(called).update(
        _torchdynamo_inline=function,
        _torchdynamo_orig_callable=function,
        _torchdynamo_wrapper_id=id(called),
    )
    return called
