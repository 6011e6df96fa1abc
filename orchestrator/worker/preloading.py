"""Modules that are imported before the first job, once for all workers of a node."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from importlib.util import find_spec

from orchestrator.host import output
from orchestrator.worker.redaction import redact

#: Mark at the end of a module's name: workers are forked even where it cannot be imported.
OPTIONAL = "?"
#: Modules that a node which computes on the CPU imports.
PRELOAD = (
    "torch",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.glm.modeling_glm",
    "transformers.models.llama.modeling_llama",
    "orchestrator.worker.card_worker",
)


def preload_with(packages: Sequence[str]) -> tuple[str, ...]:
    """``PRELOAD`` and packages that only some jobs need: one that is broken fails no others."""
    return (*PRELOAD, *(name + OPTIONAL for name in packages))


def installed(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` whose package is installed here."""
    return [name for name in modules if find_spec(name.removesuffix(OPTIONAL).partition(".")[0])]


def preload(modules: Sequence[str]) -> bool:
    """Import ``modules``, the optional ones last, and say whether forking is safe: one thread, and
    all of them there that are not optional."""
    import gc

    for asked in sorted(modules, key=lambda name: name.endswith(OPTIONAL)):
        name = asked.removesuffix(OPTIONAL)
        started = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library is the worker's to report
            text = redact(str(error), os.environ)
            if asked != name:
                output.say_aside(f"cannot preload {name}: {text}; workers are forked without it")
                continue
            output.say_aside(f"cannot preload {name}: {text}; workers start afresh")
            return False
        output.say(f"imported {name} in {time.monotonic() - started:.1f} s")
    gc.collect()
    gc.freeze()  # shared pages stay shared
    return len(os.listdir("/proc/self/task")) == 1
