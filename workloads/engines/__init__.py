"""Engines: the libraries that can generate text, behind one small seam (``base.py``).

An engine is a module with ``load(request, device) -> GenerationEngine``; it is imported only in
the process that runs it. To add one, write the module and name it in ``_ENGINES``.
"""

from __future__ import annotations

import importlib
from typing import cast

from workloads.engines.base import EngineLoader
from workloads.errors import BadConfiguration

_ENGINES = {"transformers": "workloads.engines.transformers_engine:load"}

#: The engines there are; the first is the default.
ENGINES = tuple(_ENGINES)


def engine_loader(name: str) -> EngineLoader:
    """The function that loads a model with this engine.

    Raises:
        BadConfiguration: there is no such engine; the message lists what there is.
    """
    if name not in _ENGINES:
        raise BadConfiguration(f"no engine '{name}'. There is: {', '.join(ENGINES)}.")
    module, _, function = _ENGINES[name].partition(":")
    return cast("EngineLoader", getattr(importlib.import_module(module), function))
