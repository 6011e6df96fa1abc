"""Read an experiment of a grid file and expand it into jobs: the product of its axes, less
``exclude``, plus ``include``, each once.

A `zip` group is one axis of several settings; the last axis varies fastest. Ranges are of whole
numbers and never pass their end: `1..64 *2` is 1, 2, 4, …, 64; `1..9 +2` is 1, 3, 5, 7, 9.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from orchestrator.core.job import Accelerator, Job, Parameters, Scalar
from orchestrator.grid.dependencies import things
from orchestrator.grid.diagnostics import Findings
from orchestrator.grid.vocabulary import (
    FIELD_NAMES,
    ExperimentBlock,
    Fault,
    JobFields,
    foreign_spelling,
    has_a_choice,
    shown,
)
from orchestrator.grid.yaml import Path_
from workloads.base import MeasureSettings, WorkloadError

MAX_JOBS = 1_000_000
MAX_RANGE = 10_000  # values of one range

_LOOKS_LIKE_RANGE = re.compile(r"\s*[-+]?[0-9.]*[0-9]\s*\.\.")
_RANGE = re.compile(r"\s*([0-9]{1,15})\s*\.\.\s*([0-9]{1,15})\s*(?:([*+])\s*([0-9]{1,15}))?\s*")
RANGE_HINT = "a range is written 1..64 *2 (doubling), 1..9 +2 (steps of 2) or 1..8"


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings that move together (one, or a zip group) and the points that they take in turn."""

    names: tuple[str, ...]
    points: tuple[tuple[Scalar, ...], ...]


#: A partial match: all of these settings have one of their values.
Pattern = Mapping[str, frozenset[Scalar]]


def looks_like_range(value: object) -> bool:
    """Return whether a value is meant as a range, rightly written or not."""
    return isinstance(value, str) and _LOOKS_LIKE_RANGE.match(value) is not None


def parse_range(text: str) -> range | tuple[int, ...] | Fault:
    """The numbers of a range, or what is wrong with it."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return Fault(f"{shown(text)} is not a range", RANGE_HINT)
    start, stop = int(match[1]), int(match[2])
    operator, step = match[3] or "+", int(match[4] or 1)
    if start > stop:
        swapped = f"{stop}..{start}" + (f" {operator}{step}" if match[3] else "")
        return Fault(f"{shown(text)} ends before it begins", f"write {swapped}")
    if operator == "*":
        if start < 1 or step < 2:
            return Fault(f"{shown(text)} never reaches its end", "begin at 1, double at least")
        numbers = [start]
        while numbers[-1] * step <= stop:
            numbers.append(numbers[-1] * step)
        return tuple(numbers)
    if step < 1:
        return Fault(f"{shown(text)} never reaches its end", RANGE_HINT)
    numbers_by_step = range(start, stop + 1, step)
    if len(numbers_by_step) > MAX_RANGE:
        hint = f"a range has at most {MAX_RANGE:,} values; {RANGE_HINT}"
        return Fault(f"{shown(text)} has {len(numbers_by_step):,} values", hint)
    return numbers_by_step


STRUCTURE = tuple(ExperimentBlock.model_fields)

#: Checked values of one setting; none where one was complained of.
Values = list[Scalar]


@dataclass(slots=True, kw_only=True)
class Experiment:
    """An experiment of a grid, ready to be expanded."""

    name: str
    path: Path_
    workload: str
    measure: MeasureSettings
    replicates: int = 1
    fixed: dict[str, Scalar] = field(default_factory=dict)  # built-in defaults included
    axes: list[Axis] = field(default_factory=list)
    include: list[list[Axis]] = field(default_factory=list)
    exclude: list[tuple[Path_, Pattern]] = field(default_factory=list)
    engine_named: bool = True
    only_included: bool = False  # no axes: the points of `include` are all there is
    origins: dict[tuple[str, Scalar], Path_] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of jobs it asks for, before ``exclude``."""
        products = [*self.include] if self.only_included else [self.axes, *self.include]
        return self.replicates * sum(prod(len(axis.points) for axis in axes) for axes in products)

    def product(self, axes: Sequence[Axis]) -> Iterator[dict[str, Scalar]]:
        """Every point of axes as a full mapping of settings, the last axis varying fastest."""
        names = tuple(itertools.chain.from_iterable(axis.names for axis in axes))
        for combination in itertools.product(*(axis.points for axis in axes)):
            point = dict(self.fixed)
            point.update(zip(names, itertools.chain.from_iterable(combination), strict=True))
            yield point


class ExperimentReader:
    """Reads one experiment; problems go to the findings."""

    def __init__(
        self,
        findings: Findings,
        path: Path_,
        block: dict[str, Any],
        defaults: Mapping[str, Any],
        whole: bool,
    ) -> None:
        self.findings, self.vocabulary = findings, findings.vocabulary
        self.path = path
        self.block = block
        self.defaults = defaults
        self.whole = whole
        workload = block.get("workload", defaults.get("workload"))
        self.workload = workload if isinstance(workload, str) else None
        known = self.workload if self.workload in self.vocabulary.workloads else None
        for engine in self._engines_named():
            self.vocabulary.check(known, "engine", engine)  # knows its settings from then on
        self.names = (*FIELD_NAMES, *self.vocabulary.parameter_names(known))
        self.origins: dict[tuple[str, Scalar], Path_] = {}

    def read(self, measure: MeasureSettings) -> Experiment:
        """The experiment; whole only if no problem was noted."""
        if self.workload is None and self.whole:
            known = " or ".join(f"`workload: {name}`" for name in self.vocabulary.workloads)
            hint = f"write {known}"
            self.findings.complain(self.path, "no `workload:` here nor in defaults", hint)
        experiment = Experiment(
            name=str(self.block.get("name", "")),
            path=self.path,
            workload=self.workload or "",
            measure=measure,
            replicates=self.block.get("replicates", 1),
            engine_named=bool(self._engines_named()),
            origins=self.origins,
        )
        self.origins["name", experiment.name] = (*self.path, "name")
        own = self._settings(experiment)
        self._axes(experiment, own)
        experiment.include = self._include(experiment)
        experiment.exclude = self._exclude()
        experiment.only_included = bool(experiment.include) and not self._varied()
        self._require_model(experiment)
        return experiment

    def _groups(self) -> list[Mapping[str, Any]]:
        groups = self.block.get("zip") or []
        groups = groups if isinstance(groups, list) else [groups]
        return [group for group in groups if isinstance(group, Mapping)]

    def _engines_named(self) -> set[str]:
        places = [self.defaults, self.block, self.block.get("axes", {}), *self._groups()]
        places += [entry for entry in self.block.get("include", []) if entry is not None]
        engines = [place.get("engine") for place in places]
        lists = [engine if isinstance(engine, list) else [engine] for engine in engines]
        return {value for value in itertools.chain(*lists) if isinstance(value, str)}

    def _varied(self) -> set[str]:
        return {*self.block.get("axes", {}), *(name for group in self._groups() for name in group)}

    def _require_model(self, experiment: Experiment) -> None:
        if "model" in {*self.defaults, *self.block, *self._varied()} or not self.whole:
            return
        message, hint = "no `model:` here nor in defaults", "write `model: tiny-chatglm3`"
        if not experiment.only_included:
            self.findings.complain(self.path, message, hint)
            return
        for index, entry in enumerate(self.block["include"]):
            if "model" not in entry:
                self.findings.complain((*self.path, "include", index), message, hint)

    def _settings(self, experiment: Experiment) -> set[str]:
        """Fill in what is fixed, from the built-in defaults up; returns the experiment's own."""
        vocabulary = self.vocabulary
        fixed: dict[str, Scalar] = {
            name: info.default
            for name, info in JobFields.model_fields.items()
            if not info.is_required()
        }
        if self.workload is not None and self.workload in vocabulary.workloads:
            entry = vocabulary.workloads[self.workload]
            fixed["engine"] = entry.default_engine
            fixed["dataset"] = entry.dataset or fixed["dataset"]
            fixed.update(vocabulary.parameter_defaults(self.workload))
        experiment.fixed = fixed
        own = [key for key in self.block if key not in STRUCTURE]
        levels: list[tuple[Path_, Mapping[str, Any]]] = [
            (("defaults",), {k: v for k, v in self.defaults.items() if k in self.names}),
            (self.path, {key: self.block[key] for key in own}),
        ]
        for path, settings in levels:
            for name, raw in settings.items():
                if name not in self.names:
                    self.findings.unknown_key((*path, name), [*STRUCTURE, *self.names])
                else:
                    self._fix(experiment, (*path, name), name, raw)
        return set(own)

    def _fix(self, experiment: Experiment, path: Path_, name: str, raw: Any) -> None:
        experiment.axes = [axis for axis in experiment.axes if axis.names != (name,)]
        if name == "accelerator" and isinstance(raw, list):
            values = self._values(path, name, raw)
            experiment.fixed.pop(name, None)
            experiment.axes.append(Axis((name,), tuple((value,) for value in values)))
            return
        raw = self.vocabulary.written(name, raw)
        if isinstance(raw, (list, Mapping)) or (name != "model" and looks_like_range(raw)):
            what = "a range" if isinstance(raw, str) else shown(raw)
            hint = f"several values go under `axes:`, as `{name}: …`"
            self.findings.complain(path, f"{what} where one value belongs", hint)
            return
        for value in self._checked(path, name, raw):
            experiment.fixed[name] = value

    def _checked(self, path: Path_, name: str, value: Scalar | Fault) -> Values:
        if isinstance(value, Fault):
            self.findings.complain(path, value.message, value.hint)
            return []
        known = (self.workload, name, type(value), value) in self.vocabulary.checked
        if self.findings.full and not known:
            self.findings.unread += 1
            return []
        called_now = self.vocabulary.renamed(self.workload, name, value)
        if called_now is not value:
            note = f"`{name}: {value}` is called `{name}: {called_now}` now"
            self.findings.note_old_name(path, note)
        made, fault = self.vocabulary.check(self.workload, name, called_now)
        if fault is not None:
            hint = fault.hint
            if name == "batch_size" and not hint:
                hint = f"a whole number from 1, or max or best; {RANGE_HINT}"
            self.findings.complain(path, fault.message, hint)
            return []
        self.origins.setdefault((name, made), path)
        return [made]

    def _values(self, path: Path_, name: str, raw: Any, *, distinct: bool = True) -> Values:
        if raw == [] or (raw is None and name in FIELD_NAMES):
            hint = f"name at least one value, or remove `{name}:`"
            self.findings.complain(path, f"`{name}:` has no values", hint)
            return []
        entries = list(enumerate(raw)) if isinstance(raw, list) else [(None, raw)]
        values: Values = []
        seen: set[tuple[type, Scalar]] = set()
        for index, entry in entries:
            place = path if index is None else (*path, index)
            for value in self._entry(place, name, entry):
                if (type(value), value) in seen and distinct:
                    hint = "an axis has each value once"
                    self.findings.complain(place, f"{shown(value)} is listed twice", hint)
                seen.add((type(value), value))
                values.append(value)
        return values

    def _entry(self, path: Path_, name: str, entry: Any) -> Values:
        entry = self.vocabulary.written(name, entry)
        if isinstance(entry, (list, Mapping)):
            hint = "values are written [fp32, bf16] or 1..64 *2"
            self.findings.complain(path, f"{shown(entry)} where one value belongs", hint)
            return []
        if not looks_like_range(entry):
            return self._checked(path, name, entry)
        numbers = parse_range(entry)
        if isinstance(numbers, Fault):
            return self._checked(path, name, numbers)
        values: Values = []
        for number in numbers:
            checked = self._checked(path, name, number)
            if not checked:  # one complaint for the whole range is enough
                return []
            values += checked
        return values

    def _known(self, path: Path_, name: str) -> bool:
        """Return whether ``name`` can vary within an experiment; notes a problem when not."""
        if name == "workload":
            hint = "an experiment has one workload; make another experiment"
            self.findings.complain(path, "the workload cannot vary here", hint, key=True)
            return False
        if name not in self.names:
            self.findings.unknown_key(path, self.names)
            return False
        return True

    def _axes(self, experiment: Experiment, own: set[str]) -> None:
        taken = {name: (*self.path, name) for name in own}
        for name, raw in self.block.get("axes", {}).items():
            path = (*self.path, "axes", name)
            if self._free(path, name, taken):
                points = tuple((value,) for value in self._values(path, name, raw))
                self._add(experiment, Axis((name,), points))
        groups = self.block.get("zip")
        path = (*self.path, "zip")
        if isinstance(groups, Mapping):
            self._zip(experiment, path, groups, taken)
        elif groups is not None and self._groups() != groups:
            hint = "a group is written {input_tokens: [128, 512], output_tokens: [32, 64]}"
            self.findings.complain(path, f"{shown(groups)} is not a group of linked axes", hint)
        else:
            for index, group in enumerate(groups or []):
                self._zip(experiment, (*path, index), group, taken)

    def _add(self, experiment: Experiment, axis: Axis) -> None:
        """Append an axis; it replaces what defaults said of its settings."""
        for name in axis.names:
            experiment.fixed.pop(name, None)
        experiment.axes = [a for a in experiment.axes if not set(a.names) & set(axis.names)]
        experiment.axes.append(axis)

    def _free(self, path: Path_, name: str, taken: dict[str, Path_]) -> bool:
        if not self._known(path, name):
            return False
        if name in taken:
            line, _ = self.findings.document.position(taken[name], key=True)
            hint = f"it is on line {line} already; keep one of them"
            self.findings.complain(path, f"`{name}:` is set twice", hint, key=True)
            return False
        taken[name] = path
        return True

    def _zip(
        self, experiment: Experiment, path: Path_, group: Mapping[str, Any], taken: dict[str, Path_]
    ) -> None:
        if not group:
            self.findings.complain(
                path, "a group without axes", "name the linked axes, or remove it"
            )
            return
        columns: dict[str, Values] = {}
        for name, raw in group.items():
            if self._free((*path, name), name, taken):
                columns[name] = self._values((*path, name), name, raw, distinct=False)
        lengths = {name: len(values) for name, values in columns.items()}
        if 0 in lengths.values() or not lengths:
            return  # noted already
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            hint = "linked axes are combined position by position and have equal lengths"
            self.findings.complain(path, f"linked axes of different lengths: {counts}", hint)
            return
        points = tuple(zip(*columns.values(), strict=True))
        self._add(experiment, Axis(tuple(columns), points))

    def _point(self, path: Path_, entry: Mapping[str, Any]) -> dict[str, Values]:
        return {
            name: self._values((*path, name), name, raw)
            for name, raw in entry.items()
            if self._known((*path, name), name)
        }

    def _include(self, experiment: Experiment) -> list[list[Axis]]:
        listed = [axis for axis in experiment.axes if axis.names == ("accelerator",)]
        if "accelerator" in self.block.get("axes", {}):  # an axis, not `accelerator: [HPU, GPU]`
            listed = []
        open_names = [n for axis in experiment.axes if axis not in listed for n in axis.names]
        points = []
        for index, entry in enumerate(self.block.get("include", [])):
            if entry is None:  # refused already
                continue
            path = (*self.path, "include", index)
            point = self._point(path, entry)
            missing = [name for name in open_names if name not in entry]
            if missing:
                hint = "a point of `include` gives a value to every axis"
                self.findings.complain(path, f"no {', '.join(missing)} in this point", hint)
            axes = [Axis((name,), tuple((v,) for v in values)) for name, values in point.items()]
            points.append(axes if "accelerator" in point else [*listed, *axes])
        return points

    def _exclude(self) -> list[tuple[Path_, Pattern]]:
        patterns: list[tuple[Path_, Pattern]] = []
        for index, entry in enumerate(self.block.get("exclude", [])):
            if entry is None:
                continue
            path = (*self.path, "exclude", index)
            if not entry:
                hint = "name what to leave out, e.g. {precision: int4, batch_size: 64}"
                self.findings.complain(path, "an empty pattern would exclude everything", hint)
                continue
            point = self._point(path, entry)
            patterns.append((path, {name: frozenset(values) for name, values in point.items()}))
        return patterns


_FIELDS = frozenset(FIELD_NAMES)
#: An engine decides which settings a job has, and a dataset what a revision means.
_FIXED = _FIELDS - {"engine", "dataset"}
#: Fields of a job that are taken as they are.
_JOB_FIELDS = _FIELDS - {"workload", "accelerator"}


class Expander:
    """Expands the experiments of one grid, and notes problems that only expansion shows."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.vocabulary = findings, findings.vocabulary
        self.repeated: dict[tuple[str, str], int] = {}  # (experiment, first experiment) -> jobs
        self._revisions: dict[tuple[str, str], str] = {}  # of datasets: as written, and pinned
        self._parameters: dict[str, Parameters] = {}  # equal ones are one tuple, as rules want it

    def expand(self, experiments: Sequence[Experiment]) -> tuple[Job, ...]:
        """The jobs of all experiments in file order, each once."""
        by_id: dict[object, Job] = {}
        for experiment in experiments:
            count = 0
            for job in self._replicated(experiment):
                count += 1
                # Where a device has engines of its own, the plan may choose another than is named.
                apart = not experiment.engine_named and has_a_choice(job.accelerator.device)
                first = by_id.setdefault((job.job_id, "open") if apart else job.job_id, job)
                if first is not job:
                    pair = (experiment.name, first.experiment)
                    self.repeated[pair] = self.repeated.get(pair, 0) + 1
            if not count:
                hint = "everything is excluded; loosen `exclude`"
                self.findings.complain(experiment.path, "an experiment without jobs", hint)
        return tuple(by_id.values())

    def notes(self) -> tuple[str, ...]:
        """Notes on duplicate jobs."""
        return tuple(
            f"{'1 job' if count == 1 else f'{count} jobs'} of experiment {shown(name)} stand "
            f"{'twice in it' if name == first else f'in {shown(first)} too'}; planned once"
            for (name, first), count in self.repeated.items()
        )

    def _replicated(self, experiment: Experiment) -> Iterator[Job]:
        if experiment.replicates == 1:
            yield from self._jobs(experiment)
            return
        jobs = list(self._jobs(experiment))
        for _, setting, (kind, _) in itertools.islice(things(jobs, "produces"), 1):
            message = f"replicates: {experiment.replicates} with {setting}"
            hint = (
                f"each replicate would replace the {kind} of the one before; "
                "save it in an experiment of its own"
            )
            self.findings.complain((*experiment.path, "replicates"), message, hint)
        for number in range(1, experiment.replicates + 1):
            for job in jobs:
                yield replace(job, replicate=number)

    def _jobs(self, experiment: Experiment) -> Iterator[Job]:
        for axes, points in self._products(experiment):
            # Within a product, few settings of the workload vary, and none has other names.
            varying = [name for axis in axes for name in axis.names if name not in _FIXED]
            known: dict[tuple[object, ...], Parameters] = {}
            for settings in points:
                values = [settings[name] for name in varying]
                key = (*values, *map(type, values))
                parameters = known.get(key)
                if parameters is None:
                    parameters = known[key] = self._workload_parameters(experiment, settings)
                fields: dict[str, Any] = {name: settings[name] for name in _JOB_FIELDS}
                yield Job(
                    experiment=experiment.name,
                    workload=experiment.workload,
                    accelerator=Accelerator(str(settings["accelerator"])),
                    parameters=parameters,
                    measure=experiment.measure,
                    **fields,
                )

    def _products(
        self, experiment: Experiment
    ) -> Iterator[tuple[Sequence[Axis], Iterator[dict[str, Scalar]]]]:
        """The products that an experiment consists of, each to be exhausted before the next."""
        used: set[Path_] = set()
        if not experiment.only_included:
            yield experiment.axes, self._not_excluded(experiment, used)
        for path, pattern in experiment.exclude:
            if path not in used:
                hint = "" if self.findings.full else self._why_unmatched(experiment, pattern)
                self.findings.complain(path, "this pattern matches no job", hint)
        for axes in experiment.include:
            yield axes, experiment.product(axes)

    def _not_excluded(
        self, experiment: Experiment, used: set[Path_]
    ) -> Iterator[dict[str, Scalar]]:
        """The points of the axes that no pattern matches; those that match one go to ``used``."""
        for point in experiment.product(experiment.axes):
            hits = {
                path
                for path, pattern in experiment.exclude
                if all(point[name] in values for name, values in pattern.items())
            }
            used |= hits
            if not hits:
                yield point

    def _why_unmatched(self, experiment: Experiment, pattern: Pattern) -> str:
        have: dict[str, list[Scalar]] = {name: [v] for name, v in experiment.fixed.items()}
        for axis in experiment.axes:
            for index, name in enumerate(axis.names):
                have[name] = list(dict.fromkeys(point[index] for point in axis.points))
        for name, values in pattern.items():
            if not values & set(have.get(name, [])):
                listed = ", ".join(map(str, have.get(name, [])[:20]))
                wanted = ", ".join(sorted(map(str, values)))
                return f"{name} is never {wanted} here; it is {listed}"
        return "its values never meet in one job"

    def _workload_parameters(
        self, experiment: Experiment, settings: dict[str, Scalar]
    ) -> Parameters:
        """All parameters sorted by name, with defaults; a hub dataset's revision as a commit."""
        given = {name: value for name, value in settings.items() if name not in _FIELDS}
        engine = str(settings["engine"])
        parameters, faults = self.vocabulary.check_together(experiment.workload, engine, given)
        for fault in faults:
            self.findings.complain(experiment.path, fault.message)
        revisions = self.vocabulary.revisions
        if revisions is not None and "revision" in parameters:
            dataset, revision = str(settings["dataset"]), str(parameters["revision"])
            commit = self._revisions.get((dataset, revision))
            if commit is None:
                try:
                    commit = revisions.dataset(dataset, revision)
                except WorkloadError as error:
                    commit = revision
                    path = experiment.origins.get(("dataset", dataset), experiment.path)
                    hint = "with a commit as `revision:` the hub is not asked"
                    foreign = foreign_spelling("dataset", dataset, self.vocabulary.directory)
                    reason, hint = (foreign, "") if foreign else (f"dataset {error}", hint)
                    self.findings.complain(path, reason, hint)
                self._revisions[dataset, revision] = commit
            if commit != revision:
                parameters["revision"] = commit
        made = tuple(sorted(parameters.items()))
        return self._parameters.setdefault(repr(made), made)
