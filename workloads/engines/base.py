"""The seam of engines: what one declares of itself.

An engine is a library that can run a model. ``workloads/engines/NAME.py`` declares it in a
``SPEC``, without importing torch or the library; the plan, the workers, the doctor and the
documentation read the spec. What an engine can do are *abilities*, each a function of its own that
is imported only in the process that runs it:

    generate   load(request, device) -> loaded.GenerationEngine    text, token by token
    train      run(request, context) -> Result                     optimizer steps, each timed
    calibrate  run(request, context) -> Result                     what a precision starts from

A workload says which ability it needs (``WorkloadSpec.ability``), and every engine that
has it can run the workload. An ability is a name that both agree on, so packages may bring more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workloads.base import JobDescription, Metric, Refusal, Support
from workloads.devices import device_spec
from workloads.settings import Settings, setting

#: The mode in which operations run one after the other: any process can do that.
ORDINARY_MODE = "eager"


#: Of every engine that runs graphs made from torch's models.
EXPORT = Metric(
    name="export_s",
    title="export",
    unit="s",
    description="Time that the export of the graph took, whenever it was; not in load_s "
    "where the node's cache had it.",
    better="lower",
    ranks="largest",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One thing that an engine can do."""

    function: str  # "module:function", imported only where it runs
    #: The kinds of models that it does it with (``registry.TASKS``); none: all of a workload.
    tasks: tuple[str, ...] = ()
    #: What this engine refuses of it, beside the workload's own rules; pure, the plan asks.
    refuse: Callable[[JobDescription], Iterable[Refusal]] | None = None
    #: The engine's own settings of it, which a grid writes beside the workload's.
    settings: type[Settings] | None = None
    adapters: bool = False  # whether it puts on a trained adapter
    #: Values of ``attention`` that it takes; None: all that the workload has.
    attentions: tuple[str, ...] | None = ("sdpa",)

    def takes(self, task: str) -> bool:
        """Tell if it is done with models of a kind, by the task's name."""
        return not self.tasks or task in self.tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that an engine imports."""

    name: str  # as pip calls it: provenance and doctor look for its version
    module: str
    #: Packages that must be older than a version, for this one to work: name -> version.
    below: Mapping[str, str] = field(default_factory=dict)
    #: Other packages that bring the same module.
    builds: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and those of its other builds."""
        return self.name, *self.builds


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Ways to execute on a device, one of which a process is started in."""

    setting: str  # that chooses one; left out: the first
    names: tuple[str, ...]
    #: Modes of the device that this engine has not: name -> why.
    lacking: Mapping[str, str] = field(default_factory=dict)
    #: By ability the mode of jobs whose grid names neither engine nor mode; left out: the first.
    chosen_for: Mapping[str, str] = field(default_factory=dict)
    #: What a mode lacks with these versions of packages, by name; "" where it lacks nothing.
    lacks: Callable[[str, Mapping[str, str]], str] = lambda mode, versions: ""

    def chosen(self, settings: Mapping[str, Any]) -> str:
        """The mode that a job's settings ask for."""
        return str(settings.get(self.setting) or self.names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: where it runs, what it is made of, and what it can do."""

    name: str  # in grids and rows
    summary: str  # one line
    also_called: tuple[str, ...] = ()  # what people write, for the message that refuses it
    devices: tuple[str, ...] = ()
    #: A capability by which it runs on all devices that have it (``devices.CAPABILITIES``).
    needs: str = ""
    abilities: Mapping[str, Ability]
    install: str  # the command that brings it
    packages: tuple[Package, ...] = ()
    default: bool = False  # of jobs whose grid names no engine; one engine is
    #: Devices on which it is chosen before the default, where nodes have it: name -> its place.
    preferred: Mapping[str, int] = field(default_factory=dict)
    #: Whether it is, for a model in a precision on a node with these versions of packages.
    preferred_for: Callable[[str, str, Mapping[str, str]], bool] = lambda model, precision, has: (
        True
    )
    #: Whether the usual images of these devices have it.
    in_images: bool = True
    #: Whether it changes its process in ways that no other engine may meet.
    own_process: bool = True
    #: Whether each of its jobs gets a process of its own: it sizes itself for one job, and gives
    #: memory back with its process only.
    alone: bool = False
    #: Variables of its processes, set before anything is imported.
    variables: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, Modes] = field(default_factory=dict)  # by device
    #: What it does otherwise than the default engine, by precision and device.
    precisions: Mapping[tuple[str, str], Support] = field(default_factory=dict)
    #: Precisions that need a job of a workload beforehand, once for a model and number of cards.
    calibrations: Mapping[str, str] = field(default_factory=dict)
    #: Whether those precisions, and their calibrations, switch their process for good, so that no
    #: job in another precision may follow in it.
    calibrated_apart: bool = False
    #: What settings of workloads may ask for: ``tensor_parallel`` splits matrices over cards,
    #: ``continuous_batching`` gives rows that have ended to the next prompt.
    features: frozenset[str] = frozenset()
    #: Whether its library opens checkpoints itself; else the task loads the model.
    own_loader: bool = False
    #: Whether it loads models from memory, so that protected ones (``protect``) can be opened.
    opens_protected: bool = False
    #: Whether its attention sees all of a text where the model has layers with a sliding window, so
    #: that texts may be no longer than that.
    sees_whole_texts: bool = False
    #: Untimed passes over every shape that its own way to measure makes.
    warmup_passes: int = 1
    #: Whether it compiles in the process that times it, so that its compilations can be counted.
    counts_compilations: bool = True
    #: Figures that its loaded models report (``figures``), beside those of tasks.
    metrics: tuple[Metric, ...] = ()

    def runs_on(self, device: str) -> bool:
        """Tell if it runs on a device, by its name."""
        if device in self.devices:
            return True
        return bool(self.needs) and device_spec(device).can(self.needs)

    def settings(self, ability: str | None) -> type[Settings] | None:
        """Its own settings of an ability; None where it has none, or not the ability."""
        able = self.abilities.get(ability) if ability is not None else None
        return able.settings if able is not None else None

    def mode(self, device: str, settings: Mapping[str, Any]) -> str:
        """The way in which a job executes on a device; ``ORDINARY_MODE`` where there is one."""
        modes = self.modes.get(device)
        return modes.chosen(settings) if modes else ORDINARY_MODE

    def apart(self, workload: str, precision: str) -> str:
        """The precision whose jobs and calibrations have processes of their own, if this job is
        one of them; else ""."""
        for calibrated, calibration in self.calibrations.items() if self.calibrated_apart else ():
            if calibrated == precision or calibration == workload:
                return calibrated
        return ""

    def lacks(self, device: str, mode: str, versions: Mapping[str, str]) -> str:
        """Name what it lacks on a node with these versions of packages; "" if nothing."""
        for package in self.packages:
            if not any(name in versions for name in package.names):
                return f"{package.name} is not installed there: {self.install}"
            for other, limit in package.below.items():
                there = versions.get(other)
                if there is None or not older(there, limit):
                    return f"{package.name} needs {other} below {limit}, not {there or 'none'}"
        modes = self.modes.get(device)
        return modes.lacks(mode, versions) if modes is not None else ""

    def process_kind(self, mode: str, apart: str = "") -> str:
        """Kind of process that runs this engine in a mode; "" for an ordinary one."""
        own = self.name if self.own_process else ""
        return "/".join(part for part in (own, apart, mode) if part and part != ORDINARY_MODE)


def older(version: str, limit: str) -> bool:
    """Tell if a version is older than another, by the numbers that it begins with."""

    def numbers(text: str) -> tuple[int, ...]:
        found = re.match(r"\d+(\.\d+)*", text)
        return tuple(map(int, found[0].split("."))) if found else ()

    return numbers(version) < numbers(limit)


class GaudiSettings(Settings):
    """Settings of a Gaudi card's execution."""

    hpu_mode: Literal["lazy", "compile", "eager"] | None = setting(
        None,
        role="choice",
        loads=True,
        description="How a Gaudi card executes: lazy collects operations into graphs, which are "
        "captured and replayed; compile hands torch.compile's graphs to the card (transformers: "
        "with a static cache and prompts padded to multiples of 128); eager runs one "
        "operation after the other. Left out: lazy with optimum-habana, compile with "
        "vllm-gaudi, eager with others; where the grid names no engine either, the plan "
        "chooses (docs/gaudi.md).",
    )


class CompileSettings(Settings):
    """Settings of torch's compiler."""

    torch_compile: bool = setting(
        False,
        role="choice",
        loads=True,
        description="Compile the model (torch.compile, Inductor), with a static cache and, with "
        "transformers, prompts padded to multiples of 128: graphs for each shape, which warm-up "
        "meets before timing. On Gaudi hpu_mode says so; graph compiles always on CUDA cards.",
    )
