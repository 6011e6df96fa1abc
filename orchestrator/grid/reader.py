"""The meaning of a grid file: structure and names checked, experiments expanded into jobs.

Nothing raises on the way. Each step notes its problems and hands on what is sound, so that one
reading finds the unknown key in line 3 and the impossible exclude in line 30. An experiment with
problems of its own is not expanded: that would only complain about their consequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.domain.job import Accelerator, Scalar
from orchestrator.domain.topology import Node
from orchestrator.errors import GridError, Problem
from orchestrator.grid.axes import MAX_JOBS
from orchestrator.grid.blocks import ExperimentBlock, GridFile, MeasureBlock
from orchestrator.grid.expand import Expander
from orchestrator.grid.experiment import STRUCTURE, Experiment, ExperimentReader
from orchestrator.grid.fields import FIELD_NAMES, Vocabulary, explain, shown, suggestion
from orchestrator.grid.model import Grid
from orchestrator.grid.overrides import overridden
from orchestrator.grid.strict_yaml import Document, Path_, parse, read
from orchestrator.planning.needs import Thing, problems_of_needs
from orchestrator.planning.planner import card_problems, refusal_problems
from workloads.devices import own_devices
from workloads.errors import WorkloadError
from workloads.measure_settings import MeasureSettings
from workloads.settings import declarations

#: From the kinds of card that a grid names to the nodes it would run on.
NodesFor = Callable[[Sequence[Accelerator]], Sequence[Node]]

MAX_PROBLEMS = 100  # beyond these, reading on helps nobody

_HABITS = {  # what people write, and where it belongs
    "parameters": "write the workload's parameters as settings, beside `name:`",
    "matrix": "the axes of an experiment go under `axes:`",
    "grid": "the axes of an experiment go under `axes:`",
    "sweep": "the axes of an experiment go under `axes:`",
    "jobs": "a grid has `experiments:`",
    "device": f"write `accelerator: {own_devices()[0].accelerator}`, or another kind of card",
    "epochs": "a job trains for `steps:`, each of `batch_size:` samples a card",
    "repeats": "write `measure: {max_repeats: 5}`",
    "deadline": "it is an option of a run: nightgrid run GRID --deadline 08:00",
    "budget": "it is an option of a run: nightgrid run GRID --budget 10h",
    "priority": "it is an option of a run: nightgrid run GRID --priority 5",
    "nodes": "a run takes what its cluster has; on this machine: nightgrid run GRID --emulate 2x8",
}
#: Words of other programs, and the keys that mean the same here.
MEANT = {
    "output_tokens": ("max_new_tokens", "max_tokens"),
    "input_tokens": ("prompt_tokens", "prompt_length", "input_length"),
    "prompts": ("num_prompts",),
    "batch_size": ("bs", "per_device_train_batch_size", "per_device_batch_size"),
    "cards": ("gpus", "num_gpus", "n_gpus", "hpus", "devices", "world_size"),
    "precision": ("dtype", "torch_dtype", "quantization"),
    "dataset": ("data", "data_path", "train_file"),
    "attention": ("attn_implementation",),
    "tensor_parallel": ("tp", "tensor_parallel_size"),
    "steps": ("max_steps", "num_steps", "iterations"),
    "max_length": ("max_seq_length", "max_seq_len", "seq_len", "cutoff_len"),
    "rank": ("r", "lora_r", "lora_rank"),
    "alpha": ("lora_alpha",),
    "targets": ("target_modules", "lora_target"),
    "learning_rate": ("lr",),
    "learning_rate_schedule": ("lr_scheduler_type",),
    "gradient_accumulation": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "max_gradient_norm": ("max_grad_norm",),
    "optimizer": ("optim",),
}


def saved_names(data: Any, vocabulary: Vocabulary) -> frozenset[str]:
    """The names under which a document's jobs save models, wherever in it they stand."""
    settings = {
        name
        for entry in vocabulary.workloads.values()
        for model in entry.setting_models()
        for name, declared in declarations(model).items()
        if declared.produces == "model"
    }

    def within(part: Any, named: bool) -> Iterator[str]:
        if isinstance(part, Mapping):
            for key, value in part.items():
                yield from within(value, key in settings)
        elif isinstance(part, list):
            for value in part:
                yield from within(value, named)
        elif named and isinstance(part, str):
            yield part

    return frozenset(within(data, False))


def _pruned(raw: Mapping[str, Any], refused: Iterable[Path_]) -> dict[str, Any]:
    """``raw`` without the keys and list entries at the paths that were refused."""
    good = dict(raw)
    for where in refused:
        key = str(where[0])
        if len(where) == 1:
            good.pop(key, None)
        elif isinstance(good.get(key), list):
            good[key] = [None if i == where[1] else entry for i, entry in enumerate(good[key])]
    return good


class GridReader:
    """One reading of one document."""

    def __init__(
        self, document: Document, vocabulary: Vocabulary, nodes_for: NodesFor | None = None
    ) -> None:
        self.document = document
        self.vocabulary = vocabulary.with_models(lambda: saved_names(document.data, vocabulary))
        self.nodes_for = nodes_for
        self.problems: list[Problem] = []
        self.old_names: dict[str, None] = {}

    def read(self) -> Grid:
        """The grid.

        Raises:
            GridError: all that is wrong with it.
        """
        top = self.structure(GridFile, self.document.data, ())
        measure = self._measure(top.get("measure", {}), ("measure",), MeasureSettings())
        experiments = self._experiments(top, measure)
        if not self._check_size(experiments):
            experiments = []
        expander = Expander(self.document, self.vocabulary)
        planned = expander.expand(experiments)
        self.problems += expander.problems
        revisions = self.vocabulary.revisions
        grid = Grid(
            name=top.get("name", ""),
            description=top.get("description", ""),
            results=top.get("results", ""),
            planned=planned,
            open_engines=frozenset(e.name for e in experiments if not e.engine_named),
            notes=(*self.old_names, *expander.notes(), *(revisions.notes if revisions else ())),
            commits=dict(revisions.commits) if revisions else {},
            document=self.document,
            origins={
                (experiment.name, *origin): path
                for experiment in experiments
                for origin, path in experiment.origins.items()
            },
        )
        self.problems += refusal_problems(grid, self.vocabulary.workloads)
        self.problems += problems_of_needs(grid, self._exists)
        if self.nodes_for is not None:
            self.problems += card_problems(grid, self.nodes_for(grid.accelerators()))
        if self.problems:
            raise GridError(self._in_file_order())
        return grid

    def renamed(self, path: Path_, name: str, old: Scalar, new: Scalar) -> None:
        """Note that the grid says a value by the name that an earlier version gave it."""
        line, _ = self.document.position(path)
        self.old_names[f"line {line}: `{name}: {old}` is called `{name}: {new}` now"] = None

    def complain(self, path: Path_, message: str, hint: str = "", *, key: bool = False) -> None:
        """Note a problem at ``path``."""
        self.problems.append(self.document.problem(path, message, hint, key=key))

    def structure(
        self, model: type[BaseModel], raw: Mapping[str, Any], path: Path_
    ) -> dict[str, Any]:
        """The keys of ``raw`` that the model accepts; the others are noted as problems.

        An entry of a list that is refused becomes None, so that the others keep their places.
        """
        try:
            model.model_validate(dict(raw))
        except ValidationError as error:
            by_key: dict[Path_, list[Any]] = {}
            for detail in error.errors(include_url=False):
                by_key.setdefault(tuple(detail["loc"]), []).append(detail)
            for where, details in by_key.items():
                self._complain_of(model, path + where, details)
            return _pruned(raw, by_key)
        return dict(raw)

    def _complain_of(self, model: type[BaseModel], path: Path_, details: list[Any]) -> None:
        first = details[0]
        name = str(path[-1])
        if first["type"] == "missing":
            hint = {"name": "give it a name", "experiments": "a list of experiments"}.get(name, "")
            self.complain(path[:-1], f"no `{name}:` here", hint)
        elif first["type"] == "extra_forbidden":
            self.unknown_key(path, model.model_fields)
        elif first["type"] == "too_short":
            self.complain(path, "is empty", "give it at least one entry")
        elif first["type"] == "string_pattern_mismatch":
            hint = "letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 64"
            self.complain(path, f"{shown(first['input'])} is not a name for a run", hint)
        else:
            fault = explain(details, first["input"])
            hint = fault.hint
            if first["type"] == "list_type" and isinstance(first["input"], Mapping):
                name = next(iter(first["input"]), "first")
                hint = f"an entry of a list begins with a dash: `- name: {name}`, its keys below"
            self.complain(path, fault.message, hint)

    def unknown_key(self, path: Path_, names: Any) -> None:
        """Note that the last key of ``path`` is none of ``names``."""
        name = str(path[-1])
        names = list(names)
        own = next((each for each, words in MEANT.items() if name in words), "")
        hint = _HABITS.get(name) or self._elsewhere(name)
        field = own or name
        if (
            len(path) == 1
            and not _HABITS.get(name)
            and (field in FIELD_NAMES or self._elsewhere(field))
        ):
            hint = f"write `{field}:` under `defaults:`, or in each experiment"
        if own and not hint:
            hint = f"write `{own}:`" if own in names else self._elsewhere(own, f"`{own}:`")
        hint = hint or suggestion(name, names)
        self.complain((*path[:-1], name), f"unknown key {shown(name)}", hint, key=True)

    def _elsewhere(self, name: str, called: str = "it") -> str:
        """The workloads that have a setting of this name; empty when none has."""
        having = [
            workload
            for workload in self.vocabulary.workloads
            if name in self.vocabulary.parameter_names(workload)
        ]
        return f"{called} is a setting of `workload: {'` or `'.join(having)}`" if having else ""

    def _measure(self, raw: Any, path: Path_, inherited: MeasureSettings) -> MeasureSettings:
        if raw == {}:  # the usual case; its model need not be built
            return inherited
        good = self.structure(MeasureBlock, raw, path)
        settings = replace(inherited, **good)
        if settings.min_repeats > settings.max_repeats:
            blamed = "min_repeats" if "min_repeats" in good else "max_repeats"
            other = "max_repeats" if blamed == "min_repeats" else "min_repeats"
            self.complain(
                (*path, blamed),
                f"min_repeats ({settings.min_repeats}) is more than max_repeats "
                f"({settings.max_repeats})",
                f"set {other} as well: it is {getattr(MeasureSettings(), other)} unless it is set",
            )
            return inherited  # said once; experiments need not repeat it
        return settings

    def _experiments(self, top: dict[str, Any], measure: MeasureSettings) -> list[Experiment]:
        blocks = []
        for index, raw in enumerate(top.get("experiments", [])):
            path: Path_ = ("experiments", index)
            if raw is None:
                continue
            before = len(self.problems)
            block = self.structure(ExperimentBlock, raw, path)
            blocks.append((path, block, len(self.problems) == before))
        defaults = top.get("defaults", {})
        self._check_defaults(defaults, [block for _, block, _ in blocks])
        names: dict[str, int] = {}
        experiments = []
        for path, block, whole in blocks:
            before = len(self.problems)
            own = self._measure(block.get("measure", {}), (*path, "measure"), measure)
            name = block.get("name")
            if name is not None and names.setdefault(name, int(path[1])) != path[1]:
                line, _ = self.document.position(("experiments", names[name], "name"))
                hint = f"names are unique; the first is on line {line}"
                self.complain((*path, "name"), f"a second experiment named {shown(name)}", hint)
            experiment = ExperimentReader(self, path, block, defaults, whole).read(own)
            if whole and len(self.problems) == before:
                experiments.append(experiment)
        return experiments

    def _check_defaults(self, defaults: Mapping[str, Any], blocks: list[dict[str, Any]]) -> None:
        """Names in ``defaults``: parameters of any workload of the file are welcome there."""
        workloads = [defaults.get("workload"), *(block.get("workload") for block in blocks)]
        used = [name for name in workloads if isinstance(name, str)]
        known = {name for workload in used for name in self.vocabulary.parameter_names(workload)}
        known = known or set(self.vocabulary.parameter_names())
        for name in defaults:
            if name not in FIELD_NAMES and name not in known:
                if name in GridFile.model_fields or name in STRUCTURE:
                    where = "at the top of the file or in an experiment, not under `defaults:`"
                    self.complain(("defaults", name), f"`{name}:` stands {where}", key=True)
                    continue
                self.unknown_key(("defaults", name), [*FIELD_NAMES, *sorted(known)])

    def _check_size(self, experiments: list[Experiment]) -> bool:
        total = 0
        for experiment in experiments:
            size = experiment.size
            total += size
            if total > MAX_JOBS:
                together = "" if total == size else f", {total:,} with the experiments before it"
                message = f"experiment {shown(experiment.name)} has {size:,} jobs{together}"
                path = (*experiment.path, "axes")
                self.complain(path, message, f"the limit is {MAX_JOBS:,}; shorten an axis")
                return False
        return True

    def _exists(self, thing: Thing) -> bool:
        kind, name = thing
        finders = {
            "adapter": self.vocabulary.find_adapter,
            "model": self.vocabulary.find_model,
            "calibration": self.vocabulary.find_calibration,
        }
        find = finders.get(kind)
        if find is None:
            return True  # cannot be told on this machine
        try:
            find(name)
        except WorkloadError:
            return False
        return True

    def _in_file_order(self) -> list[Problem]:
        ordered = sorted(dict.fromkeys(self.problems), key=lambda p: (p.line or 0, p.column or 0))
        if len(ordered) > MAX_PROBLEMS:
            more = len(ordered) - MAX_PROBLEMS
            ordered = ordered[:MAX_PROBLEMS]
            ordered.append(
                Problem(
                    file=self.document.file,
                    line=None,
                    column=None,
                    path="",
                    message=f"and {more} more problems",
                )
            )
        return ordered


def load_grid(
    path: Path | str,
    *,
    vocabulary: Vocabulary | None = None,
    check_data: bool = True,
    nodes_for: NodesFor | None = None,
    overrides: Sequence[str] = (),
    commits: Mapping[str, str] | None = None,
) -> Grid:
    """Read a grid file into jobs.

    Args:
        path: the YAML file.
        vocabulary: the names a grid may use; what is installed, by default.
        check_data: also refuse models and datasets that are not on this machine.
        nodes_for: from the kinds of card the grid names to the nodes it would run on. With it,
            card counts they cannot give are reported along with everything else; without it
            ``make_plan`` reports them.
        overrides: ``PATH=VALUE`` each, set before anything is checked; see ``overridden``.
        commits: those of the run that is gone on with, see ``Revisions``.

    Raises:
        GridError: all that is wrong with the file, in file order.
    """
    vocabulary = vocabulary or Vocabulary.installed(check_data=check_data, commits=commits)
    return GridReader(overridden(read(path), overrides), vocabulary, nodes_for).read()


def parse_grid(content: bytes, file: str, *, vocabulary: Vocabulary | None = None) -> Grid:
    """Like ``load_grid`` for a grid that is in memory; ``file`` is its name in messages."""
    return GridReader(parse(content, file), vocabulary or Vocabulary.installed(), None).read()


def grid_of_values(values: Mapping[str, Any]) -> Grid:
    """Read a grid from what its file would say: mappings, lists and plain values.

    Raises:
        GridError: all that is wrong with it, each with its path.
    """
    try:
        # JSON is YAML in which no text can be taken for a number.
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, indent=2)
    except (TypeError, ValueError) as error:
        problem = Problem(
            file="grid",
            line=None,
            column=None,
            path="",
            message=f"cannot be written as a file: {error}",
            hint="a grid is made of dict, list, str, int, float, bool and None",
        )
        raise GridError([problem]) from error
    try:
        return parse_grid(text.encode(), "grid")
    except GridError as error:
        # Lines of a text that nobody has seen would say nothing.
        unplaced = [replace(one, line=None, column=None) for one in error.problems]
        raise GridError(unplaced) from None
