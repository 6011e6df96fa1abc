"""Nightgrid from Python: ``from orchestrator import Grid, load, run``.

    grid = Grid.from_file("grids/smoke.yaml")
    grid.plan(emulate="2x8")             # what `nightgrid plan` prints
    night = run(grid, emulate="2x8")     # what `nightgrid run` does
    night.to_pandas()                    # one line a job
    night.compare(load("last-week"))     # what `nightgrid compare last-week smoke` says

These are the objects that the commands use, with the same names of fields. Importing this loads
neither torch nor Ray; running loads Ray, and torch only in the processes of the workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.core.plan import Plan
from orchestrator.grid.parser import Grid as GridValue
from orchestrator.grid.parser import grid_of_values, load_grid, parse_grid
from orchestrator.run_rows import Run
from orchestrator.watch.plan_text import plan_html

Shown = TypeVar("Shown", "Grid", "ShownPlan")


def _as(kind: type[Shown], value: GridValue | Plan) -> Shown:
    """The same record as one of a class that adds methods to its own."""
    return kind(**{each.name: getattr(value, each.name) for each in fields(value)})


class ShownPlan(Plan):
    """A plan that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The output of `nightgrid plan`."""
        return plan_html(self)


class Grid(GridValue):
    """A grid with the ways of reading one, and its plan."""

    __slots__ = ()

    @classmethod
    def from_file(cls, path: Path | str) -> Grid:
        """Read a grid file; see ``load_grid``."""
        return _as(cls, load_grid(path))

    @classmethod
    def from_text(cls, text: str) -> Grid:
        """Read a grid that is in memory as YAML.

        Raises:
            GridError: all that is wrong with it, each with its line and column in ``text``.
        """
        return _as(cls, parse_grid(text.encode(), "grid"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
        """Read a grid from what its file would say: mappings, lists and plain values.

        Raises:
            GridError: all that is wrong with it, each with its path.
        """
        return _as(cls, grid_of_values(values))

    def plan(
        self,
        *,
        emulate: str | None = None,
        name: str | None = None,
        results: Path | str | None = None,
        retry_failed: bool = False,
        force: bool = False,
    ) -> ShownPlan:
        """Plan the run: say what it would do with every job, and why. Starts nothing, writes
        nothing.

        Args:
            emulate: emulated nodes, such as ``2x8``; None: one server of eight cards of each kind.
            name: of the run that would go on; None: the grid's.
            overrides: ``PATH=VALUE`` each, set in the grid's file as ``--set`` does.
            results: directory of runs; None: the grid's, else NIGHTGRID_RESULTS, else
                ``./results``.
            retry_failed: also run what failed earlier.
            force: run everything, measured already or not.

        Raises:
            GridError: these nodes can never give a job its cards.
            ClusterError: the nodes make no sense.
            StoreError: earlier rows cannot be read.
        """
        from orchestrator.driver.options import RunOptions
        from orchestrator.driver.plan import plan_grid
        from orchestrator.store.files import default_results_dir

        options = RunOptions(
            results=Path(results) if results is not None else default_results_dir(),
            results_named=results is not None,
            name=name,
            emulate=emulate,
            retry_failed=retry_failed,
            force=force,
        )
        return _as(ShownPlan, plan_grid(self, options)[0])


def run(
    grid: Grid | str | os.PathLike[str],
    *,
    emulate: str | None = None,
    address: str | None = None,
    in_process: bool = False,
    name: str | None = None,
    overrides: Sequence[str] = (),
    results: str | os.PathLike[str] | None = None,
    results_address: str = "",
    log_to: Sequence[str] = (),
    card_memory_bytes: int | None = None,
    retry_failed: bool = False,
    force: bool = False,
    resume: bool = False,
    ends_at: float | datetime | None = None,
    budget: bool = False,
    remote_code: Sequence[str] = (),
    key_file: Path | str | None = None,
    passports: bool = True,
    priority: int = 0,
    quiet: bool = False,
) -> Run:
    """Measure what a grid asks for and has not been measured yet, as `nightgrid run` does.

    Blocks until the run is over. In a notebook the first interrupt lets running jobs end and
    starts no more, the second stops them too; either way what was measured is kept.

    Args:
        grid: a grid, or the path of its file.
        emulate: emulated cards of this machine, such as ``2x8``; None: a Ray cluster, or this
            machine's own cards.
        address: that cluster, ``HOST:6379``; None: what RAY_ADDRESS says, else there is none.
        in_process: one job at a time in this very process, without Ray.
        name: of the run, which resumes one of that name; None: the grid's.
        overrides: ``PATH=VALUE`` each, set in the grid's file as ``--set`` does.
        results: directory of runs; None: the grid's, else NIGHTGRID_RESULTS, else ``./results``.
        results_address: a bucket to which a copy goes, ``s3://BUCKET/PREFIX``.
        log_to: trackers that get every row, ``mlflow`` or ``mlflow=DESTINATION``.
        card_memory_bytes: memory of an emulated card; None: its share of this machine's.
        retry_failed: also run what failed earlier.
        force: run everything, measured already or not.
        resume: take the run over from a driver that may only seem dead.
        ends_at: when the report must be there; a number is seconds since the epoch.
        budget: ``ends_at`` is so long from now: if the clock is set meanwhile, it does not move.
        remote_code: models of the grid that may run the Python code that comes with them.
        key_file: of the key to models written by ``nightgrid protect``, on every node.
        passports: measure each card's speed before its first job.
        priority: among the runs that wait for cards of one cluster; higher goes first.
        quiet: print nothing.

    Returns:
        The run; that a job failed is no exception but ``run.ok`` and the job's row.

    Raises:
        GridError: the grid is refused; ``problems`` lists all that is wrong.
        ClusterError: there are no usable cards.
        StoreError: results cannot be read or written, or another driver holds the run.
        KeyboardInterrupt: a third interrupt ended it at once.
    """
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.run import run_grid
    from orchestrator.store.files import default_address, default_results_dir

    options = RunOptions(
        results=Path(results) if results is not None else default_results_dir(),
        results_address=results_address or default_address(),
        results_named=results is not None or bool(results_address),
        log_to=tuple(log_to),
        name=name,
        overrides=tuple(overrides),
        emulate=emulate,
        address=address,
        in_process=in_process,
        card_memory_bytes=card_memory_bytes,
        retry_failed=retry_failed,
        force=force,
        resume=resume,
        ends_at=ends_at.timestamp() if isinstance(ends_at, datetime) else ends_at,
        budget=budget,
        remote_code=tuple(remote_code),
        key_file=Path(key_file).absolute() if key_file is not None else None,
        passports=passports,
        priority=priority,
        quiet=quiet,
    )
    outcome = run_grid(grid, options, (lambda _: None) if quiet else print)
    if not outcome.result.finished:
        raise KeyboardInterrupt(f"{outcome.result.reason}; run it again to go on from here")
    return Run(outcome.store, plan=outcome.plan)
