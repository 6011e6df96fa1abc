"""Replay of the search on measured cells: ``python -m benchmarks.search_replay FILE --json OUT``.

``FILE`` may also be the directory of a run that measured all cells of a grid, such as that of
``benchmarks/cpu_night.yaml``; then see ``replay_run``.

``FILE`` is a table of served models: a column each for model, system, precision, engine, image,
lengths, layout, cards and concurrency, and ``ttft_s``, ``tpot_s`` (medians). A group is a model on
a system in a precision with an engine; its cells differ in all else. Of a cell that was measured
more than once the newest counts. Groups of at least 20 cells are replayed, or all if none is so
large. Nothing is shared between groups.

The question: the most tokens/s per card at no fewer than s tokens/s per user, where s is such that
half, and a quarter, of the group's cells are fast enough. A search is told the figures of the cells
that it chooses; the first is drawn. ``median_share`` and ``p90_share`` are shares of the group's
cells until the best measured is within 2 % of the best of all. ``error_at_25`` and ``coverage_95``:
with a quarter of a group measured, chosen before anything is known, the mean absolute error of the
predicted time per token, and the share of the other cells within the 95 % interval; pooled over
cells. The quarter is the one that leaves the surrogate the least uncertain (``telling``);
``drawn_`` is a quarter at random, ``searched_`` the one that a search for the question measures,
which lies around the best. Random order and a plain Gaussian process (constant mean, one length of
correlation, by marginal likelihood) stand beside, and the decision's time in a space of 10,000
cells.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import isfinite, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.analysis.metrics import named_figures
from orchestrator.analysis.selection import newest_final
from orchestrator.core.job import Job, Scalar, State
from orchestrator.grid.objectives import Constraint, SearchSettings
from orchestrator.search.order import SearchOrder, space_of
from orchestrator.search.predictions import Known, predict
from orchestrator.search.roofline import Roofline
from orchestrator.search.search import Limit, Metric, Search, expected_improvement
from orchestrator.search.space import Floats, Role, Space
from orchestrator.search.surrogate import Z_95, Belief, Kernel
from orchestrator.store.store import Store

GROUP = ("model", "system", "precision", "engine")
SETTINGS = {
    "concurrency": Role.LOAD,
    "input_tokens": Role.INPUT,
    "output_tokens": Role.OUTPUT,
    "cards": Role.CARDS,
    "tensor_parallel": Role.SIZE,
    "data_parallel": Role.SIZE,
    "moe_tensor_parallel": Role.SIZE,
    "expert_parallel": Role.SIZE,
}
NEEDED = ("concurrency", "input_tokens", "output_tokens", "cards", "ttft_s", "tpot_s")
LEAST_CELLS = 20
FAST_ENOUGH = (0.5, 0.25)  # shares of cells that keep the limit of a question
STARTS = 4
WITHIN = 0.02
QUARTER = 0.25
#: Factor on the kernel's amplitudes by which a telling quarter is chosen: the middle one of those
#: that a surrogate weighs (0.6 to 5).
AMPLITUDE = 2.0
#: A belief about log values of all cells from those of some: (space, rows, logs) -> belief.
Model = Callable[[Space, list[int], Floats], Belief]
#: A choice of cells before any is measured: (space, count, seed) -> rows.
Cells = Callable[[Space, int, int], list[int]]


class Quality(NamedTuple):
    """Errors of predictions and the coverage of their intervals."""

    error: float
    median: float
    of_groups: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Group:
    """Cells of one model, system, precision and engine; figures have shape (cells,)."""

    name: str
    space: Space
    per_user: Floats  # tokens/s per user, the inverse of the time per token
    per_card: Floats  # tokens/s per card

    def limits(self) -> list[float]:
        """Tokens/s per user that half, and a quarter, of the cells reach."""
        return [float(np.quantile(self.per_user, 1 - share)) for share in FAST_ENOUGH]

    def answers(self, limit: float) -> set[int]:
        """Rows within 2 % of the best that keeps the limit."""
        fast = self.per_user >= limit
        enough = (1 - WITHIN) * self.per_card[fast].max()
        return set(np.flatnonzero(fast & (self.per_card >= enough)).tolist())


def read_groups(file: Path) -> list[Group]:
    """The groups of a table; rows without a number above 0 where one is needed are left out."""
    newest: dict[str, dict[tuple[float, ...], Mapping[str, str]]] = defaultdict(dict)
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if all(_number(row, name) for name in NEEDED):
                cells = newest[" ".join(row.get(name) or "-" for name in GROUP)]
                settings = tuple(_number(row, name) or 1.0 for name in SETTINGS)
                before = cells.get(settings, {}).get("measured_on") or ""
                if (row.get("measured_on") or "") >= before:
                    cells[settings] = row
    groups = [_group(name, list(cells.values())) for name, cells in sorted(newest.items())]
    large = [group for group in groups if group.space.size >= LEAST_CELLS]
    return large or [group for group in groups if group.space.size > 1]


def _group(name: str, rows: list[Mapping[str, str]]) -> Group:
    rows.sort(key=lambda row: [_number(row, name) or 1.0 for name in SETTINGS])
    # Some images end with the cell's own concurrency, which says nothing about the software.
    images = [re.sub(r"=\d+$", "", row.get("image") or "") for row in rows]
    cells: list[dict[str, Scalar]] = [
        {**{name: _number(row, name) or 1.0 for name in SETTINGS}, "image": image}
        for row, image in zip(rows, images, strict=True)
    ]
    load, tokens, cards, first, each = (
        np.array([_number(row, name) for row in rows], dtype=float)
        for name in ("concurrency", "output_tokens", "cards", "ttft_s", "tpot_s")
    )
    return Group(
        name=name,
        space=Space(cells, {**SETTINGS, "image": Role.CATEGORY}),
        per_user=1.0 / each,
        per_card=load * tokens / (first + (tokens - 1.0) * each) / cards,
    )


def _number(row: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(row.get(name) or "")
    except ValueError:
        return None
    return value if isfinite(value) and value > 0 else None


# ---------------------------------------------------------------- orders of a group's cells


def searched(group: Group, limit: float, seed: int) -> list[int]:
    """Rows in the order of the product's search, until its answer is good."""
    answers, order = group.answers(limit), list[int]()
    for row in proposed(group, limit, seed):
        order.append(row)
        if row in answers:
            break
    return order


def proposed(group: Group, limit: float, seed: int) -> Iterator[int]:
    """All rows in the order of the product's search."""
    per_user = Metric("per_user", Roofline(group.space), more_is_better=False)
    per_card = Metric("per_card", Roofline(group.space, rate=True, per_card=True))
    search = Search(group.space, per_card, [Limit(per_user, 1.0 / limit, at_most=True)], seed=seed)
    while rows := search.propose():
        (row,) = rows
        search.measured(
            row, {"per_card": group.per_card[row], "per_user": 1.0 / group.per_user[row]}
        )
        yield row


def plainly(group: Group, limit: float, seed: int) -> list[int]:
    """The order of constrained expected improvement with a plain Gaussian process."""
    space, answers = group.space, group.answers(limit)
    order = telling(space, 3, seed)
    for at, row in enumerate(order):
        if row in answers:
            return order[: at + 1]
    while order[-1] not in answers:
        rate = plain_gp(space, order, np.log(group.per_card[order]))
        user = plain_gp(space, order, np.log(group.per_user[order]))
        fast = [row for row in order if group.per_user[row] >= limit]
        best = max((log(group.per_card[row]) for row in fast), default=None)
        user_metric = Metric("per_user", Roofline(space))
        scores = expected_improvement(rate, best)
        scores = scores * Limit(user_metric, limit, at_most=False).probability(user)
        scores[order] = -1.0
        order.append(int(scores.argmax()))
    return order


def drawn(group: Group, limit: float, seed: int) -> list[int]:
    """Rows in random order."""
    answers = group.answers(limit)
    order = drawn_cells(group.space, group.space.size, seed)
    return order[: next(at for at, row in enumerate(order) if row in answers) + 1]


def plain_gp(space: Space, rows: list[int], logs: Floats) -> Belief:
    """A zero-mean Gaussian process on standardised logs: one length, noise, by likelihood."""
    every = np.arange(space.size)
    squared = sum(
        space.squared_distances(kind, every, rows) for kind in ("load", "length", "layout")
    )
    squared = squared + space.mismatches(every, rows)
    middle, spread = float(logs.mean()), float(logs.std()) or 1.0
    targets = (logs - middle) / spread
    best: tuple[float, Belief] | None = None
    for length, noise in product((1.0, 2.0, 4.0, 8.0), (0.02, 0.1, 0.3)):
        across = np.exp(-0.5 * squared / length**2)
        total = across[rows] + noise**2 * np.eye(len(rows))
        inverse = np.linalg.inv(total)
        likelihood = -targets @ inverse @ targets - np.linalg.slogdet(total)[1]
        if best is None or likelihood > best[0]:
            variance = 1.0 + noise**2 - np.einsum("ij,ij->i", across @ inverse, across)
            mean = middle + spread * (across @ inverse @ targets)
            best = likelihood, Belief(mean, spread * np.sqrt(np.maximum(variance, 1e-9)))
    assert best is not None
    return best[1]


def telling(space: Space, count: int, seed: int) -> list[int]:
    """Rows that leave the product's surrogate the least variance over all cells before any is
    measured, after one that is drawn: each takes away the most."""
    every, mean, kernel = np.arange(space.size), Roofline(space), Kernel()
    slopes = mean.linear(mean.start, every)[1] * mean.spread
    left = AMPLITUDE**2 * kernel.between(space, every, every) + slopes @ slopes.T
    noise = (AMPLITUDE * kernel.noise) ** 2
    rows = [int(np.random.default_rng(seed).integers(space.size))]
    while True:
        shared = left[:, rows[-1]].copy()
        left -= np.outer(shared, shared) / (shared[rows[-1]] + noise)
        if len(rows) >= min(count, space.size):
            return rows
        gain = np.square(left).sum(axis=0) / (left.diagonal() + noise)
        gain[rows] = -1.0
        rows.append(int(gain.argmax()))


def product_gp(space: Space, rows: list[int], logs: Floats) -> Belief:
    """The product's prediction of the time per token."""
    search = Search(space, Metric("per_user", Roofline(space), more_is_better=False))
    for row, value in zip(rows, np.exp(logs), strict=True):
        search.measured(row, {"per_user": float(value)})
    return search.predictions(search.objective, np.arange(space.size))


# ---------------------------------------------------------------- figures


def shares(groups: Iterable[Group], order: Callable[[Group, float, int], list[int]]) -> list[float]:
    """Shares of cells until the answer is good, for all limits and starts."""
    return [
        len(order(group, limit, seed)) / group.space.size
        for group in groups
        for limit in group.limits()
        for seed in range(STARTS)
    ]


def drawn_cells(space: Space, count: int, seed: int) -> list[int]:
    """Rows at random."""
    return [int(row) for row in np.random.default_rng(seed).permutation(space.size)[:count]]


def predicted(groups: Iterable[Group], model: Model, share: float, cells: Cells) -> Quality:
    """Error and coverage for the other cells, with this share measured."""
    return quality_of(
        (group, model, cells(group.space, count_of(group.space.size, share), seed))
        for group in groups
        for seed in range(STARTS)
    )


def count_of(cells: int, share: float) -> int:
    """Count this share of cells, at least two."""
    return max(2, round(share * cells))


def quality_of(cases: Iterable[tuple[Group, Model, list[int]]]) -> Quality:
    """Mean and median error of the time per token of all cells but those rows, the mean of the
    groups' means, and the share within the 95 % interval."""
    errors: list[Floats] = []
    inside: list[NDArray[np.bool_]] = []
    for group, model, rows in cases:
        logs = -np.log(group.per_user)
        belief = model(group.space, rows, logs[rows])
        others = np.setdiff1d(np.arange(group.space.size), rows)
        off = (belief.mean - logs)[others]
        errors.append(np.abs(np.expm1(off)))
        inside.append(np.abs(off) <= Z_95 * belief.deviation[others])
    pooled = np.concatenate(errors)
    return Quality(
        error=float(pooled.mean()),
        median=float(np.median(pooled)),
        of_groups=float(np.mean([one.mean() for one in errors])),
        coverage=float(np.concatenate(inside).mean()),
    )


def decision_s(cells: int = 10_000, measured: int = 200) -> dict[str, float]:
    """Median and longest seconds of a decision, from the first to the last measurement."""
    sizes = [[1, 2, 4, 8], [1024, 8192], [128, 256, 512, 1024, 2048], list(range(1, 251))]
    names = ("cards", "input_tokens", "output_tokens", "concurrency")
    grid = [dict(zip(names, cell, strict=True)) for cell in product(*sizes)][:cells]
    space = Space(grid, {name: SETTINGS[name] for name in names})
    rate = Roofline(space, rate=True, per_card=True)
    user = Metric("per_user", Roofline(space), more_is_better=False)
    search = Search(space, Metric("per_card", rate), [Limit(user, 0.02, at_most=True)])
    every = np.arange(space.size)
    values = np.exp(rate.linear(rate.start + 0.2, every)[0])
    seconds = np.exp(Roofline(space).linear(rate.start + 0.2, every)[0])
    took = []
    began_cpu = time.process_time()
    for _ in range(measured):
        began = time.perf_counter()
        (row,) = search.propose()
        took.append(time.perf_counter() - began)
        search.measured(row, {"per_card": float(values[row]), "per_user": float(seconds[row])})
    return {
        "median": float(np.median(took)),
        "p95": float(np.quantile(took, 0.95)),
        "mean_cpu": (time.process_time() - began_cpu) / measured,
    }


def replay(file: Path) -> dict[str, Any]:
    """All figures of a table."""
    groups = read_groups(file)
    figures: dict[str, Any] = {
        "groups": len(groups),
        "cells": sum(group.space.size for group in groups),
        "questions": len(groups) * len(FAST_ENOUGH),
        "starts": STARTS,
    }
    for name, order in (("", searched), ("plain_", plainly), ("random_", drawn)):
        of_questions = shares(groups, order)
        figures[f"{name}median_share"] = float(np.median(of_questions))
        figures[f"{name}p90_share"] = float(np.quantile(of_questions, 0.9))
    for name, model, cells in (
        ("", product_gp, telling),
        ("drawn_", product_gp, drawn_cells),
        ("plain_", plain_gp, telling),
        ("plain_drawn_", plain_gp, drawn_cells),
    ):
        for percent in (15, 25, 50):
            quality = predicted(groups, model, percent / 100, cells)
            figures[f"{name}error_at_{percent}"] = quality.error
            figures[f"{name}coverage_at_{percent}"] = quality.coverage
            if percent == round(QUARTER * 100):
                figures[f"{name}coverage_95"] = quality.coverage
                figures[f"{name}error_at_25_median"] = quality.median
                figures[f"{name}error_at_25_of_groups"] = quality.of_groups
    quality = quality_of(
        (group, product_gp, list(islice(proposed(group, limit, seed), count)))
        for group in groups
        for count in (count_of(group.space.size, QUARTER),)
        for limit in group.limits()
        for seed in range(STARTS)
    )
    figures["searched_error_at_25"] = quality.error
    figures["searched_coverage_95"] = quality.coverage
    figures["decision_s"] = decision_s()
    return figures


# ---------------------------------------------------------------- a run of this machine


#: Shares of the fastest cell's latency that the questions of a run allow; the last has no limit.
LATENCY_LIMITS = (2.0, 5.0, None)


def replay_run(run: Path) -> dict[str, Any]:
    """The search against the exhaustive table of a run: most throughput, under limits on latency.

    Shares of cells and of the time of all attempts until the search ends by itself (``within: 2
    %``) and until its best is within 2 % of the best of all; by how much its answer falls short;
    error and coverage of predicted throughput with a quarter measured, that which tells most and
    that which a search measures first.
    """
    every = newest_final(Store.existing(run.parent, run.name).measurements(samples=False))
    rows = [row for row in every if row.state is State.SUCCEEDED and row.metrics.throughput]
    figures = {row.job_id: named_figures(row) for row in rows}
    lasted = {row.job_id: (row.ended_at or 0.0) - (row.started_at or 0.0) for row in rows}
    jobs = [row.job for row in rows]
    night = _Night(jobs, figures, lasted)
    starts = list(product(LATENCY_LIMITS, range(STARTS)))
    searches = [night.search(*start) for start in starts]
    quarters = [night.telling(seed) for seed in range(STARTS)]
    searched = [night.searched(*start) for start in starts]
    return {
        "cells": len(rows),
        "hours": sum(lasted.values()) / 3600,
        "searches": len(searches),
        **{
            f"{name}_{word}": float(np.quantile([one[name] for one in searches], at))
            for name in searches[0]
            for word, at in (("median", 0.5), ("p90", 0.9))
        },
        **{
            name: float(np.mean([one[name] for one in quality]))
            for quality in (quarters, searched)
            for name in quality[0]
        },
    }


@dataclass(frozen=True, slots=True)
class _Night:
    """An exhaustive night: figures and seconds by job id."""

    jobs: list[Job]
    figures: Mapping[str, Mapping[str, float]]
    lasted: Mapping[str, float]

    def search(self, limit: float | None, seed: int) -> dict[str, float]:
        """One search for the most throughput whose latency is at most so many times the least."""
        order = self._order(limit, seed, WITHIN)
        fast = self._fast(limit)
        best = max(self.figures[name]["throughput"] for name in fast)
        measured: list[str] = []
        good: list[str] = []
        for name in self._measured(order):
            measured.append(name)
            enough = name in fast and self.figures[name]["throughput"] >= (1 - WITHIN) * best
            if enough and not good:
                good = list(measured)
        answer = order.answer()
        total = sum(self.lasted.values())
        return {
            "share": len(measured) / len(self.jobs),
            "time_share": sum(self.lasted[name] for name in measured) / total,
            "share_until_good": len(good or self.jobs) / len(self.jobs),
            "time_share_until_good": sum(self.lasted[n] for n in good or self.lasted) / total,
            "short_of_best": 1.0 - (answer.value if answer else 0.0) / best,
        }

    def telling(self, seed: int) -> dict[str, float]:
        """Predictions from the quarter that is chosen before anything is known."""
        rows = telling(space_of(self.jobs), self._quarter, seed)
        return self._predicted({self.jobs[row].job_id for row in rows})

    def searched(self, limit: float | None, seed: int) -> dict[str, float]:
        """Predictions from the quarter that a search measures first."""
        names = islice(self._measured(self._order(limit, seed, None)), self._quarter)
        return {f"searched_{name}": v for name, v in self._predicted(set(names)).items()}

    @property
    def _quarter(self) -> int:
        return count_of(len(self.jobs), QUARTER)

    def _bound(self, limit: float) -> float:
        return limit * min(known["latency_p50_s"] for known in self.figures.values())

    def _fast(self, limit: float | None) -> list[str]:
        return [
            name
            for name, known in self.figures.items()
            if limit is None or known["latency_p50_s"] <= self._bound(limit)
        ]

    def _order(self, limit: float | None, seed: int, within: float | None) -> SearchOrder:
        bound = () if limit is None else (self._bound(limit),)
        settings = SearchSettings(
            objective="throughput",
            more_is_better=True,
            constraints=tuple(
                Constraint(figure="latency_p50_s", at_most=True, bound=one) for one in bound
            ),
            within=within,
        )
        return SearchOrder(self.jobs, settings, seed)

    def _measured(self, order: SearchOrder) -> Iterator[str]:
        """Jobs in the order of a search, which learns each, until it ends."""
        while not order.over(0.0):
            released = order.release({self.jobs[0].accelerator: 1}, 0.0, lambda job_id: 1.0)
            if not released:
                return
            for name in released:
                order.know(name, State.SUCCEEDED, self.figures[name])
                yield name

    def _predicted(self, some: Container[str]) -> dict[str, float]:
        known = [
            Known(job=job, state=State.SUCCEEDED, figures=self.figures[job.job_id])
            for job in self.jobs
            if job.job_id in some
        ]
        predictions = predict(self.jobs, known, ("throughput",))
        values = [self.figures[one.job_id]["throughput"] for one in predictions]
        pairs = list(zip(predictions, values, strict=True))
        return {
            "error_at_25": float(np.mean([abs(one.value / value - 1) for one, value in pairs])),
            "coverage_95": float(np.mean([one.low <= value <= one.high for one, value in pairs])),
        }


def main() -> None:
    """Print the figures of a table and write them to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="table of measurements (CSV), or a run")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    figures = replay_run(args.file) if args.file.is_dir() else replay(args.file)
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
