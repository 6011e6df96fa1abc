"""Comparing two runs: planted changes are found, noise is not cried at, unlike rows are refused."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Nightgrid
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurements import job, row

from orchestrator.analysis.comparison import RULES, compare
from orchestrator.analysis.flags import raised_by_job
from orchestrator.analysis.ratio import (
    LEAST_NOISE,
    Rate,
    between_runs,
    ratio_of,
    ratio_of_rows,
    significant,
)
from orchestrator.analysis.samples import metrics_of
from orchestrator.analysis.selection import settings_of
from orchestrator.core.job import Accelerator, State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.store import Store
from workloads.base import DIVERGED

ROOT = Path(__file__).resolve().parents[2]


def measured(number: int, walls: Sequence[float]) -> Measurement:
    work = {"items": 40, "input_tokens": 400, "output_tokens": 1000, "computed_tokens": 1500}
    samples = tuple((0, sample(repeat=n, wall_s=wall, **work)) for n, wall in enumerate(walls))
    made = row(number, samples=samples, items=(), device_name="Gaudi2", emulated=False, threads=1)
    return replace(made, metrics=metrics_of(samples))


def a_run(
    chance: random.Random,
    jobs: int = 30,
    *,
    repeats: int = 5,
    within: float = 0.01,
    between: float = 0.0,
    slower: dict[int, float] | None = None,
) -> list[Measurement]:
    """A simulated run: noise within a job from repeat to repeat, and one draw for each job."""
    rows = []
    for number in range(jobs):
        shift = chance.gauss(0, between) + math.log(1 + (slower or {}).get(number, 0.0))
        walls = [math.exp(shift + chance.gauss(0, within)) for _ in range(repeats)]
        rows.append(measured(number, walls))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("between", "jobs", "pairs"), [(0.0, 30, 30), (0.01, 3, 100)])
def test_noise_is_not_cried_at(between: float, jobs: int, pairs: int) -> None:
    """Of many pairs of equal runs hardly any gives an alarm or fails a 5 % gate, also where runs
    differ from each other by more than repeats show, and with too few jobs to learn that from."""
    chance = random.Random(20)
    alarms, failures = 0, 0
    for _ in range(pairs):
        one = a_run(chance, jobs, between=between)
        other = a_run(chance, jobs, between=between)
        comparison = compare(one, other)
        alarms += any(change.significant for change in comparison.changes)
        failures += bool(comparison.regressions(0.05))
    assert alarms <= 0.1 * pairs, "the level is 5 % of comparisons; chance stays below 10 %"
    assert failures <= 0.02 * pairs, "of comparisons, where runs differ by 1 % and 30 jobs may"
    assert failures == 0 or between


@pytest.mark.parametrize("slower", [[17], range(30)], ids=["one job", "every job"])
def test_a_planted_slowdown_is_found(slower: Sequence[int]) -> None:
    for seed in range(3):
        chance = random.Random(seed)
        one = a_run(chance, between=0.005)
        other = a_run(chance, between=0.005, slower=dict.fromkeys(slower, 0.10))
        comparison = compare(one, other)
        changed = comparison.regressions(0.05)
        assert {c.after.job_id for c in changed} == {one[number].job_id for number in slower}
        assert all(c.ratio.value == pytest.approx(1 / 1.1, abs=0.03) for c in changed)
        assert comparison.changes[0].significant


def test_too_few_repeats_are_never_significant() -> None:
    comparison = compare([measured(0, [1.0])], [measured(0, [2.0])])
    (change,) = comparison.changes
    assert change.ratio.value == 0.5 and change.ratio.low is None and not change.significant


def test_comparing_the_other_way_round_mirrors_every_interval() -> None:
    chance = random.Random(5)
    one, other = a_run(chance, 10), a_run(chance, 10, slower={2: 0.2})
    there = {c.after.job_id: c.ratio for c in compare(one, other).changes}
    back = {c.after.job_id: c.ratio for c in compare(other, one).changes}
    for job_id, ratio in there.items():
        assert ratio.value == pytest.approx(1 / back[job_id].value)
        assert ratio.low is not None and back[job_id].high is not None
        assert ratio.low == pytest.approx(1 / back[job_id].high)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("emulated", {"emulated": True}),
        ("device", {"device_name": "Gaudi3"}),
        ("threads", {"threads": 8}),
        ("batch_size", {"batch_size": 77, "batch_size_requested": "max"}),
        ("random_weights", {"random_weights": True}),
        ("synthetic_data", {"synthetic_data": True}),
        ("precision_detail", {"precision_detail": "other"}),
    ],
)
def test_what_is_not_comparable_is_refused_by_name(key: str, changes: dict[str, object]) -> None:
    one = measured(0, [1.0, 1.01, 0.99])
    other = replace(one, **changes)
    comparison = compare([one], [other])
    assert not comparison.changes
    assert [d.key for r in comparison.refused for d in r.differences] == [key]
    allowed = compare([one], [other], allow=frozenset({key}))
    assert bool(allowed.changes) is (key != "emulated")


def with_parameters(row: Measurement, job_id: str, **parameters: object) -> Measurement:
    return replace(row, job_id=job_id, parameters={**row.parameters, **parameters})


def test_jobs_of_a_version_with_more_parameters_are_matched_by_what_both_know() -> None:
    old = [measured(n, [1.0, 1.01]) for n in range(3)]
    new = [with_parameters(one, f"new-{one.job_id}", batching="static") for one in old]
    comparison = compare(old, new)
    assert comparison.only_before == comparison.only_after == 0
    assert comparison.warnings["parameters", "unknown", "batching=static"] == 3
    sizes = [(c.before.batch_size, c.after.batch_size) for c in comparison.changes]
    assert sorted(sizes) == [(1, 1), (2, 2), (3, 3)]
    # In one job its default means what the earlier version did, or the job would have another id.
    assert not compare(old[:1], [with_parameters(old[0], old[0].job_id, batching="s")]).warnings
    # Jobs that differ only in what is new are not matched.
    two = [with_parameters(old[0], f"new-{n}", batching=n) for n in ("static", "refill")]
    comparison = compare(old[:1], two)
    assert not comparison.changes and (comparison.only_before, comparison.only_after) == (1, 2)
    changed = with_parameters(old[0], "other", **{next(iter(old[0].parameters)): "another"})
    assert not compare(old[:1], [changed]).changes


def test_other_software_only_warns() -> None:
    one = measured(0, [1.0, 1.01, 0.99])
    other = replace(one, versions={"python": "3.12"}, driver_version="2", git_commit="b")
    comparison = compare([one], [other])
    assert len(comparison.changes) == 1
    assert {key for key, _, _ in comparison.warnings} == {"versions", "driver", "git_commit"}


def test_a_job_that_broke_is_told_and_fails_the_gate() -> None:
    one = [measured(n, [1.0, 1.01]) for n in range(3)]
    states = (State.OUT_OF_MEMORY, State.LOST)
    other = [
        replace(row, state=state, metrics=Metrics(), samples=())
        for row, state in zip(one, states, strict=False)
    ]
    other.append(one[2])
    comparison = compare(one, other)
    assert [t.after.job_id for t in comparison.broken] == [one[0].job_id]
    assert len(comparison.turned) == 2 and len(comparison.changes) == 1
    assert not compare(other, one).broken


def test_noise_between_runs_is_learnt_from_the_jobs() -> None:
    chance = random.Random(11)
    rates = []
    for _ in range(400):
        a, b = (math.exp(chance.gauss(0, 0.02)) for _ in range(2))
        rates.append((Rate(value=a, error=0.001, degrees=4), Rate(value=b, error=0.001, degrees=4)))
    noise, degrees = between_runs(rates)
    assert noise == pytest.approx(0.02 * math.sqrt(2), rel=0.15) and 100 < degrees < 200
    quiet = [(Rate(value=1.0, error=0.01, degrees=4),) * 2 for _ in range(20)]
    assert between_runs([(a, b) for a, b in quiet])[0] == LEAST_NOISE


@given(st.lists(st.none() | st.floats(0, 1), max_size=30))
def test_significance_never_exceeds_that_without_the_guard(p_values: list[float | None]) -> None:
    verdicts = significant(p_values, 0.05)
    for p, verdict in zip(p_values, verdicts, strict=True):
        assert not verdict or (p is not None and p <= 0.05)
    chosen = [p for p, v in zip(p_values, verdicts, strict=True) if v and p is not None]
    for p, verdict in zip(p_values, verdicts, strict=True):
        if chosen and p is not None and p <= max(chosen):
            assert verdict


@pytest.mark.slow
def test_intervals_of_ratios_cover_the_truth() -> None:
    """Of 1,000 simulated 95 % intervals about 950 hold the true ratio, with five repeats each."""
    chance = random.Random(2)
    covered = 0
    for _ in range(1000):
        base, other = (
            measured(0, [1 / (truth * (1 + chance.gauss(0, 0.02))) for _ in range(5)])
            for truth in (1.0, 1.3)
        )
        ratio = ratio_of_rows(other, base)
        assert ratio is not None and ratio.low is not None and ratio.high is not None
        covered += ratio.low <= 1.3 <= ratio.high
    assert 930 <= covered <= 975


def test_a_ratio_without_scatter_has_a_point_for_an_interval() -> None:
    one, two = (Rate(value=v, error=0.0, degrees=2) for v in (1.0, 2.0))
    assert ratio_of(two, one).p_value == 0.0 and ratio_of(two, one).decided
    assert ratio_of(one, one).p_value == 1.0 and not ratio_of(one, one).decided


@pytest.mark.parametrize(
    ("engine", "versions", "alike"),
    [
        ("optimum-habana", (1, 1), True),
        ("optimum-habana", (1, 3), False),
        ("optimum-habana", (2, 3), True),  # the third concerned other jobs
        ("transformers", (1, 3), True),
    ],
)
def test_rows_of_other_work_are_neither_compared_nor_ranked_together(
    engine: str, versions: tuple[int, int], alike: bool
) -> None:
    settings: dict[str, Any] = {"workload": "finetuning", "parameters": {"method": "lora"}}
    one = replace(measured(0, [1, 1.01, 0.99]), engine=engine, **settings)
    old, new = (replace(one, work_version=version) for version in versions)
    found = compare([old], [new], allow=("league", "flags"))
    assert [len(found.changes), len(found.refused)] == ([1, 0] if alike else [0, 1])
    if not alike:
        keys = {one.key: one.before for one in found.refused[0].differences}
        assert keys["work_version"].startswith("before work version 2: optimum-habana")
    rows = [old, replace(new, job_id="other", precision="fp32")]
    assert len(set(settings_of(rows, raised_by_job(rows)).values())) == (1 if alike else 2)


def test_the_same_settings_are_matched_across_devices_where_allowed() -> None:
    old = [measured(n, [1.0, 1.01, 0.99]) for n in range(3)]
    changes = {"accelerator": Accelerator.GPU, "device_name": "NVIDIA H200", "threads": 8}
    changes["precision_detail"] = "another arithmetic"
    new = [
        replace(measured(n, [0.5, 0.505, 0.495]), job_id=f"{n:016x}", **changes) for n in range(3)
    ]
    assert not compare(old, new).changes and compare(old, new).only_before == 3
    across = compare(old, new, allow=frozenset({"device"}))
    assert [round(change.ratio.value, 2) for change in across.changes] == [2.0, 2.0, 2.0]
    assert {key for key, _, _ in across.warnings} == {"device", "threads", "precision_detail"}
    emulated = [replace(row, emulated=True) for row in new]
    assert not compare(old, emulated, allow=frozenset({"device"})).changes


def test_the_document_has_the_table_of_rules() -> None:
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| (blocks|warns)", text, re.MULTILINE))
    assert told == {rule.key: rule.effect for rule in RULES}
    for rule in RULES:
        assert rule.why in text


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    chance = random.Random(0)
    runs = {
        "a": a_run(chance, 12),
        "same": a_run(chance, 12),
        "slow": a_run(chance, 12, slower={3: 0.1}),
        "emulated": [replace(r, emulated=True) for r in a_run(chance, 12)],
        "diverged": [replace(r, details={DIVERGED: "its loss"}) for r in a_run(chance, 2)],
        "other": [replace(measured(99, [1.0, 1.0]), job_id=job(model="x").job_id)],
    }
    for name, rows in runs.items():
        with Store(directory, name) as store:
            store.append(*(replace(one, run=name) for one in rows))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "options", "code"),
    [
        ("same", ["--fail-on-regression", "5%"], 0),
        ("slow", [], 0),
        ("slow", ["--fail-on-regression", "5%"], 11),
        ("slow", ["--fail-on-regression", "0.2"], 0),
        ("emulated", ["--fail-on-regression", "5%"], 6),
        ("other", [], 6),
        ("same", ["--allow", "emulated"], 6),
    ],
)
def test_exit_codes(
    results: Path, after: str, options: list[str], code: int, nightgrid: Nightgrid
) -> None:
    nightgrid("compare", "a", after, "--results", results, *options, code=code)


def test_significant_changes_come_first_and_refused_rows_name_the_key(
    results: Path, nightgrid: Nightgrid
) -> None:
    out = nightgrid("compare", "a", "slow", "--results", results).out
    assert "12 jobs compared, 1 slower, 0 faster" in " ".join(out.split())
    assert "noise between runs" in out and "-9." in out
    every = nightgrid("compare", "a", "slow", "--all", "--results", results).out.splitlines()
    lines = [line for line in every if "%" in line and " to " in line]
    assert len(lines) == 12 and "-9." in lines[0]
    refused = nightgrid("compare", "a", "emulated", "--results", results, code=6)
    assert "emulated differs in 12 jobs: false → true" in refused.out
    assert "they differ in emulated" in refused.err and "--allow" not in refused.err


def test_rows_that_are_flagged_in_both_runs_differ_in_nothing(
    results: Path, nightgrid: Nightgrid
) -> None:
    both = nightgrid("compare", "diverged", "diverged", "--results", results, code=6)
    assert "both have flags that forbid it; --allow flags compares them nevertheless" in both.err
    nightgrid("compare", "diverged", "diverged", "--allow", "flags", "--results", results)
    one = nightgrid("compare", "a", "diverged", "--results", results, code=6)
    assert "they differ in flags; --allow flags compares" in one.err


def test_json_of_a_comparison_of_runs_given_by_path(
    results: Path, tmp_path: Path, nightgrid: Nightgrid
) -> None:
    options = ("--results", tmp_path, "--json", "--fail-on-regression", "5%")
    document = nightgrid("compare", results / "a", results / "slow", *options, code=11).json
    assert [c["regression"] for c in document["changes"]] == [True] + [False] * 11
    assert document["changes"][0]["ratio"] == pytest.approx(1 / 1.1, abs=0.03)
    assert document["noise_estimated"] is True


def test_cells_of_replicates_are_compared_and_a_slower_one_fails_the_gate(
    tmp_path: Path, nightgrid: Nightgrid
) -> None:
    """A cell's figures are means over processes, which are no contradiction of one's samples."""
    chance = random.Random(4)
    for run, slower in (("before", 1.0), ("after", 1.3)):
        rows = []
        for number in range(6):
            for replicate in (1, 2, 3):
                walls = [1 + chance.gauss(0, 0.004) for _ in range(5)]
                factor = slower if number == 2 else 1.0
                made = measured(number, [factor * wall for wall in walls])
                own = replace(job(batch_size=1 + number), replicate=replicate).job_id
                at = 1e9 + 100 * len(rows)
                made = replace(made, job_id=own, attempt_id=f"{own}-1", replicate=replicate)
                times = {"started_at": at, "ended_at": at + 90, "worker_pid": 100 + len(rows)}
                rows.append(replace(made, run=run, load_s=1.0, compile_s=0.0, **times))
        with Store(tmp_path, run) as store:
            store.append(*rows)
    gate = ("--results", tmp_path, "--json", "--fail-on-regression", "5%")
    same = nightgrid("compare", "before", "before", *gate).json
    assert (len(same["changes"]), same["refused"]) == (6, [])
    found = nightgrid("compare", "before", "after", *gate, code=11).json
    assert [one["regression"] for one in found["changes"]] == [True] + [False] * 5
    assert found["refused"] == []
