"""The grid: one YAML file that says what to measure, read into jobs.

    name: nightly
    defaults: {workload: text-generation, model: tiny-chatglm3}
    experiments:
      - name: precision
        axes: {precision: [fp32, bf16, int4], batch_size: 1..64 *2}

A file is read in three passes, each of which collects all the problems it can find: YAML
(``grid_yaml``), structure (the pydantic models here), meaning (``grid_reader``). ``docs/grids.md``
documents every key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.domain.job import Accelerator, Job, Scalar
from orchestrator.domain.topology import Node
from orchestrator.errors import GridError, Problem
from orchestrator.grid.fields import Vocabulary
from orchestrator.grid.strict_yaml import Document, Path_, parse, read

if TYPE_CHECKING:
    from orchestrator.planning.plan import Plan

NodesFor = Callable[[Sequence[Accelerator]], Sequence[Node]]


class MeasureBlock(BaseModel):
    """How jobs are timed. What is left out keeps its default."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    warmup: int = Field(
        default=1, ge=0, le=1000, description="Untimed repeats before timing starts."
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


class ExperimentBlock(BaseModel):
    """The keys of an experiment that are not settings; settings stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    name: str = Field(min_length=1, max_length=80, description="Unique in the file.")
    description: str = Field(default="", description="For readers of the report.")
    measure: dict[str, Any] = Field(
        default_factory=dict, description="Overrides the grid's `measure` for this experiment."
    )
    axes: dict[str, Any] = Field(
        default_factory=dict,
        description="Setting: values. The experiment is their product, the last varying fastest. "
        "Values are a list or a range: 1..64 *2, 1..9 +2, 1..8.",
    )
    zip: Any = Field(
        default=None,
        description="Settings that move together: lists of equal length, read row by row. One "
        "group, or a list of groups.",
    )
    include: list[dict[str, Any]] = Field(
        default_factory=list, description="More points, added after `exclude`."
    )
    exclude: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Points to leave out: those that have all the values of an entry.",
    )


class GridFile(BaseModel):
    """The top level of a grid file."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Also the name of its run: letters, digits, '.', '_' and '-', at most 64.",
    )
    description: str = Field(default="", description="For readers of the report.")
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="Settings of every experiment that does not say other."
    )
    measure: dict[str, Any] = Field(default_factory=dict, description="How jobs are timed.")
    experiments: list[dict[str, Any]] = Field(min_length=1, description="What is measured.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Grid:
    """A grid file that holds together: every job of it is valid by itself."""

    name: str
    description: str = ""
    planned: tuple[Job, ...]  # each once, in the order of the file
    notes: tuple[str, ...] = ()  # what a reader should know, such as jobs asked for twice
    document: Document = field(repr=False, compare=False)
    origins: Mapping[tuple[str, str, Scalar], Path_] = field(repr=False, compare=False)

    @classmethod
    def from_file(cls, path: Path | str) -> Grid:
        """Read a grid file; see ``load_grid``."""
        return load_grid(path)

    @classmethod
    def from_text(cls, text: str) -> Grid:
        """Read a grid that is in memory as YAML.

        Raises:
            GridError: all that is wrong with it, each with its line and column in ``text``.
        """
        return parse_grid(text.encode(), "grid")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
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
            return cls.from_text(text)
        except GridError as error:
            # Lines of a text that nobody has seen would say nothing.
            unplaced = [replace(one, line=None, column=None) for one in error.problems]
            raise GridError(unplaced) from None

    def plan(
        self,
        *,
        emulate: str | None = None,
        name: str | None = None,
        results: Path | str | None = None,
        retry_failed: bool = False,
        force: bool = False,
    ) -> Plan:
        """What a run would do with every job, and why; starts nothing, writes nothing.

        Args:
            emulate: emulated nodes, such as ``2x8``; None: one server of eight cards of each kind.
            name: of the run that would go on; None: the grid's.
            results: directory of runs; None: NIGHTGRID_RESULTS, else ``./results``.
            retry_failed: also run what failed earlier.
            force: run everything, measured already or not.

        Raises:
            GridError: these nodes can never give a job its cards.
            ClusterError: the nodes make no sense.
            StoreError: earlier rows cannot be read.
        """
        from orchestrator.results.directory import default_results_dir
        from orchestrator.runtime.run import RunOptions, plan_grid

        options = RunOptions(
            results=Path(results) if results is not None else default_results_dir(),
            name=name,
            emulate=emulate,
            retry_failed=retry_failed,
            force=force,
        )
        return plan_grid(self, options)

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


def load_grid(
    path: Path | str,
    *,
    vocabulary: Vocabulary | None = None,
    check_data: bool = True,
    nodes_for: NodesFor | None = None,
) -> Grid:
    """Read a grid file into jobs.

    Args:
        path: the YAML file.
        vocabulary: the names a grid may use; what is installed, by default.
        check_data: also refuse models and datasets that are not on this machine.
        nodes_for: from the kinds of card the grid names to the nodes it would run on. With it,
            card counts they cannot give are reported along with everything else; without it
            ``make_plan`` reports them.

    Raises:
        GridError: all that is wrong with the file, in file order.
    """
    vocabulary = vocabulary or Vocabulary.installed(check_data=check_data)
    return _grid(read(path), vocabulary, nodes_for)


def parse_grid(content: bytes, file: str, *, vocabulary: Vocabulary | None = None) -> Grid:
    """Like ``load_grid`` for a grid that is in memory; ``file`` is its name in messages."""
    return _grid(parse(content, file), vocabulary or Vocabulary.installed(), None)


def _grid(document: Document, vocabulary: Vocabulary, nodes_for: NodesFor | None) -> Grid:
    from orchestrator.grid.reader import GridReader

    return GridReader(document, vocabulary, nodes_for).read()
