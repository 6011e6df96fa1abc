"""The grid: one YAML file that says what to measure, as the jobs it asks for.

    name: nightly
    defaults: {workload: text-generation, model: tiny-chatglm3}
    experiments:
      - name: precision
        axes: {precision: [fp32, bf16, int4], batch_size: 1..64 *2}

A file is read in three passes, each of which collects all the problems it can find: YAML
(``strict_yaml``), structure (``blocks``), meaning (``reader``). ``docs/grids.md`` documents every
key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.domain.job import Accelerator, Job, Scalar
from orchestrator.errors import Problem
from orchestrator.grid.strict_yaml import Document, Path_


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Grid:
    """A grid file that holds together: every job of it is valid by itself."""

    name: str
    description: str = ""
    results: str = ""  # a directory or the address of an object store; "": none is named
    planned: tuple[Job, ...]  # each once, in the order of the file
    open_engines: frozenset[str] = frozenset()  # experiments that name none: the plan chooses
    notes: tuple[str, ...] = ()  # what a reader should know, such as jobs asked for twice
    commits: Mapping[str, str] = field(default_factory=dict)  # of names of the hub (``Revisions``)
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
