"""Engines: libraries that can run a model. To add one, write ``NAME.py`` with a ``SPEC``
(``base.py``), or name another package's spec under the entry points ``nightgrid.engines``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

from workloads.base import BadConfiguration, Unsupported
from workloads.devices import device_spec
from workloads.engines.base import EngineSpec
from workloads.registry import ENGINES as ENGINES
from workloads.registry import default_engine as default_engine
from workloads.registry import engines_for as engines_for
from workloads.registry import function_of
from workloads.settings import DEFAULT_SOFTWARE


def find_engine(name: str) -> EngineSpec:
    """The spec of this name; BadConfiguration, which lists all, if there is none."""
    spec = ENGINES.get(name)
    if spec is None:
        raise BadConfiguration(f"no engine '{name}'. There is: {', '.join(engines_for(None))}.")
    return spec


def trains_by_library(name: str) -> bool:
    """Return whether an engine's training is done by its library's own trainer."""
    spec = ENGINES.get(name)
    return spec is not None and "library_trainer" in spec.features


@cache
def engine_packages() -> tuple[str, ...]:
    """Packages of all engines, by pip name, whose versions may explain differences."""
    specs = (ENGINES[name] for name in engines_for(None))
    packages = (package for spec in specs for package in spec.packages)
    return tuple(dict.fromkeys(name for package in packages for name in package.names))


@cache
def packages_on(device: str) -> tuple[str, ...]:
    """Packages that engines need on a device."""
    packages = [
        package for spec in ENGINES.known() if spec.runs_on(device) for package in spec.packages
    ]
    others = [name for package in packages for name in package.below]
    own = device_spec(device).packages
    return tuple(dict.fromkeys(["torch", *own, *(n for p in packages for n in p.names), *others]))


def engine_function(name: str, ability: str, device: str) -> Any:
    """Import the function of an engine's ability, and so its library; Unsupported if it does not
    run on this device, or a package is missing."""
    spec = find_engine(name)
    able = spec.abilities.get(ability)
    if able is None:
        others = ", ".join(engines_for(ability)) or "no engine does"
        raise BadConfiguration(f"the engine {name} does not {ability}; {others} does")
    if not spec.runs_on(device):
        raise Unsupported(elsewhere(spec, device))
    for package in spec.packages:
        try:
            installed = importlib.util.find_spec(package.module) is not None
        except ModuleNotFoundError:  # the parent package is missing
            installed = False
        if not installed:
            raise Unsupported(
                f"the engine {name} needs the package {package.name}, which is not installed here: "
                f"{spec.install}"
            )
    return function_of(able.function)


def process_kind(
    engine: str,
    device: str,
    settings: Mapping[str, Any],
    *,
    workload: str = "",
    precision: str = "",
) -> str:
    """Kind of process that a job needs, "" for ordinary ones. Jobs share only equal kinds: engines
    patch libraries, modes are fixed before torch's import, precisions may switch a process, and
    software of its own (``split_kind``) is another interpreter's."""
    spec = ENGINES.get(engine)
    kind = (
        spec.process_kind(spec.mode(device, settings), spec.apart(workload, precision))
        if spec is not None
        else ""
    )
    software = settings.get("software", DEFAULT_SOFTWARE)
    return kind if software == DEFAULT_SOFTWARE else f"{kind}@{software}"


def split_kind(kind: str) -> tuple[str, str]:
    """Split a kind of process into its engine's and mode's, and its software; "" is the node's."""
    engine, _, software = kind.partition("@")
    return engine, software


def runs_alone(engine: str, ability: str | None = None) -> bool:
    """Return whether each job of an engine gets its own process."""
    spec = ENGINES.get(engine)
    if spec is None or not spec.alone:
        return False
    able = spec.abilities.get(ability or "")
    return able is None or not able.shares_worker


def variables_of(kind: str) -> Mapping[str, str]:
    """Environment variables for processes of this kind."""
    spec = ENGINES.get(kind.partition("/")[0])
    return spec.variables if spec is not None and spec.own_process else {}


def process_kinds(device: str) -> tuple[str, ...]:
    """Every kind of process that jobs on a device may need, the ordinary one first, all with the
    node's own software."""
    kinds = [
        spec.process_kind(mode, apart)
        for spec in ENGINES.values()
        if spec.runs_on(device)
        for mode in (spec.modes[device].names if device in spec.modes else ("",))
        for apart in ("", *(spec.calibrations if spec.calibrated_apart else ()))
    ]
    return tuple(dict.fromkeys(["", *kinds]))


def elsewhere(spec: EngineSpec, device: str) -> str:
    """Message for a device on which an engine does not run."""
    where = " and ".join(spec.devices) or f"devices with {spec.needs}"
    return f"the engine {spec.name} runs on {where}, not on {device}"
