"""Keys and settings of a grid file, and the check of single values.

A *field* is a setting of every job (model, precision, batch_size, …), a *parameter* belongs to the
workload (output_tokens, …); a grid file writes both alike.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.core.job import Accelerator, Scalar
from orchestrator.core.settings import FIELDS, MAPPINGS, JobFields
from orchestrator.util.host import variable_in
from workloads import registry
from workloads.base import WorkloadError
from workloads.data.datasets import find_dataset
from workloads.engines import ENGINES
from workloads.models.catalog import find_model
from workloads.models.hub import Revisions
from workloads.models.products import find_calibration
from workloads.settings import Declaration, Settings, declarations, removed_settings
from workloads.util.contents import canonical


class MeasureBlock(BaseModel):
    """Timing of jobs. A key that is missing keeps its default."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    warmup: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Untimed repeats before timing starts, at least: warm-up ends when every shape "
        "was met and steps are steady. 0: none at all, and the first meeting is timed.",
    )
    min_repeats: int = Field(default=3, ge=1, le=100_000, description="Timed repeats, at least.")
    max_repeats: int = Field(default=20, ge=1, le=100_000, description="Timed repeats, at most.")
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="Level of the confidence interval of throughput."
    )
    relative_half_width: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Stop when the interval's half width is within this share of the mean.",
    )
    time_limit_s: float = Field(
        default=120.0, gt=0, le=604_800, description="Most seconds of the timed part of one job."
    )
    warmup_limit_s: float = Field(
        default=1800.0,
        gt=0,
        le=604_800,
        description="Most seconds of warm-up; where they run out the row is flagged as not steady.",
    )
    least_s: float = Field(
        default=0.0,
        ge=0,
        le=604_800,
        description="Fewest seconds of the timed part of text-generation: repeats go on until "
        "then. Energy needs about 1.5 where NVML reads it, and 20 where hl-smi does.",
    )
    repeat_flagged: int = Field(
        default=1,
        ge=0,
        le=100,
        description="Most further measurements of a row whose figure was disturbed, at the end of "
        "the run and before its deadline. 0: none.",
    )


class ExperimentBlock(BaseModel):
    """The keys of an experiment that are not settings; settings stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    name: str = Field(min_length=1, max_length=80, description="Unique in the file.")
    description: str = Field(default="", description="For readers of the report.")
    measure: dict[str, Any] = Field(
        default_factory=dict, description="Overrides the grid's `measure` for this experiment."
    )
    replicates: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="How often each job is run, in a fresh process each time and on different "
        "cards where there are several. The report joins them into one cell.",
    )
    axes: dict[str, Any] = Field(
        default_factory=dict,
        description="Setting: values. The experiment is their product, the last varying fastest. "
        "Values are a list or a range: 1..64 *2, 1..9 +2, 1..8.",
    )
    zip: Any = Field(
        default=None,
        description="Settings that move together: lists of equal length, read in parallel. One "
        "group, or a list of groups.",
    )
    include: list[dict[str, Any]] = Field(
        default_factory=list, description="More points, added after `exclude`."
    )
    exclude: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Points to leave out: those that have all the values of an entry.",
    )


class PricesBlock(BaseModel):
    """The user's own prices, for the cost of tokens in reports; no job depends on them."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    card_hour: float | dict[str, float] = Field(
        default_factory=dict,
        description="Of an hour of one card; or of each kind by a part of its name (Gaudi2, H100), "
        "`default` for the others.",
    )
    kwh: float = Field(default=0.0, ge=0, description="Of a kilowatt-hour of the cards.")
    currency: str = Field(default="EUR", min_length=1, max_length=8, description="As shown.")


class GridFile(BaseModel):
    """The top level of a grid file."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Also the name of its run: letters, digits, '.', '_' and '-', at most 64.",
    )
    description: str = Field(default="", description="For readers of the report.")
    results: str = Field(
        default="",
        description="Where runs keep their rows: a directory, such as one that all servers share "
        "(a relative one lies where the command is typed), "
        "or s3://BUCKET/PREFIX or gs://… for a copy there. --results wins.",
    )
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="Settings of every experiment that does not say other."
    )
    measure: dict[str, Any] = Field(default_factory=dict, description="How jobs are timed.")
    prices: dict[str, Any] = Field(
        default_factory=dict, description="What cards and energy cost, for the report."
    )
    experiments: list[dict[str, Any]] = Field(min_length=1, description="What is measured.")
    search: dict[str, Any] = Field(
        default_factory=dict,
        description="Measure the cells in an order that learns, and leave out those that no answer "
        "needs.",
    )
    questions: list[dict[str, Any]] = Field(
        default_factory=list, description="What is to be known when the run ends."
    )


FIELD_NAMES = tuple(JobFields.model_fields)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a value, and a hint at the right one."""

    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The names that a grid may use, and the check of single values.

    ``finders`` raise if a thing does not exist; without them names are unchecked, for grids that
    run on another machine. ``revisions`` resolves models and datasets of the hub to commits.
    """

    workloads: Mapping[str, Any]
    precisions: tuple[str, ...]
    finders: Mapping[str, Callable[[str], object]] = field(default_factory=dict)  # by kind of thing
    saved_models: Callable[[], Collection[str]] = frozenset  # names that jobs of the grid save
    revisions: Revisions | None = None
    directory: Path = Path()  # of the grid file
    elsewhere: bool = False  # absolute paths that are not here may be those of a cluster
    checked: dict[tuple[object, ...], tuple[Scalar, Fault | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def installed(
        cls, *, check_data: bool = True, commits: Mapping[str, str] | None = None
    ) -> Vocabulary:
        """Settings of this installation; ``check_data`` also looks for models and datasets,
        ``commits`` are those of a resumed run."""
        from workloads.models.precision import PRECISIONS

        if not check_data:
            return cls(workloads=registry.WORKLOADS, precisions=PRECISIONS)
        from workloads.training.saved_adapters import find_adapter

        return cls(
            workloads=registry.WORKLOADS,
            precisions=PRECISIONS,
            finders={
                "model": find_model,
                "configuration": partial(find_model, weights=False),
                "dataset": find_dataset,
                "adapter": find_adapter,
                "calibration": find_calibration,
            },
            revisions=Revisions(dict(commits or {})),
        )

    def missing(self, kind: str, name: str) -> str:
        """Reason why a thing does not exist; empty if it does, is unchecked, or is a model that a
        job of the grid saves."""
        if self.elsewhere and name.startswith("/") and not os.path.lexists(name):
            return ""
        try:
            if kind in self.finders:
                self.finders[kind](name)
        except WorkloadError as error:
            if kind in ("model", "configuration") and name in self.saved_models():
                return ""
            return foreign_spelling(kind, name, self.directory) or str(error)
        except RuntimeError:  # ``expanduser``, of a user without a home directory
            return foreign_spelling(kind, name, self.directory)
        except OSError as error:  # such as of a name that is too long for a file
            return f"{shown(name)} cannot be looked for: {error.strerror}"
        return ""

    def parameter_names(self, workload: str | None = None) -> tuple[str, ...]:
        """Settings of a workload and its engines; of all workloads if None or unknown."""
        known = workload is not None and workload in self.workloads
        entries = [self.workloads[workload]] if known else self.workloads.values()  # type: ignore[index]
        models = (model for entry in entries for model in entry.setting_models())
        return tuple(dict.fromkeys(name for model in models for name in model.model_fields))

    def removed_settings(self) -> dict[str, Declaration]:
        """The settings that earlier versions had and none of these workloads has now."""
        models = [m for entry in self.workloads.values() for m in entry.setting_models()]
        known = set(self.parameter_names())
        earlier = {n: d for model in models for n, d in removed_settings(model).items()}
        return {name: declared for name, declared in earlier.items() if name not in known}

    def parameter_defaults(self, workload: str) -> Mapping[str, Scalar]:
        """The defaults of all optional settings of a workload and of its engines."""
        return _defaults(self.workloads[workload].setting_models())

    def check(self, workload: str | None, name: str, value: Scalar) -> tuple[Scalar, Fault | None]:
        """Convert a value to its setting's type, or return its fault; unknown names pass."""
        known = (workload, name, type(value), value)
        if known not in self.checked:
            self.checked[known] = self._check(workload, name, value)
        return self.checked[known]

    def renamed(self, workload: str | None, name: str, value: Scalar) -> Scalar:
        """Translate a value of an earlier version to its present name, if it has one."""
        if name in FIELD_NAMES:
            declared = FIELDS
        else:
            entry = self.workloads.get(workload or "")
            declared = {} if entry is None else declarations(entry.parameters)
        return declared[name].current(value) if name in declared else value

    def written(self, name: str, value: Any) -> Any:
        """The value of a mapping such as ``{max: {cap: 64}}``, or its fault; others as they are."""
        if name not in MAPPINGS or not isinstance(value, Mapping):
            return value
        try:
            return MAPPINGS[name](value)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            return Fault(message, hint)

    def _check(self, workload: str | None, name: str, value: Scalar) -> tuple[Scalar, Fault | None]:
        if name not in FIELD_NAMES:
            entry = self.workloads.get(workload or "")
            for model in entry.setting_models() if entry is not None else ():
                if name in model.model_fields:
                    return _validated(model, name, value)
            return value, None
        _, fault = _validated(JobFields, name, value)
        if fault is None and name in ("model", "dataset"):
            written, value = str(value), canonical(str(value))
            if written.startswith("./") and self.finders and not os.path.exists(value):
                # Its canonical form may be the name of a repository.
                kind = "directory" if name == "model" else "file or directory"
                return value, Fault(
                    foreign_spelling(name, value, self.directory)
                    or f"there is no {kind} {written} in {Path.cwd()}"
                )
        if fault is None and name == "model" and self.revisions is not None:
            try:
                value = self.revisions.model(str(value))
            except WorkloadError as error:
                return value, Fault(
                    foreign_spelling(name, str(value), self.directory) or str(error)
                )
        return value, fault or self._unknown_name(workload, name, value)

    def _unknown_name(self, workload: str | None, name: str, value: Scalar) -> Fault | None:
        """Fields whose values are names of things outside the grid."""
        if name == "workload":
            if value in self.workloads:  # asked without looking for what others have installed
                return None
            written = {n: entry for n, entry in self.workloads.items() if not entry.implied}
            return _not_among(value, written, "workload", called_otherwise(value, written))
        if name == "accelerator":
            try:  # other packages are looked for only where it is none of our own kinds
                Accelerator(str(value))
            except ValueError:
                known = list(Accelerator)
                meant = next((kind for kind in known if kind.spec.answers_to(str(value))), "")
                return _not_among(value, known, "kind of card", meant)
            return None
        if name == "precision":
            from workloads.models.precision import ALSO_CALLED

            meant = ALSO_CALLED.get(str(value).casefold(), "")
            return _not_among(value, self.precisions, "precision", meant)
        if name == "engine":
            if workload is None or workload not in self.workloads:
                return None
            entry = self.workloads[workload]
            if entry.takes_engine(str(value)):
                return None
            meant = called_otherwise(value, {name: ENGINES[name] for name in entry.engines})
            return _not_among(value, entry.engines, f"engine of {workload}", meant)
        if name not in ("model", "dataset"):
            return None
        entry = self.workloads.get(workload or "")
        fresh = name == "model" and entry is not None and entry.fresh_weights
        reason = self.missing("configuration" if fresh else name, str(value))
        return Fault(reason) if reason else None

    def check_together(
        self, workload: str, engine: str, settings: Mapping[str, Scalar]
    ) -> tuple[dict[str, Scalar], list[Fault]]:
        """Settings of a job with defaults, and faults of their combination. Settings of other
        engines are left out at their defaults; others are refused (``rules.engine_refusals``)."""
        model = self.workloads[workload].model(engine)
        own = {name: value for name, value in settings.items() if name in model.model_fields}
        usual = self.parameter_defaults(workload) if len(own) < len(settings) else {}
        others = {
            name: value
            for name, value in settings.items()
            if name not in own and (value, type(value)) != (usual[name], type(usual[name]))
        }
        try:
            made = model.model_validate_json(json.dumps(own)).model_dump(mode="json")
            return {**made, **others}, []
        except ValidationError as error:
            faults = []
            for detail in error.errors(include_url=False):
                where = ".".join(map(str, detail["loc"]))
                faults.append(Fault(f"{where}: {detail['msg']}" if where else detail["msg"]))
            return {}, faults


@cache
def _defaults(models: tuple[type[Settings], ...]) -> Mapping[str, Scalar]:
    declared = {n: d for model in reversed(models) for n, d in declarations(model).items()}
    return {name: d.default for name, d in declared.items() if d.default is not ...}


def _validated(model: type[BaseModel], name: str, value: Scalar) -> tuple[Scalar, Fault | None]:
    """Check one field of a pydantic model alone: other fields' errors do not matter here."""
    try:
        # JSON mode, since strict Python mode refuses the text of an enumeration's member.
        made = model.model_validate_json(json.dumps({name: value}), strict=True)
    except ValidationError as error:
        details: list[Any] = [d for d in error.errors(include_url=False) if d["loc"][:1] == (name,)]
        declared = model.model_fields[name].json_schema_extra
        meant = declared.also_called if isinstance(declared, Declaration) else {}
        return value, explain(details, value, meant) if details else None
    return made.model_dump(mode="json")[name], None


#: Limits of numbers, by pydantic's name of the complaint.
_LIMITS = {
    "greater_than_equal": "at least {ge:g} is wanted",
    "greater_than": "more than {gt:g} is wanted",
    "less_than_equal": "at most {le:g} is wanted",
    "less_than": "less than {lt:g} is wanted",
}
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "list_type": "a list",
    "none_required": "null",
}


def explain(
    details: list[Any], value: object, also_called: Mapping[str, str] | None = None
) -> Fault:
    """Fault for pydantic's errors; ``also_called`` maps other programs' names of values."""
    wanted: list[str] = []
    limits: list[str] = []
    choices: list[str] = []
    for detail in details:
        kind = detail["type"]
        if kind == "literal_error" or kind == "enum":
            choices += str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        elif kind in _WANTED:
            wanted.append(_WANTED[kind])
        elif kind == "string_pattern_mismatch" and len(details) > 1:
            continue  # one of several forms: the others say what is wanted
        elif kind in _LIMITS:
            limits.append(_LIMITS[kind].format(**detail["ctx"]))
        else:
            limits.append(detail["msg"].removeprefix("Input ").removeprefix("Value error, "))
    if limits:
        return Fault(f"{shown(value)}: {limits[0]}")
    choices = list(dict.fromkeys(choice.strip("'") for choice in choices))
    wanted = list(dict.fromkeys(wanted))
    if choices and not wanted:
        meant = (also_called or {}).get(str(value).casefold(), "")
        return _not_among(value, choices, "possible value", meant) or Fault(
            f"{shown(value)} is refused"
        )
    hint = _NO_VARIABLES if isinstance(value, str) and variable_in(value) else ""
    if isinstance(value, str) and not hint and wanted[:1] == ["a whole number"]:
        digits = value.strip().lstrip("0") or "0"
        hint = f"write {digits}" if digits.isdigit() else ""
    return Fault(f"{shown(value)} is not {' or '.join([*wanted, *choices])}", hint)


def called_otherwise(value: object, entries: Mapping[str, Any]) -> str:
    """The entry that others call so; "" where none is."""
    word = str(value).casefold()
    return next((name for name, entry in entries.items() if word in entry.also_called), "")


def _not_among(value: object, names: Iterable[str], noun: str, meant: str = "") -> Fault | None:
    names = list(names)
    if value in names:
        return None
    parts = [part.strip() for part in str(value).split(",")]
    if len(parts) > 1 and set(parts) <= set(names):
        return Fault(f"{shown(value)} is no {noun}", f"a list is written [{', '.join(parts)}]")
    return Fault(f"{shown(value)} is no {noun}", suggestion(str(value), names, meant))


#: Names that are listed beside one that is close.
MOST_LISTED = 15


def suggestion(word: str, names: Iterable[str], meant: str = "") -> str:
    """``did you mean …?`` when a name is meant or close, else the names there are."""
    names = list(names)
    folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(word.casefold()[:80], folded, n=1, cutoff=0.7)
    listed = ", ".join(names)
    if meant in names or close:
        question = f"did you mean {meant if meant in names else folded[close[0]]}?"
        return f"{question} There is: {listed}" if len(names) <= MOST_LISTED else question
    return f"there is: {listed}" if names else "there is none"


def shown(value: object) -> str:
    """Quote a value for a message: short, with text distinct from numbers."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 80 else value[:77] + "…", ensure_ascii=False)
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return json.dumps(value)


_NO_VARIABLES = "a grid has no variables: write the value, or pass it with --set"
_ADDRESS = re.compile(
    r"(?:(?P<scheme>\w+)://|(?=hf\.co/|huggingface\.co/))(?:[\w-]+(?:\.[\w-]+)+(?::\d+)?/)?"
    r"(?:datasets/|models/)?(?P<rest>.*)",
    re.DOTALL,
)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w.-]+)?")
_TAGGED = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+\Z")


def foreign_spelling(kind: str, name: str, directory: Path) -> str:
    """Explain a missing name by the spelling of a shell or another program, with the one to write.

    "" if it is none of these. ``directory`` is that of the grid file.
    """
    noun = "model" if kind == "configuration" else kind
    of_hub = noun in ("model", "dataset")
    if variable := variable_in(name):
        return f"{shown(name)} has {variable}; {_NO_VARIABLES}"
    path = os.path.expanduser(name)
    if path.startswith("~"):
        user = path.partition("/")[0]
        return f"{name}: this machine has no home directory {user}; write an absolute path"
    if address := _ADDRESS.match(name):
        scheme, rest = address["scheme"], address["rest"]
        if scheme == "file":
            return f"{name} is an address; write the path /{rest.lstrip('/')}"
        repository = _REPOSITORY.match(rest)
        if of_hub and repository and scheme in ("hf", "huggingface", "http", "https", None):
            return f"{name} is an address; a {noun} of the hub is written {repository[0]}"
        return (
            f"{name} is an address; copy it to a directory that all nodes see, and write its path"
        )
    if of_hub and _TAGGED.match(name) and not name.startswith("random:"):
        revision = "`revision:` beside it" if kind == "dataset" else "org/name@REVISION"
        return (
            f"{name} is a name with a tag, as Ollama has them; write org/name of the hub, and "
            f"{revision} for one of its revisions"
        )
    beside = directory.absolute() / path
    elsewhere = directory.resolve() != Path.cwd().resolve()
    if not os.path.isabs(path) and elsewhere and os.path.exists(beside):
        return (
            f"{name} is not in the working directory, {Path.cwd()}, but beside the grid file; "
            f"write {os.path.normpath(beside)}, or start in {directory.absolute()}"
        )
    return ""


@cache
def has_a_choice(device: str) -> bool:
    """Return whether some engine is made for this device, so that its nodes are worth asking."""
    return any(device in spec.preferred for spec in ENGINES.known())
