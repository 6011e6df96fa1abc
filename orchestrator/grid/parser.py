"""The grid: one YAML file that says what to measure, as the jobs it asks for.

Three passes each collect all problems: YAML (``yaml``), structure and single values
(``vocabulary``), meaning (here). An experiment with problems is not expanded, which would only
report their consequences. ``docs/grids.md`` documents every key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from orchestrator.core.errors import GridError, Problem
from orchestrator.core.job import Accelerator, Job, Scalar
from orchestrator.core.topology import Node
from orchestrator.grid.dependencies import problems_of_needs
from orchestrator.grid.diagnostics import Findings, card_problems, refusal_problems, summed_up
from orchestrator.grid.experiment import MAX_JOBS, STRUCTURE, Expander, Experiment, ExperimentReader
from orchestrator.grid.objectives import ObjectivesReader, Question, SearchSettings
from orchestrator.grid.vocabulary import (
    FIELD_NAMES,
    ExperimentBlock,
    GridFile,
    MeasureBlock,
    PricesBlock,
    Vocabulary,
    shown,
)
from orchestrator.grid.yaml import Document, Path_, compose, parse, read, resolve
from workloads.base import MeasureSettings
from workloads.engines import ENGINES
from workloads.settings import declarations


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Grid:
    """A valid grid file with its jobs."""

    name: str
    description: str = ""
    results: str = ""  # a directory or the address of an object store; "": none is named
    planned: tuple[Job, ...]  # each once, in the order of the file
    open_engines: frozenset[str] = frozenset()  # experiments that name none: the plan chooses
    notes: tuple[str, ...] = ()  # for the reader, such as duplicate jobs
    commits: Mapping[str, str] = field(default_factory=dict)  # of names of the hub (``Revisions``)
    search: SearchSettings | None = None
    questions: tuple[Question, ...] = ()
    document: Document = field(repr=False, compare=False)
    origins: Mapping[tuple[str, str, Scalar], Path_] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        kinds = ", ".join(map(str, self.accelerators()))
        return f"<Grid {self.name!r}: {len(self.planned):,} jobs on {kinds}>"

    @property
    def file(self) -> str:
        """The grid file's name as it was given."""
        return self.document.file

    @property
    def text(self) -> str:
        """The file as it was read, for the copy that a run keeps."""
        return self.document.text

    def jobs(self) -> tuple[Job, ...]:
        """Every job, once, in the order of the file."""
        return self.planned

    def accelerators(self) -> tuple[Accelerator, ...]:
        """The kinds of card the grid asks for, in order of first use."""
        return tuple(dict.fromkeys(job.accelerator for job in self.planned))

    def problem(self, job: Job, name: str, value: Scalar, message: str, hint: str = "") -> Problem:
        """A Problem where the file gives ``job`` its ``value`` of the setting ``name``."""
        path = self.origins.get((job.experiment, name, value))
        if path is None:  # a built-in default: point at the experiment
            path = self.origins[job.experiment, "name", job.experiment]
        return self.document.problem(path, message, hint)


#: From the kinds of card that a grid names to the nodes it would run on.
NodesFor = Callable[[Sequence[Accelerator]], Sequence[Node]]


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


class GridReader:
    """One reading of one document."""

    def __init__(
        self, document: Document, vocabulary: Vocabulary, nodes_for: NodesFor | None = None
    ) -> None:
        self.document = document
        self.vocabulary = replace(
            vocabulary,
            saved_models=cache(partial(saved_names, document.data, vocabulary)),
            directory=Path(document.file).parent,
            checked={},
        )
        self.nodes_for = nodes_for
        self.findings = Findings(document, self.vocabulary)

    def read(self) -> Grid:
        """Return the grid; raises GridError with all problems."""
        data = self.findings.without_removed(self.document.data)
        top = self.findings.structure(GridFile, data, ())
        measure = self._measure(top.get("measure", {}), ("measure",), MeasureSettings())
        self.findings.structure(PricesBlock, top.get("prices", {}), ("prices",))
        experiments = self._experiments(top, measure)
        if not self._check_size(experiments):
            experiments = []
        expander = Expander(self.findings)
        planned = expander.expand(experiments)
        revisions = self.vocabulary.revisions
        engines = frozenset(e.name for e in experiments if not e.engine_named)
        objectives = ObjectivesReader(self.findings, planned, ENGINES if engines else ())
        questions = [one for one in top.get("questions", ()) if one is not None]
        search = top.get("search")
        grid = Grid(
            name=top.get("name", ""),
            description=top.get("description", ""),
            results=top.get("results", ""),
            planned=planned,
            open_engines=engines,
            notes=(
                *summed_up(self.findings.old_names),
                *summed_up(expander.notes()),
                *summed_up(revisions.notes if revisions else ()),
            ),
            commits=dict(revisions.commits) if revisions else {},
            search=objectives.search(search, questions=bool(questions))
            if search is not None
            else None,
            questions=objectives.questions(questions),
            document=self.document,
            origins={
                (experiment.name, *origin): path
                for experiment in experiments
                for origin, path in experiment.origins.items()
            },
        )
        self.findings.add(refusal_problems(grid, self.vocabulary.workloads))
        self.findings.add(problems_of_needs(grid, self.vocabulary.missing))
        if self.nodes_for is not None:
            self.findings.add(card_problems(grid, self.nodes_for(grid.accelerators())))
        if self.findings.problems:
            raise GridError(self.findings.in_file_order())
        return grid

    def _measure(self, raw: Any, path: Path_, inherited: MeasureSettings) -> MeasureSettings:
        if raw == {}:  # the usual case; its model need not be built
            return inherited
        good = self.findings.structure(MeasureBlock, raw, path)
        settings = replace(inherited, **good)
        if settings.min_repeats > settings.max_repeats:
            blamed = "min_repeats" if "min_repeats" in good else "max_repeats"
            other = "max_repeats" if blamed == "min_repeats" else "min_repeats"
            self.findings.complain(
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
            before = self.findings.count
            block = self.findings.structure(ExperimentBlock, raw, path)
            blocks.append((path, block, self.findings.count == before))
        defaults = top.get("defaults", {})
        self._check_defaults(defaults, [block for _, block, _ in blocks])
        names: dict[str, int] = {}
        experiments = []
        for path, block, whole in blocks:
            before = self.findings.count
            own = self._measure(block.get("measure", {}), (*path, "measure"), measure)
            name = block.get("name")
            if name is not None and names.setdefault(name, int(path[1])) != path[1]:
                line, _ = self.document.position(("experiments", names[name], "name"))
                hint = f"names are unique; the first is on line {line}"
                self.findings.complain(
                    (*path, "name"), f"a second experiment named {shown(name)}", hint
                )
            experiment = ExperimentReader(self.findings, path, block, defaults, whole).read(own)
            if whole and self.findings.count == before:
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
                    self.findings.complain(
                        ("defaults", name), f"`{name}:` stands {where}", key=True
                    )
                    continue
                self.findings.unknown_key(("defaults", name), [*FIELD_NAMES, *sorted(known)])

    def _check_size(self, experiments: list[Experiment]) -> bool:
        total = 0
        for experiment in experiments:
            total += (size := experiment.size)
            if total > MAX_JOBS:
                together = "" if total == size else f", {total:,} with the experiments before it"
                message = f"experiment {shown(experiment.name)} has {size:,} jobs{together}"
                path = (*experiment.path, "axes")
                self.findings.complain(path, message, f"the limit is {MAX_JOBS:,}; shorten an axis")
                return False
        return True


def load_grid(
    path: Path | str,
    *,
    vocabulary: Vocabulary | None = None,
    check_data: bool = True,
    nodes_for: NodesFor | None = None,
    overrides: Sequence[str] = (),
    commits: Mapping[str, str] | None = None,
    elsewhere: bool = False,
) -> Grid:
    """Read a grid file into jobs; raises GridError with all problems, in file order.

    ``check_data`` also refuses models and datasets that are not on this machine, ``nodes_for``
    (nodes by the kinds of card) impossible card counts. ``overrides`` are ``PATH=VALUE`` each,
    ``commits`` those of a resumed run (``Revisions``). ``elsewhere``: absolute paths may be those
    of a cluster, whose nodes look at them.
    """
    vocabulary = vocabulary or Vocabulary.installed(check_data=check_data, commits=commits)
    vocabulary = replace(vocabulary, elsewhere=elsewhere)
    return GridReader(overridden(read(path), overrides), vocabulary, nodes_for).read()


def parse_grid(content: bytes, file: str, *, vocabulary: Vocabulary | None = None) -> Grid:
    """Like ``load_grid`` for a grid that is in memory; ``file`` is its name in messages."""
    return GridReader(parse(content, file), vocabulary or Vocabulary.installed(), None).read()


def grid_of_values(values: Mapping[str, Any]) -> Grid:
    """Read a grid from mappings, lists and plain values; raises GridError with all problems, each
    with its path."""
    try:
        # JSON is YAML in which no text can be taken for a number.
        text = json.dumps(values, ensure_ascii=False, allow_nan=False, indent=2)
    except (TypeError, ValueError) as error:
        message = f"cannot be written as a file: {error}"
        hint = "a grid is made of dict, list, str, int, float, bool and None"
        raise GridError([Problem(file="grid", message=message, hint=hint)]) from error
    try:
        return parse_grid(text.encode(), "grid")
    except GridError as error:
        # Lines of a text that nobody has seen would say nothing.
        unplaced = [replace(one, line=None, column=None) for one in error.problems]
        raise GridError(unplaced) from None


# ---------------------------------------------------------------- --set axes.batch_size=1..8

#: Keys of an experiment under which settings stand.
GROUPS = ("axes", "measure")


def overridden(document: Document, texts: Sequence[str]) -> Document:
    """Set each ``PATH=VALUE`` in order: ``KEY``, ``axes.KEY`` or ``measure.KEY`` of every
    experiment, or with ``NAME.`` in front of the one of that name. The text becomes JSON: a run
    stores the grid that it measured.

    Raises GridError for an unknown path or an invalid value, where the file has it or would.
    """
    if not texts:
        return document
    data = deepcopy(document.data)
    for text in texts:
        experiments, keys, value = _meant(document, data, text)
        for here in experiments:
            for group in keys[:-1]:
                if not isinstance(here.get(group), dict):
                    here[group] = {}
                here = here[group]
            here[keys[-1]] = deepcopy(value)
    options = " ".join(f"--set {text}" for text in texts)
    written = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    return replace(document, file=f"{document.file} (with {options})", text=written, data=data)


def _meant(
    document: Document, data: dict[str, Any], text: str
) -> tuple[list[dict[str, Any]], list[str], Any]:
    """The experiments that are meant, the keys within each, and the value."""
    path, equals, written = text.partition("=")
    keys = path.strip().split(".")
    experiments = data.get("experiments")
    listed = experiments if isinstance(experiments, list) else ()
    named = {str(entry.get("name")): entry for entry in listed if isinstance(entry, dict)}
    chosen = list(named.values())
    for name in sorted(named, key=len, reverse=True):  # a name may have dots
        if path.startswith(f"{name}.") and keys[0] not in GROUPS:
            chosen, keys = [named[name]], path.strip().removeprefix(f"{name}.").split(".")
            break
    grouped = len(keys) == 2 and keys[0] in GROUPS
    if not equals or not all(keys) or not (grouped or (len(keys) == 1 and keys[0] not in GROUPS)):
        raise _refused(
            document,
            text,
            "leads to nothing in a grid" if equals else "has no value",
            "write KEY=VALUE, axes.KEY=VALUE, measure.KEY=VALUE, or NAME. before it for one "
            f"experiment; here: {', '.join(named) or 'none'}",
        )
    written = written.strip()
    if written.startswith("["):
        node, problems = compose(written, document.file)
        if node is None or node.items is None or problems:
            raise _refused(document, text, "is no list", "write axes.precision=[bf16, fp32]")
        return chosen, keys, node.plain()
    try:
        value = resolve(written) if written else ""
    except ValueError as error:
        raise _refused(document, text, f"is no value: {error}", "") from None
    _, problems = compose(json.dumps(value, ensure_ascii=False), document.file)
    if problems:  # such as control characters, which the stored grid could not have
        raise _refused(document, text, f"is no value: {problems[0].message}", problems[0].hint)
    return chosen, keys, value


def _refused(document: Document, text: str, message: str, hint: str) -> GridError:
    path = f"--set {text}"
    return GridError([Problem(file=document.file, path=path, message=message, hint=hint)])
