"""Engines: the libraries that can run a model, behind one small seam (``base.py``).

For text generation an engine is a module with ``load(request, device) -> GenerationEngine``, for
fine-tuning one with ``run(request, context) -> Result``; it is imported only in the process that
runs it. To add one, write the module and give it an entry here. ``rules.py`` says which jobs an
engine takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from workloads.errors import BadConfiguration
from workloads.precision import STOCK

if TYPE_CHECKING:
    from workloads.engines.base import EngineLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine: what it is called, where it runs, and what it is made of."""

    name: str
    loader: str  # "module:function"
    devices: tuple[str, ...]
    install: str  # what brings it
    #: Whether it changes its process in ways that no other engine may meet.
    own_process: bool = True


_ENTRIES = (
    EngineEntry(
        name=STOCK,
        loader="workloads.engines.transformers_engine:load",
        devices=("cpu", "cuda", "hpu"),
        install="transformers",
        own_process=False,
    ),
    EngineEntry(
        name="optimum-habana",
        loader="workloads.engines.optimum_habana:load",
        devices=("hpu",),
        install="pip install 'nightgrid[hpu]' -c constraints-hpu.txt",
    ),
    EngineEntry(
        name="graph",
        loader="workloads.engines.graph_engine:load",
        devices=("cpu", "cuda"),
        install="transformers",
        own_process=False,
    ),
    EngineEntry(
        name="vllm",
        loader="workloads.engines.vllm_engine:load",
        devices=("cuda",),
        install="pip install vllm",
    ),
    EngineEntry(
        name="vllm-gaudi",
        loader="workloads.engines.vllm_engine:load",
        devices=("hpu",),
        install="pip install vllm-gaudi",
    ),
)

#: Every engine that a grid may name.
ENTRIES: Mapping[str, EngineEntry] = {entry.name: entry for entry in _ENTRIES}

#: Their names; the first is the default.
ENGINES = tuple(ENTRIES)

#: How a Gaudi card executes: graphs that the bridge collects (and keeps as HPU graphs), graphs of
#: torch.compile, or operation by operation. It is fixed when a process imports torch.
MODES = ("lazy", "compile", "eager")
_DEFAULT_MODE = {"optimum-habana": "lazy"}  # all others: eager


def find_engine(name: str) -> EngineEntry:
    """The entry of this name.

    Raises:
        BadConfiguration: there is none; the message lists what there is.
    """
    if name not in ENTRIES:
        raise BadConfiguration(f"no engine '{name}'. There is: {', '.join(ENGINES)}.")
    return ENTRIES[name]


def engine_loader(name: str) -> EngineLoader:
    """The function that loads a model with this engine.

    Raises:
        BadConfiguration: there is no such engine; the message lists what there is.
    """
    module, _, function = find_engine(name).loader.partition(":")
    return cast("EngineLoader", getattr(importlib.import_module(module), function))


def hpu_mode(engine: str, parameters: Mapping[str, Any]) -> str:
    """In which of ``MODES`` a Gaudi card executes a job."""
    return str(parameters.get("hpu_mode") or _DEFAULT_MODE.get(engine, "eager"))


def process_kinds(device: str) -> tuple[str, ...]:
    """Every kind of process that jobs on a device may need, the ordinary one first."""
    modes: tuple[str | None, ...] = (None, *MODES) if device == "hpu" else (None,)
    kinds = [
        process_kind(entry.name, device, {"hpu_mode": mode})
        for entry in _ENTRIES
        if device in entry.devices
        for mode in modes
    ]
    return tuple(dict.fromkeys(["", *kinds]))


def process_kind(engine: str, device: str, parameters: Mapping[str, Any]) -> str:
    """What a process must be to run a job: two jobs share one only if this is equal.

    Empty for an ordinary process. An engine may replace methods of a library that another one
    uses, and a Gaudi card's mode is decided before torch is imported.
    """
    entry = ENTRIES.get(engine)
    own = engine if entry is not None and entry.own_process else ""
    mode = hpu_mode(engine, parameters) if device == "hpu" else ""
    return "/".join(part for part in (own, mode) if part and part != "eager")
