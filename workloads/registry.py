"""Names of workloads: what a grid may ask for, which function runs it, what it takes.

The function is named, not imported: a plan reads parameters and never loads torch. A worker calls
``load`` once per attempt. A workload is a module-level function of the shape of
``workloads.api.Workload``, a parameters model, and an entry: here, or in another installed package
that names it under the entry points ``nightgrid.workloads`` (docs/adding-a-workload.md).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from pydantic import create_model

from workloads.declared import installed
from workloads.engines import ENGINES, default_engine, engine_refusals, engines_for
from workloads.errors import BadConfiguration
from workloads.generation_rules import refuse as refuse_generation
from workloads.metrics import Metric, Throughput, by_name
from workloads.models.catalog import ModelEntry, checkpoint_kind
from workloads.parameters import (
    CalibrationParameters,
    TextGenerationParameters,
    VerificationParameters,
    WorkloadParameters,
)
from workloads.refusal import Asked, Refusal
from workloads.settings import Declaration, Settings, Value, declarations
from workloads.tasks import TASKS, task_of
from workloads.tasks.base import TaskSpec

if TYPE_CHECKING:
    from workloads.api import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadEntry:
    """One workload: its name in a grid, its entry point and the model of its parameters."""

    name: str
    function: str  # "module:function", imported only where it runs
    parameters: type[WorkloadParameters]
    summary: str  # one line for `nightgrid schema` and the documentation
    #: What an engine must be able to do to run it (``EngineSpec.abilities``); None: nothing, since
    #: the function runs no engine.
    ability: str | None = None
    #: The kinds of models that it runs (``workloads/tasks``); none: it looks at no model.
    tasks: tuple[str, ...] = ()
    #: What its throughput counts; None: generated tokens where there are any, else samples.
    throughput: Throughput | None = None
    #: Figures of its own, beside those of its tasks.
    metrics: tuple[Metric, ...] = ()
    #: What speaks against a job, beside its engine and its model; pure and without torch, since
    #: the plan asks. None: nothing does.
    refuse: Callable[[Asked], Sequence[Refusal]] | None = None
    #: Settings that an earlier version had here and an engine or a device has now, with the value
    #: that stands in the ids of jobs that do not have them any more.
    moved: Mapping[str, Value] = field(default_factory=dict)

    def setting_models(self) -> tuple[type[Settings], ...]:
        """The models whose settings a grid may write: the workload's own, then those of engines."""
        found = (spec.settings(self.ability) for spec in ENGINES.known())
        return tuple(dict.fromkeys((self.parameters, *(model for model in found if model))))

    def model(self, engine: str) -> type[Settings]:
        """The settings of jobs with this engine: the workload's own and the engine's."""
        spec = ENGINES.get(engine)
        settings = spec.settings(self.ability) if spec is not None else None
        return self.parameters if settings is None else _joined(self.parameters, settings)

    def declared(self, engine: str) -> Mapping[str, Declaration]:
        """The declaration of every setting that jobs with this engine have beside a job's own."""
        return declarations(self.model(engine))

    def validate(self, settings: Mapping[str, Any], engine: str = "") -> dict[str, Any]:
        """All settings with their defaults filled in, as plain values.

        Args:
            settings: the workload's, and those of the engine.
            engine: whose settings they are beside the workload's; "": no engine's.

        Raises:
            pydantic.ValidationError: an unknown name, a wrong type or a value out of range.
        """
        return self.model(engine).model_validate(dict(settings)).model_dump()

    def split(
        self, settings: Mapping[str, Any], engine: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """All settings, validated, apart: the workload's own and the engine's.

        Raises:
            pydantic.ValidationError: an unknown name, a wrong type or a value out of range.
        """
        all_of_them = self.validate(settings, engine)
        own = {name: all_of_them.pop(name) for name in self.parameters.model_fields}
        return own, all_of_them

    def refusals(self, asked: Asked) -> tuple[Refusal, ...]:
        """All that speaks against a job: its engine, its model, and the workload's own rules."""
        found: list[Refusal] = []
        if self.ability is not None:
            found += engine_refusals(asked, self.ability)
        if self.tasks:
            found += _model_refusals(self, asked)
        if self.refuse is not None:
            found += self.refuse(asked)
        return tuple(found)

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines that can run it, the default first."""
        return engines_for(self.ability)

    @property
    def default_engine(self) -> str:
        """The engine of a job whose grid names none."""
        return default_engine(self.ability)

    def takes_engine(self, name: str) -> bool:
        """Tell if an engine of this name can run it."""
        spec = ENGINES.get(name)
        return spec is not None and (self.ability is None or self.ability in spec.abilities)


def _model_refusals(entry: WorkloadEntry, asked: Asked) -> Iterator[Refusal]:
    """A model of a kind that the workload does not run."""
    kind = checkpoint_kind(asked.model)
    task = task_of(kind) if kind is not None else None
    if kind is None or task is None or task.name in entry.tasks:
        return  # or it cannot be told: the job itself will look
    fitting = [other.name for other in WORKLOADS.values() if task.name in other.tasks]
    yield Refusal(
        setting="model",
        reason=f"it is {task.title} ({kind.architecture}), and {entry.name} takes "
        f"{' or '.join(TASKS[name].title for name in entry.tasks)}",
        hint=f"write workload: {' or '.join(fitting)}"
        if fitting
        else "no workload of this installation takes such a model",
    )


@cache
def _joined(parameters: type[Settings], settings: type[Settings]) -> type[Settings]:
    """Both as one model.

    Raises:
        TypeError: a workload and an engine have a setting of the same name.
    """
    if twice := parameters.model_fields.keys() & settings.model_fields.keys():
        raise TypeError(f"{parameters.__name__} and {settings.__name__} both have {min(twice)}")
    name = f"{parameters.__name__}And{settings.__name__}"
    return create_model(name, __base__=(parameters, settings))


TOKENS = Throughput(unit="tokens/s", counts="output_tokens")
SAMPLES = Throughput(unit="samples/s", counts="items")

_ENTRIES = (
    WorkloadEntry(
        name="text-generation",
        function="workloads.text_generation:run",
        parameters=TextGenerationParameters,
        summary="Greedy generation with a causal language model: tokens/s, TTFT, latency.",
        ability="generate",
        tasks=("causal-lm",),
        throughput=TOKENS,
        refuse=refuse_generation,
        moved={"hpu_mode": None, "packed_weights": False},
    ),
    WorkloadEntry(
        name="verification",
        function="workloads.verification:run",
        parameters=VerificationParameters,
        summary="An engine's greedy tokens and logits against those of stock transformers.",
        ability="generate",
        tasks=("causal-lm",),
        throughput=TOKENS,
        refuse=refuse_generation,
        moved={"hpu_mode": None},
    ),
    WorkloadEntry(
        name="fp8-calibration",
        function="workloads.calibration:run",
        parameters=CalibrationParameters,
        summary="Largest values of every layer, which fp8 on Gaudi starts from.",
        ability="calibrate",
        tasks=("causal-lm",),
        throughput=TOKENS,
    ),
)


@cache
def _finetuning() -> WorkloadEntry:
    """Made when it is asked for: it imports the modules of all techniques."""
    from workloads.finetuning_parameters import FinetuningParameters
    from workloads.finetuning_rules import refuse

    return WorkloadEntry(
        name="finetuning",
        function="workloads.finetuning:run",
        parameters=FinetuningParameters,
        summary="Fine-tuning of a causal language model by method and technique: samples/s, loss.",
        ability="train",
        tasks=("causal-lm",),
        throughput=SAMPLES,
        refuse=refuse,
    )


#: Ours, or what makes them.
_OURS: Mapping[str, WorkloadEntry | Callable[[], WorkloadEntry]] = {
    **{entry.name: entry for entry in _ENTRIES},
    "finetuning": _finetuning,
}

GROUP = "nightgrid.workloads"


@cache
def _installed() -> dict[str, WorkloadEntry]:
    """Entries of other packages, under names that are not ours."""
    found = installed(GROUP, WorkloadEntry)
    return {name: entry for name, entry in found.items() if name not in _OURS}


class _Workloads(Mapping[str, WorkloadEntry]):
    """Entries by name. Other packages are looked for only when a name is not ours, or all are
    wanted: that reads a file of each package that is installed."""

    def __getitem__(self, name: str) -> WorkloadEntry:
        found = _OURS.get(name) or _installed()[name]
        return found if isinstance(found, WorkloadEntry) else found()

    def __iter__(self) -> Iterator[str]:
        return iter((*_installed(), *_OURS))

    def __len__(self) -> int:
        return len(_installed()) + len(_OURS)


#: Every workload a grid may name; nobody else's takes the place of one of ours.
WORKLOADS: Mapping[str, WorkloadEntry] = _Workloads()


def find_workload(name: str) -> WorkloadEntry:
    """The entry of this name.

    Raises:
        BadConfiguration: there is none; the message lists what there is.
    """
    if name not in WORKLOADS:
        close = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        there_is = ", ".join(WORKLOADS)
        raise BadConfiguration(f"no workload '{name}'{hint or '.'} There is: {there_is}.")
    return WORKLOADS[name]


def task_for(workload: str, model: ModelEntry) -> TaskSpec:
    """The task by which a workload runs a model.

    Raises:
        BadConfiguration: the workload takes no such model, or has no task.
    """
    names = find_workload(workload).tasks
    task = task_of(model.checkpoint) or (TASKS[names[0]] if names else None)
    if task is None or task.name not in names:
        title = task.title if task is not None else "of a kind that is not known"
        takes = " or ".join(TASKS[name].title for name in names) or "no model"
        what = f"{model.name} is {title} ({model.architecture})"
        raise BadConfiguration(f"{what}, and {workload} takes {takes}")
    return task


def metrics_of(workload: str) -> Mapping[str, Metric]:
    """The declarations of all figures that rows of a workload may report, by name; empty for a
    workload that is not installed."""
    entry = WORKLOADS.get(workload)
    if entry is None:
        return {}
    return by_name((*entry.metrics, *(m for name in entry.tasks for m in TASKS[name].metrics)))


def throughput_of(workload: str) -> Throughput | None:
    """Throughput that a workload declares; None where it declares none."""
    entry = WORKLOADS.get(workload)
    return entry.throughput if entry is not None else None


def declared(workload: str, engine: str) -> Mapping[str, Declaration]:
    """The declaration of every setting that such jobs have beside a job's own, by name; empty for
    a workload that is not installed."""
    entry = WORKLOADS.get(workload)
    return entry.declared(engine) if entry is not None else {}


def load(name: str) -> Workload:
    """Import the function behind a workload; this is where torch comes in.

    Raises:
        BadConfiguration: no workload has this name.
        ImportError: a package that the workload needs is missing.
    """
    module_name, _, function = find_workload(name).function.partition(":")
    return cast("Workload", getattr(importlib.import_module(module_name), function))
