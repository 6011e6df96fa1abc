"""Registries of engines, tasks, workloads and metrics.

Looking up a name imports only the file that declares it. Entry points of other packages are read
only for unknown names or full listings, since that reads a file of every installed package.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import create_model

from workloads.base import (
    BadConfiguration,
    JobDescription,
    Metric,
    Refusal,
    Throughput,
    Unsupported,
)
from workloads.settings import (
    Declaration,
    Settings,
    Value,
    WorkloadParameters,
    declarations,
    removed_settings,
)

if TYPE_CHECKING:
    from workloads.base import Workload
    from workloads.engines.base import EngineSpec
    from workloads.models.catalog import ModelEntry

T = TypeVar("T")

_LOG = logging.getLogger("nightgrid.declared")
_METRICS_LOG = logging.getLogger("nightgrid.metrics")
_NO_SPEC = "base"


class Declared(Mapping[str, T], Generic[T]):
    """Specs of one kind by name: ours, then those of other packages, which never replace ours."""

    def __init__(
        self, where: str | Sequence[str] | Mapping[str, str], kind: type | str, group: str
    ) -> None:
        """Declare where specs of a kind are.

        ``where`` is the module of each name; modules with ``SPECS``; or a package whose files but
        ``base.py`` each have a ``SPEC`` named as the file, ``-`` for ``_``. ``kind`` is the specs'
        class, or "module:Class", of which a spec may be a subclass. ``group`` names entry points of
        other packages, e.g. ``nightgrid.engines``.
        """
        self.where = where
        self._kind_or_name = kind
        self._group = group
        self._loaded: dict[str, T] = {}

    @cached_property
    def _kind(self) -> type:
        kind = self._kind_or_name
        return kind if isinstance(kind, type) else cast("type", function_of(kind))

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        if isinstance(self.where, Mapping):
            return self.where
        names = (self.where,) if isinstance(self.where, str) else self.where
        modules = [importlib.import_module(name) for name in names]
        if hasattr(modules[0], "SPECS"):
            return {spec.name: module.__name__ for module in modules for spec in module.SPECS}
        (module,) = modules
        files = sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.ispkg)
        return {f.replace("_", "-"): f"{self.where}.{f}" for f in files if f != _NO_SPEC}

    @property
    def own(self) -> tuple[str, ...]:
        """The names that this program declares."""
        return tuple(self._modules)

    @cached_property
    def _others(self) -> dict[str, T]:
        specs = installed(self._group, self._kind)
        return {name: spec for name, spec in specs.items() if name not in self._modules}

    def known(self) -> tuple[T, ...]:
        """Our specs, and those of other packages if already loaded."""
        return tuple(self[name] for name in (*self.own, *self.__dict__.get("_others", ())))

    def __getitem__(self, name: str) -> T:
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._modules:
            return self._others[name]
        module = importlib.import_module(self._modules[name])
        specs = module.SPECS if hasattr(module, "SPECS") else (module.SPEC,)
        matching = [spec for spec in specs if _is_named(spec, self._kind, name)]
        if not matching:
            raise TypeError(f"{module.__file__} declares no {self._kind.__name__} named {name}")
        self._loaded[name] = matching[0]
        return matching[0]

    def get(self, name: str, default: Any = None) -> Any:
        """As of every mapping; plans ask for known names hundreds of thousands of times."""
        return self._loaded[name] if name in self._loaded else super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self._others))

    def __len__(self) -> int:
        return len(self.own) + len(self._others)


def function_of(name: str) -> Any:
    """Import what "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _is_named(spec: object, kind: type, name: str) -> bool:
    fits = isinstance(spec, kind) or (isinstance(spec, type) and issubclass(spec, kind))
    return fits and getattr(spec, "name", None) == name


def installed(group: str, kind: type) -> dict[str, Any]:
    """Return other packages' declarations under an entry point; broken ones only warn."""
    import importlib.metadata

    specs = {}
    what = group.rpartition(".")[2].removesuffix("s")
    for point in importlib.metadata.entry_points(group=group):
        try:
            spec = point.load()
        except Exception as error:
            _LOG.warning("%s %s (%s) is left out: %r", what, point.name, point.value, error)
            continue
        if not _is_named(spec, kind, point.name):
            _LOG.warning("%s %s: %s is no entry of that name", what, point.name, point.value)
            continue
        specs[point.name] = spec
    return specs


ENGINES: Declared[EngineSpec] = Declared(
    {
        "diffusers": "workloads.engines.diffusers",
        "endpoint": "workloads.engines.endpoint",
        "graph": "workloads.engines.graph",
        "onnxruntime": "workloads.engines.onnxruntime",
        "openvino": "workloads.engines.openvino",
        "optimum-habana": "workloads.engines.optimum_habana",
        "sglang": "workloads.engines.sglang",
        "transformers": "workloads.engines.transformers",
        "vllm": "workloads.engines.vllm",
        "vllm-gaudi": "workloads.engines.vllm",
    },
    "workloads.engines.base:EngineSpec",
    "nightgrid.engines",
)


@cache
def default_engine(ability: str | None = None) -> str:
    """Return the default engine of an ability, else the default engine if it has the ability, else
    the first of ours that has it."""
    return next(iter(_able(ENGINES.known(), ability) or engines_for(ability)), "")


def engines_for(ability: str | None) -> tuple[str, ...]:
    """Names of the engines with an ability (None: all engines), the default first."""
    return _able(ENGINES.values(), ability)


def _able(specs: Iterable[EngineSpec], ability: str | None) -> tuple[str, ...]:
    able = [spec for spec in specs if ability is None or ability in spec.abilities]
    first = next((s for s in able if ability and s.abilities[ability].default), None)
    return tuple(
        spec.name for spec in sorted(able, key=lambda spec: (spec is not first, not spec.default))
    )


# A *workload* is what a grid names; a *task* is a kind of model (``workloads/engines/tasks.py``).
# The plan pairs a workload with the task that takes the checkpoint, or refuses the job. Functions
# are named, not imported, since plans run without torch:
#
#     load           (source, **arguments) -> model
#     encode         (examples, count, SampleFormat) -> Encoded
#     collate        (samples, SampleFormat, fixed=False) -> Inputs; ``fixed``: all of one shape
#     loss           (logits, labels, kept) -> summed loss of the labelled positions
# Optional:
#     make           (source, vocabulary, **arguments) -> model with fresh weights
#     arrange        (samples, global batch) -> positions of each batch's samples; else in order
#     draw           (samples, SampleFormat, step) -> the step's global batch (masked)
#     layer_share    (samples) -> (layer name -> share of the tokens that it processes)
# Optional, for techniques; a job that needs a missing one is UNSUPPORTED:
#     positions      (labels) -> positions whose logits the loss needs
#     aligned        (logits, labels, kept) -> logits of positions, and the label of each
#     pack           (samples, SampleFormat, one_row=False) -> Inputs of several samples a row
#     check_packing  (model, device); raises if packed samples attend to each other


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKind:
    """Classes and family that a checkpoint declares."""

    architecture: str  # class that it was saved from, or the pipeline's
    model_type: str = ""  # transformers' family name
    encoder_decoder: bool = False
    pipeline: bool = False  # several models


def kind_of(content: Mapping[str, Any]) -> CheckpointKind:
    """Return a checkpoint's kind by its config.json, or a pipeline's by its model_index.json."""
    if is_pipeline_index(content):
        return CheckpointKind(architecture=str(content["_class_name"]), pipeline=True)
    named = content.get("architectures")
    first = named[0] if isinstance(named, list) and named else content.get("model_type")
    return CheckpointKind(
        architecture=str(first or "unknown"),
        model_type=str(content.get("model_type") or ""),
        encoder_decoder=content.get("is_encoder_decoder") is True,
    )


def is_pipeline_index(content: Mapping[str, Any]) -> bool:
    """Tell a model_index.json from a config.json by its parts, [library, class] each."""
    parts = ("scheduler", "unet", "transformer", "vae")
    return "_class_name" in content and any(isinstance(content.get(p), list) for p in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One kind of model."""

    name: str
    title: str  # with its article: "a causal language model"
    architectures: tuple[str, ...] = ()  # endings of the checkpoint's class
    model_types: frozenset[str] = frozenset()  # families, where the class does not decide
    encoder_decoder: bool = False  # takes models declared as encoder-decoder
    pipeline: bool = False  # takes directories of several models
    functions: Mapping[str, str] = field(default_factory=dict)  # "module:function", by name
    metrics: tuple[Metric, ...] = ()
    settings: frozenset[str] = frozenset()  # workload settings refused with other tasks' models
    #: Objections to a job with such a model; pure.
    refuse: Callable[[JobDescription, CheckpointKind], Iterable[Refusal]] | None = None
    forward: Mapping[str, Any] = field(default_factory=dict)  # extra arguments of training passes

    def takes(self, kind: CheckpointKind) -> bool:
        """Tell if a checkpoint is of this kind."""
        if kind.pipeline or self.pipeline:
            return kind.pipeline and self.pipeline
        if kind.encoder_decoder or self.encoder_decoder:
            if kind.encoder_decoder:
                return self.encoder_decoder
            return kind.model_type in self.model_types
        return kind.architecture.endswith(self.architectures)

    def function(self, name: str) -> Any:
        """Import one of its functions; Unsupported if it has none of this name."""
        if name not in self.functions:
            raise Unsupported(f"{self.title} has no function '{name}' in this version")
        return function_of(self.functions[name])


TASKS: Declared[TaskSpec] = Declared("workloads.engines.tasks", TaskSpec, "nightgrid.tasks")


def task_of(kind: CheckpointKind) -> TaskSpec | None:
    """Return the task that takes a checkpoint, by its class, else its family; None if unknown."""
    for spec in TASKS.known():
        if spec.takes(kind):
            return spec
    return next((spec for spec in TASKS.known() if kind.model_type in spec.model_types), None)


# Workloads. Functions (``workloads.base.Workload``) are named, not imported: plans avoid torch.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkChange:
    """A change of the work that unchanged settings stand for."""

    what: str  # e.g. "trains without clipping now"
    #: Tell if it changed jobs of an engine with these parameters, which may lack newer settings.
    concerns: Callable[[str, Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """One workload: its name in a grid, its entry point and the model of its parameters."""

    name: str
    function: str  # "module:function", imported only where it runs
    parameters: type[WorkloadParameters]
    summary: str  # one line for `nightgrid schema` and the documentation
    also_called: tuple[str, ...] = ()  # wrong names that a refusal's message recognises
    ability: str | None = None  # required of its engine (``EngineSpec.abilities``); None: no engine
    tasks: tuple[str, ...] = ()  # kinds of models that it runs (``TASKS``); empty: no model
    dataset: str = ""  # default dataset; "": that of all jobs (``core/settings.py``)
    fresh_weights: bool = False  # can start from a configuration without weights
    throughput: Throughput | None = None  # None: generated tokens if any, else samples
    metrics: tuple[Metric, ...] = ()  # in addition to those of its tasks
    #: Objections beyond those of engine and model; pure, without torch.
    refuse: Callable[[JobDescription], Sequence[Refusal]] | None = None
    #: Remarks on a job for the plan, one line each; pure, without torch.
    notes: Callable[[JobDescription], Sequence[str]] | None = None
    implied: bool = False  # plans add such jobs, so no message suggests it
    windows: bool = False  # its samples are windows of time, not batches of whole items
    #: Axes that a first grid proposes in place of batch sizes, with their values as YAML.
    first_axes: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: Settings now of an engine or device, with the value in ids of jobs that no longer have them.
    moved: Mapping[str, Value] = field(default_factory=dict, hash=False)
    #: Changes of what equal settings compute, oldest first: each raises ``work_version`` by one.
    work_changes: tuple[WorkChange, ...] = ()

    @property
    def work_version(self) -> int:
        """Version of the work, which stands in every row; 1 for the first."""
        return 1 + len(self.work_changes)

    def setting_models(self) -> tuple[type[Settings], ...]:
        """The models whose settings a grid may write: the workload's own, then those of engines."""
        models = (spec.settings(self.ability) for spec in ENGINES.known())
        return tuple(dict.fromkeys((self.parameters, *(model for model in models if model))))

    def model(self, engine: str) -> type[Settings]:
        """The settings of jobs with this engine: the workload's own and the engine's."""
        spec = ENGINES.get(engine)
        settings = spec.settings(self.ability) if spec is not None else None
        return self.parameters if settings is None else _joined(self.parameters, settings)

    def declared(self, engine: str) -> Mapping[str, Declaration]:
        """The declaration of every setting that jobs with this engine have beside a job's own."""
        return declarations(self.model(engine))

    def validate(self, settings: Mapping[str, Any], engine: str = "") -> dict[str, Any]:
        """Return the workload's and engine's settings (engine "": none) as plain values, with
        defaults; invalid ones raise ``pydantic.ValidationError``."""
        return self.model(engine).model_validate(dict(settings)).model_dump()

    def split(
        self, settings: Mapping[str, Any], engine: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Validate as ``validate`` does; return the workload's settings and the engine's."""
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
    """Join two models of settings; BadConfiguration if they share a name."""
    if twice := parameters.model_fields.keys() & settings.model_fields.keys():
        raise BadConfiguration(
            f"{settings.__module__}.{settings.__qualname__}, settings of an engine, and "
            f"{parameters.__name__}, those of the workload, both have '{min(twice)}': the engine's "
            "must be renamed"
        )
    name = f"{parameters.__name__}And{settings.__name__}"
    return create_model(name, __base__=(parameters, settings))


WORKLOADS: Mapping[str, WorkloadSpec] = Declared(
    {
        "finetuning": "workloads.finetuning",
        "fp8-calibration": "workloads.engines.optimum_habana",
        "onnx-calibration": "workloads.engines.onnxruntime",
        "pretraining": "workloads.pretraining",
        "quality-reference": "workloads.quality",
        "quantization": "workloads.quantization",
        "serving": "workloads.serving.workload",
        "text-encoding": "workloads.text_encoding",
        "text-generation": "workloads.text_generation",
        "text-to-image": "workloads.text_to_image",
        "verification": "workloads.verification",
    },
    WorkloadSpec,
    "nightgrid.workloads",
)


#: Metrics derived from raw samples.
METRICS: Declared[Metric] = Declared("workloads.bench", Metric, "nightgrid.metrics")


def find_workload(name: str) -> WorkloadSpec:
    """Return the spec of this name; BadConfiguration lists the known names if it is unknown."""
    spec = WORKLOADS.get(name)
    if spec is None:
        close = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        there_is = ", ".join(WORKLOADS)
        raise BadConfiguration(f"no workload '{name}'{hint or '.'} There is: {there_is}.")
    return spec


def task_for(workload: str, model: ModelEntry) -> TaskSpec:
    """Return the task by which a workload runs a model; BadConfiguration if it has none."""
    names = find_workload(workload).tasks
    task = task_of(model.checkpoint) or (TASKS[names[0]] if names else None)
    if task is None or task.name not in names:
        title = task.title if task is not None else "of a kind that is not known"
        takes = " or ".join(TASKS[name].title for name in names) or "no model"
        what = f"{model.name} is {title} ({model.checkpoint.architecture})"
        raise BadConfiguration(f"{what}, and {workload} takes {takes}")
    return task


def metrics_of(workload: str) -> Mapping[str, Metric]:
    """Metrics that rows of a workload may have, by name; empty if it is not installed."""
    spec = WORKLOADS.get(workload)
    return {} if spec is None else _metrics_of(spec)


@lru_cache
def _metrics_of(spec: WorkloadSpec) -> Mapping[str, Metric]:
    engines = [engine for engine in ENGINES.values() if spec.ability in engine.abilities]
    of_engines = (metric for engine in engines for metric in engine.metrics)
    of_tasks = (metric for name in spec.tasks for metric in TASKS[name].metrics)
    metrics: dict[str, Metric] = {}
    for metric in (*spec.metrics, *of_engines, *of_tasks):
        if metrics.setdefault(metric.name, metric) != metric:
            raise TypeError(f"two metrics are called {metric.name} and differ")
    names = {spec.name, *spec.tasks}
    for metric in METRICS.values():
        if metric.of and names.isdisjoint(metric.of):
            continue
        if metric.name in metrics:
            text = "left out: a second metric %s of %s"
            _METRICS_LOG.warning(text, metric.name, " and ".join(sorted(names)))
            continue
        metrics[metric.name] = metric
    return MappingProxyType(metrics)


def work_version(workload: str) -> int:
    """Version of a workload's work now; 1 where it is not installed."""
    spec = WORKLOADS.get(workload)
    return 1 if spec is None else spec.work_version


def outdated(workload: str, engine: str, parameters: Mapping[str, Any], version: int) -> str:
    """Return how a row's work differs from that of the same settings now, naming the version that
    changed it; "" if it does not differ."""
    spec = WORKLOADS.get(workload)
    changes = () if spec is None else spec.work_changes
    for number, change in enumerate(changes[version - 1 :], version + 1):
        if change.concerns(engine, parameters):
            return f"before work version {number}: {change.what}"
    return ""


def throughput_of(workload: str) -> Throughput | None:
    """Throughput that a workload declares; None where it declares none."""
    entry = WORKLOADS.get(workload)
    return entry.throughput if entry is not None else None


def in_windows(workload: str) -> bool:
    """Return whether a workload's samples are windows of time, not batches of whole items."""
    entry = WORKLOADS.get(workload)
    return entry is not None and entry.windows


def declared(workload: str, engine: str) -> Mapping[str, Declaration]:
    """Declarations of such jobs' settings, by name; empty if the workload is not installed."""
    entry = WORKLOADS.get(workload)
    return entry.declared(engine) if entry is not None else {}


@cache
def declared_in_rows(workload: str, engine: str) -> Mapping[str, Declaration]:
    """As ``declared``, with settings that only rows of earlier versions have."""
    entry = WORKLOADS.get(workload)
    if entry is None:
        return {}
    model = entry.model(engine)
    return MappingProxyType({**declarations(model), **removed_settings(model)})


def load(name: str) -> Workload:
    """Import a workload's function, and torch; BadConfiguration if the name is unknown."""
    return cast("Workload", function_of(find_workload(name).function))
