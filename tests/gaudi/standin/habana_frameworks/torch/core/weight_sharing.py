"""Weight sharing, on by default in lazy mode: ``Module.to`` and ``Module.__getattr__`` are
replaced, and a registry holds every parameter that either has met, for good."""

import functools
import os
from typing import Any

import torch

from ..utils.internal import is_lazy

registry: dict[int, torch.nn.Parameter] = {}


def install() -> None:
    """Do what the bridge does when it is imported."""
    if not is_lazy() or os.environ.get("PT_HPU_WEIGHT_SHARING", "1") != "1":
        return
    module = torch.nn.Module
    to, getattr_ = module.to, module.__getattr__

    @functools.wraps(to)
    def to_and_registered(self: Any, *args: Any, **kwargs: Any) -> Any:
        registry.update((id(parameter), parameter) for parameter in self.parameters())
        return to(self, *args, **kwargs)

    @functools.wraps(getattr_)
    def got_and_registered(self: Any, name: str) -> Any:
        value = getattr_(self, name)
        if type(value) is torch.nn.Parameter:
            registry[id(value)] = value
        return value

    module.to = to_and_registered  # type: ignore[method-assign]
    module.__getattr__ = got_and_registered  # type: ignore[method-assign]
