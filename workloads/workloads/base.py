"""The seam of workloads: what a grid may ask for, which function runs it, what it takes.

``workloads/workloads/NAME.py`` declares one in its ``SPEC``. The function is named, not imported: a
plan reads parameters and never loads torch. It may stand in the same file, if that imports what is
large within functions only; its shape is that of ``workloads.api.Workload``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import create_model

from workloads.engine_registry import ENGINES, default_engine, engines_for
from workloads.errors import BadConfiguration
from workloads.metrics.base import Metric, Throughput
from workloads.parameters import WorkloadParameters
from workloads.refusal import Asked, Refusal
from workloads.settings import Declaration, Settings, Value, declarations, removed_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """One workload: its name in a grid, its entry point and the model of its parameters."""

    name: str
    function: str  # "module:function", imported only where it runs
    parameters: type[WorkloadParameters]
    summary: str  # one line for `nightgrid schema` and the documentation
    also_called: tuple[str, ...] = ()  # what people write, for the message that refuses it
    #: What an engine must be able to do to run it (``EngineSpec.abilities``); None: nothing, since
    #: the function runs no engine.
    ability: str | None = None
    #: The kinds of models that it runs (``workloads/tasks``); none: it looks at no model.
    tasks: tuple[str, ...] = ()
    #: The dataset of a job whose grid names none; "": that of all jobs (``core/settings.py``).
    dataset: str = ""
    #: Whether it can begin with fresh weights, so that a model may be a configuration alone.
    fresh_weights: bool = False
    #: What its throughput counts; None: generated tokens where there are any, else samples.
    throughput: Throughput | None = None
    #: Figures of its own, beside those of its tasks.
    metrics: tuple[Metric, ...] = ()
    #: What speaks against a job, beside its engine and its model; pure and without torch, since
    #: the plan asks. None: nothing does.
    refuse: Callable[[Asked], Sequence[Refusal]] | None = None
    #: What a reader of the plan should know of a job, one line each; pure and without torch.
    notes: Callable[[Asked], Sequence[str]] | None = None
    #: Whether plans add such jobs by themselves; then nobody is told to write it.
    implied: bool = False
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

    def declared_in_rows(self, engine: str) -> Mapping[str, Declaration]:
        """The same, and settings that rows of earlier versions have besides."""
        model = self.model(engine)
        return {**declarations(model), **removed_settings(model)}

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


@cache
def _joined(parameters: type[Settings], settings: type[Settings]) -> type[Settings]:
    """Both as one model.

    Raises:
        BadConfiguration: a workload and an engine have a setting of the same name.
    """
    if twice := parameters.model_fields.keys() & settings.model_fields.keys():
        raise BadConfiguration(
            f"{settings.__module__}.{settings.__qualname__}, settings of an engine, and "
            f"{parameters.__name__}, those of the workload, both have '{min(twice)}': the engine's "
            "must be renamed"
        )
    name = f"{parameters.__name__}And{settings.__name__}"
    return create_model(name, __base__=(parameters, settings))
