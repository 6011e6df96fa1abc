"""Grids into jobs: settings, axes, ranges, zip, include, exclude, measure, identity."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
from grid_cases import HEAD, experiments, grid, one
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator

from orchestrator.core.errors import GridError
from orchestrator.core.job import Accelerator, Job
from orchestrator.grid.experiment import STRUCTURE, parse_range
from orchestrator.grid.parser import parse_grid
from orchestrator.grid.vocabulary import (
    FIELD_NAMES,
    Fault,
    Vocabulary,
)
from workloads.base import MeasureSettings
from workloads.registry import WORKLOADS, WorkloadSpec


def points(body: str, *names: str) -> list[tuple[object, ...]]:
    """The named settings of each job of one experiment."""
    found = []
    for job in one(body).jobs():
        settings = job.identity() | dict(job.parameters)
        found.append(tuple(settings[name] for name in names))
    return found


POINTS: dict[str, tuple[str, str, list[tuple[object, ...]]]] = {
    "a product in the order of the file, the last axis varying fastest": (
        "axes:\n  precision: [fp32, bf16]\n  batch_size: [4, 1]",
        "precision batch_size",
        [("fp32", 4), ("fp32", 1), ("bf16", 4), ("bf16", 1)],
    ),
    "a list of a range and max": (
        "axes: {batch_size: [1..4 *2, max]}",
        "batch_size",
        [(1,), (2,), (4,), ("max",)],
    ),
    "max as a setting": ("batch_size: max", "batch_size", [("max",)]),
    "max as an axis": ("axes: {batch_size: max}", "batch_size", [("max",)]),
    "null as a value": ("axes: {input_tokens: [null, 64]}", "input_tokens", [(None,), (64,)]),
    "a list of accelerators, which vary slowest, also of included points": (
        "accelerator: [HPU, GPU]\naxes: {batch_size: [1, 2]}\ninclude: [{batch_size: 9}]",
        "accelerator batch_size",
        [("HPU", 1), ("HPU", 2), ("GPU", 1), ("GPU", 2), ("HPU", 9), ("GPU", 9)],
    ),
    "linked axes as one axis of the product": (
        "axes: {precision: [fp32, bf16]}\n"
        "zip:\n  - {input_tokens: [8, 16], output_tokens: [1, 2]}\n  - {prompts: [3], cards: [2]}",
        "precision input_tokens output_tokens prompts cards",
        [(p, *row, 3, 2) for p in ("fp32", "bf16") for row in ((8, 1), (16, 2))],
    ),
    "patterns of any settings, fixed ones too, with lists and ranges": (
        "cards: 2\naxes: {precision: [fp32, int4], batch_size: 1..8 *2}\n"
        "exclude:\n  - {precision: fp32, batch_size: 4..8, cards: 2}\n  - {batch_size: [1]}",
        "precision batch_size",
        [("fp32", 2), ("int4", 2), ("int4", 4), ("int4", 8)],
    ),
    "points included after the exclusion, with lists as a small product": (
        "axes: {precision: [fp32], batch_size: [1, 2]}\nexclude: [{batch_size: 2}]\n"
        "include: [{precision: [fp32, int4], batch_size: 2, output_tokens: 7}]",
        "precision batch_size output_tokens",
        [("fp32", 1, 128), ("fp32", 2, 7), ("int4", 2, 7)],
    ),
    "included points alone": (
        "include: [{precision: fp32, batch_size: 3}, {precision: int4}]",
        "precision batch_size",
        [("fp32", 3), ("int4", 1)],
    ),
    "included settings in another order": (
        "axes: {output_tokens: [1], prompts: [2]}\ninclude: [{prompts: 1, output_tokens: 2}]",
        "output_tokens prompts",
        [(1, 2), (2, 1)],
    ),
}


@pytest.mark.parametrize(("body", "names", "expected"), POINTS.values(), ids=POINTS)
def test_an_experiment_has_these_points(
    body: str, names: str, expected: list[tuple[object, ...]]
) -> None:
    assert points(body, *names.split()) == expected


def test_the_smallest_grid_is_one_job_with_defaults() -> None:
    (job,) = experiments("  - name: e\n").jobs()
    assert job == Job(
        experiment="e",
        workload="text-generation",
        model="tiny-chatglm3",
        dataset="advertisegen-synthetic",
        accelerator=Accelerator.HPU,
        cards=1,
        precision="bf16",
        batch_size=1,
        parameters=job.parameters,
    )
    entry = WORKLOADS["text-generation"]
    assert dict(job.parameters) == entry.model("transformers")().model_dump()
    assert [name for name, _ in job.parameters] == sorted(entry.declared("transformers"))


def test_an_experiments_setting_beats_the_default_and_an_axis_beats_both() -> None:
    text = HEAD.replace("}", ", output_tokens: 5, precision: fp32}")
    text += "  - {name: a}\n  - {name: b, output_tokens: 6}\n"
    text += "  - {name: c, axes: {precision: [int4]}}\n"
    found = [(dict(j.parameters)["output_tokens"], j.precision) for j in grid(text).jobs()]
    assert found == [(5, "fp32"), (6, "fp32"), (5, "int4")]


def test_stating_a_default_makes_no_other_job() -> None:
    said, meant = one("output_tokens: 128\ncards: 1"), one("axes: {}")
    assert said.jobs()[0].job_id == meant.jobs()[0].job_id


def test_every_field_of_a_job_can_be_set() -> None:
    own = {"experiment", "parameters", "measure", "replicate"}
    assert set(FIELD_NAMES) == {f.name for f in fields(Job)} - own


def test_no_setting_is_also_a_key_of_the_format() -> None:
    """A parameter called `name` or `axes` could not be told from the key."""
    for entry in WORKLOADS.values():
        for model in entry.setting_models():
            assert not set(model.model_fields) & {*STRUCTURE, *FIELD_NAMES}


_SPACE = st.sampled_from(["", " "])


@given(st.integers(0, 500), st.integers(0, 500), st.sampled_from("*+"), st.integers(0, 20), _SPACE)
def test_a_range_is_what_its_definition_says_or_a_fault(
    start: int, stop: int, operator: str, step: int, space: str
) -> None:
    made = parse_range(f"{space}{start}{space}..{space}{stop}{space}{operator}{space}{step}")
    endless = (operator == "*" and (start < 1 or step < 2)) or (operator == "+" and step < 1)
    if start > stop or endless:
        assert isinstance(made, Fault)
        return
    expected = [start]
    while (following := expected[-1] * step if operator == "*" else expected[-1] + step) <= stop:
        expected.append(following)
    assert list(made) == expected  # type: ignore[arg-type]


def test_a_search_written_as_a_mapping_is_a_value_like_any_other() -> None:
    axis = "axes: {batch_size: [1, {max: {cap: 64}}, best]}"
    assert points(axis, "batch_size") == [(1,), ("max(cap=64)",), ("best",)]
    pattern = "exclude: [{batch_size: {max: {cap: 64, tolerance: 0}}}]"
    without = experiments(f"  - {{name: e, {axis}, {pattern}}}\n")
    assert [job.batch_size for job in without.jobs()] == [1, "best"]
    assert points("batch_size: {max: {cap: 1024}}", "batch_size") == [("max",)]


_AXES = st.dictionaries(
    st.sampled_from(["batch_size", "output_tokens", "prompts", "cards"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True),
    min_size=1,
)
_COLUMNS = st.integers(1, 3).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "input_tokens": st.lists(st.integers(1, 5), min_size=n, max_size=n),
            "keep_texts": st.lists(st.integers(0, 5), min_size=n, max_size=n),
        }
    )
)


@given(axes=_AXES, columns=st.none() | _COLUMNS, data=st.data())
def test_product_zip_and_exclude_equal_a_naive_model(
    axes: dict[str, list[int]], columns: dict[str, list[int]] | None, data: st.DataObject
) -> None:
    names = [*axes, *(columns or {})]
    rows: list[tuple[int, ...]] = list(zip(*columns.values(), strict=True)) if columns else [()]
    every = [
        dict(zip(names, (*point, *row), strict=True))
        for point in itertools.product(*axes.values())
        for row in rows
    ]
    victim = data.draw(st.sampled_from(every))
    keys = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    pattern = {name: victim[name] for name in keys}
    kept = [p for p in every if any(p[name] != value for name, value in pattern.items())]
    expected = list(dict.fromkeys(tuple(p[name] for name in names) for p in kept))

    body = f"axes: {axes}\nexclude: [{pattern}]".replace("'", "")
    if columns:
        body += f"\nzip: {columns}".replace("'", "")
    if not kept:
        with pytest.raises(GridError, match="without jobs"):
            one(body)
    else:
        assert points(body, *names) == expected


def test_a_job_of_two_experiments_is_planned_once_with_a_note() -> None:
    body = "  - {name: a, axes: {batch_size: [1, 2]}}\n  - {name: b, axes: {batch_size: [2, 3]}}\n"
    made = experiments(body)
    assert [(j.experiment, j.batch_size) for j in made.jobs()] == [("a", 1), ("a", 2), ("b", 3)]
    assert made.notes == ('1 job of experiment "b" stand in "a" too; planned once',)


def test_measure_is_inherited_key_by_key() -> None:
    made = grid(
        "name: g\nmeasure: {warmup: 0, max_repeats: 9}\n"
        + HEAD.removeprefix("name: g\n")
        + "  - {name: a, measure: {max_repeats: 4, time_limit_s: 7}}\n"
        + "  - {name: b, precision: fp32}\n"
    )
    a, b = (job.measure for job in made.jobs())
    assert a == MeasureSettings(warmup=0, max_repeats=4, time_limit_s=7.0)
    assert b == MeasureSettings(warmup=0, max_repeats=9)


class TunedParameters(BaseModel, extra="forbid", strict=True):
    """Parameters with a rule over two of them and one that must be given."""

    rank: int
    alpha: int = 8

    @model_validator(mode="after")
    def _alpha_at_least_rank(self) -> TunedParameters:
        if self.alpha < self.rank:
            raise ValueError("alpha must be at least rank")
        return self


class TunedEntry(WorkloadSpec):
    """A workload that runs with another engine, unless its grid says so."""

    default_engine = "tuner"


TUNING = TunedEntry(name="tuning", function="", summary="", parameters=TunedParameters)  # type: ignore[arg-type]
TWO = Vocabulary(workloads={"tuning": TUNING, **WORKLOADS}, precisions=("fp32", "bf16"))


def test_workloads_of_one_grid_share_defaults_and_keep_their_parameters_apart() -> None:
    text = (
        "name: g\ndefaults: {model: m, rank: 4, output_tokens: 5}\nexperiments:\n"
        "  - {name: t, workload: tuning}\n  - {name: g, workload: text-generation}\n"
    )
    tuned, generated = parse_grid(text.encode(), "g", vocabulary=TWO).jobs()
    assert tuned.parameters == (("alpha", 8), ("rank", 4))
    assert tuned.engine == "tuner"
    assert dict(generated.parameters)["output_tokens"] == 5
    assert "rank" not in dict(generated.parameters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("rank: 9, axes: {alpha: [8, 16]}", "alpha must be at least rank"),
        ("alpha: 9", "rank: Field required"),
    ],
)
def test_rules_over_several_parameters_are_checked_for_every_job(
    settings: str, message: str
) -> None:
    text = f"name: g\nexperiments:\n  - {{name: t, workload: tuning, model: m, {settings}}}\n"
    with pytest.raises(GridError, match=message) as caught:
        parse_grid(text.encode(), "g", vocabulary=TWO)
    assert [p.line for p in caught.value.problems] == [3]


def test_a_grid_knows_its_text_and_where_a_job_has_its_settings() -> None:
    made = one("axes: {cards: [1, 2]}  # why\nprecision: fp32")
    assert made.text.count("# why") == 1 and made.file == "g.yaml"
    problem = made.problem(made.jobs()[1], "cards", 2, "too many")
    assert (problem.line, problem.column) == (5, 23)
    assert made.problem(made.jobs()[1], "isolation", "warm", "x").line == 4  # a built-in default


RENAMED = [
    (workload, name, old, new)
    for workload, entry in WORKLOADS.items()
    for name, declaration in entry.declared(entry.engines[0]).items()
    for old, new in declaration.renamed.items()
]


@pytest.mark.parametrize(("workload", "name", "old", "new"), RENAMED)
def test_a_value_is_read_under_its_old_name(workload: str, name: str, old: str, new: str) -> None:
    head = f"workload: {workload}\nengine: {WORKLOADS[workload].engines[0]}\n"
    for said in (f"{name}: {old}", f"axes: {{{name}: [{old}]}}", f"include: [{{{name}: {old}}}]"):
        (job,), notes = one(head + said).jobs(), one(head + said).notes
        assert job.job_id == one(f"{head}{name}: {new}").jobs()[0].job_id
        assert dict(job.parameters)[name] == new
        assert [note for note in notes if f"`{name}: {old}` is called `{name}: {new}` now" in note]
    assert not one(f"{head}{name}: {new}").notes


def test_an_old_name_beside_the_new_one_is_one_value_twice() -> None:
    """`refill` was what is called `continuous` now; a pattern finds either by either."""
    with pytest.raises(GridError, match="listed twice"):
        one("axes: {batching: [refill, continuous]}")
    left = "axes: {batching: [static, continuous]}\nexclude: [{batching: refill}]"
    assert points(left, "batching") == [("static",)]


def test_a_removed_setting_is_taken_at_its_default_alone() -> None:
    plain = one("axes: {batch_size: [1, 2]}")
    for said in ("packed_weights: false\naxes: {", "axes: {packed_weights: [false], "):
        grid = one(f"{said}batch_size: [1, 2]}}")
        assert [job.job_id for job in grid.jobs()] == [job.job_id for job in plain.jobs()]
        assert any("`packed_weights` was removed" in note for note in grid.notes)
    for said in ("packed_weights: true", "axes: {packed_weights: [false, true]}"):
        with pytest.raises(GridError) as refused:
            one(said)
        (problem,) = refused.value.problems
        assert problem.line and "`packed_weights` was removed" in problem.message
        assert "engine: openvino" in problem.hint


def test_prices_enter_no_job_id() -> None:
    body = HEAD + "  - {name: a, precision: fp32}\n"
    block = "prices: {card_hour: {Gaudi2: 1.8, default: 2.5}, kwh: 0.3, currency: USD}\n"
    priced, plain = grid(block + body), grid(body)
    assert [job.job_id for job in priced.jobs()] == [job.job_id for job in plain.jobs()]
    assert grid("prices: {card_hour: 2.5}\n" + body)
