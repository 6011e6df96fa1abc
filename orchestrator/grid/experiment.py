"""One experiment of a grid file: its settings, axes, include and exclude, checked name by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.domain.job import Scalar
from orchestrator.grid.axes import (
    RANGE_HINT,
    Axis,
    Pattern,
    looks_like_range,
    parse_range,
    product_size,
)
from orchestrator.grid.blocks import ExperimentBlock
from orchestrator.grid.fields import FIELD_NAMES, Fault, JobFields, shown
from orchestrator.grid.findings import Findings
from orchestrator.grid.strict_yaml import Path_
from workloads.measure_settings import MeasureSettings

STRUCTURE = tuple(ExperimentBlock.model_fields)

#: In place of a value that was complained of.
_REFUSED = object()

#: Values of one setting, each with its place in the file.
Values = list[tuple[Scalar, Path_]]


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
        alone = 0 if self.only_included else product_size(self.axes)
        return self.replicates * (alone + sum(product_size(axes) for axes in self.include))


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

    def _engines_named(self) -> set[str]:
        """Every engine that the experiment may have."""
        groups = self.block.get("zip") or []
        places = [self.defaults, self.block, self.block.get("axes", {})]
        places += [*(groups if isinstance(groups, list) else [groups])]
        places += self.block.get("include", [])
        said = [place.get("engine") for place in places if isinstance(place, Mapping)]
        values = [value for each in said for value in (each if isinstance(each, list) else [each])]
        return {value for value in values if isinstance(value, str)}

    def _varied(self) -> set[str]:
        """Settings that stand under ``axes`` or ``zip``."""
        groups = self.block.get("zip") or []
        groups = groups if isinstance(groups, list) else [groups]
        names = {name for group in groups if isinstance(group, Mapping) for name in group}
        return names | set(self.block.get("axes", {}))

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

    # Settings

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
            experiment.axes.append(Axis((name,), tuple((value,) for value, _ in values)))
            return
        raw = self._said(path, name, raw)
        if raw is _REFUSED:
            return
        if isinstance(raw, (list, Mapping)) or (name != "model" and looks_like_range(raw)):
            what = "a range" if isinstance(raw, str) else shown(raw)
            hint = f"several values go under `axes:`, as `{name}: …`"
            self.findings.complain(path, f"{what} where one value belongs", hint)
            return
        checked = self._checked(path, name, raw)
        if checked:
            experiment.fixed[name] = checked[0][0]

    # Values

    def _checked(self, path: Path_, name: str, value: Scalar) -> Values:
        called_now = self.vocabulary.renamed(self.workload, name, value)
        if called_now is not value:
            self.findings.renamed(path, name, value, called_now)
        made, fault = self.vocabulary.check(self.workload, name, called_now)
        if fault is not None:
            hint = fault.hint
            if name == "batch_size" and not hint:
                hint = f"a whole number from 1, or max or best; {RANGE_HINT}"
            self.findings.complain(path, fault.message, hint)
            return []
        self.origins.setdefault((name, made), path)
        return [(made, path)]

    def _values(self, path: Path_, name: str, raw: Any, *, distinct: bool = True) -> Values:
        """The values that ``raw`` (a value, a range, or a list of both) stands for, checked."""
        if raw == [] or (raw is None and name in FIELD_NAMES):
            hint = f"name at least one value, or remove `{name}:`"
            self.findings.complain(path, f"`{name}:` has no values", hint)
            return []
        entries = list(enumerate(raw)) if isinstance(raw, list) else [(None, raw)]
        values: Values = []
        seen: set[tuple[type, Scalar]] = set()
        for index, entry in entries:
            place = path if index is None else (*path, index)
            for value, _ in self._entry(place, name, entry):
                if (type(value), value) in seen and distinct:
                    hint = "an axis has each value once"
                    self.findings.complain(place, f"{shown(value)} is listed twice", hint)
                seen.add((type(value), value))
                values.append((value, place))
        return values

    def _said(self, path: Path_, name: str, raw: Any) -> Any:
        """The value that a mapping stands for; all else as it is."""
        made, fault = self.vocabulary.written(name, raw)
        if fault is not None:
            self.findings.complain(path, fault.message, fault.hint)
            return _REFUSED
        return raw if made is None else made

    def _entry(self, path: Path_, name: str, entry: Any) -> Values:
        entry = self._said(path, name, entry)
        if entry is _REFUSED:
            return []
        if isinstance(entry, (list, Mapping)):
            hint = "values are written [fp32, bf16] or 1..64 *2"
            self.findings.complain(path, f"{shown(entry)} where one value belongs", hint)
            return []
        if not looks_like_range(entry):
            return self._checked(path, name, entry)
        numbers = parse_range(entry)
        if isinstance(numbers, Fault):
            self.findings.complain(path, numbers.message, numbers.hint)
            return []
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

    # Axes

    def _axes(self, experiment: Experiment, own: set[str]) -> None:
        taken = {name: (*self.path, name) for name in own}
        for name, raw in self.block.get("axes", {}).items():
            path = (*self.path, "axes", name)
            if self._free(path, name, taken):
                points = tuple((value,) for value, _ in self._values(path, name, raw))
                self._add(experiment, Axis((name,), points))
        groups = self.block.get("zip")
        path = (*self.path, "zip")
        if groups is None:
            return
        if isinstance(groups, Mapping):
            self._zip(experiment, path, groups, taken)
            return
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            hint = "a group is written {input_tokens: [128, 512], output_tokens: [32, 64]}"
            self.findings.complain(path, f"{shown(groups)} is not a group of linked axes", hint)
            return
        for index, group in enumerate(groups):
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
        self,
        experiment: Experiment,
        path: Path_,
        group: Mapping[str, Any],
        taken: dict[str, Path_],
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
        points = zip(*([value for value, _ in values] for values in columns.values()), strict=True)
        self._add(experiment, Axis(tuple(columns), tuple(points)))

    # Points

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
            axes = [Axis((name,), tuple((v,) for v, _ in values)) for name, values in point.items()]
            points.append(axes if "accelerator" in point else [*listed, *axes])
        return points

    def _exclude(self) -> list[tuple[Path_, Pattern]]:
        patterns = []
        for index, entry in enumerate(self.block.get("exclude", [])):
            if entry is None:
                continue
            path = (*self.path, "exclude", index)
            if not entry:
                hint = "name what to leave out, e.g. {precision: int4, batch_size: 64}"
                self.findings.complain(path, "an empty pattern would exclude everything", hint)
                continue
            point = self._point(path, entry)
            allowed = {name: frozenset(v for v, _ in values) for name, values in point.items()}
            patterns.append((path, Pattern(allowed)))
        return patterns
