"""Grids into jobs: settings, axes, ranges, zip, include, exclude, measure, identity."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from grid_cases import HEAD, experiments, grid, one, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator

from orchestrator.core.errors import GridError
from orchestrator.core.job import Accelerator, Job
from orchestrator.grid.axes import parse_range
from orchestrator.grid.experiment import STRUCTURE
from orchestrator.grid.parser import load_grid, parse_grid
from orchestrator.grid.vocabulary import (
    FIELD_NAMES,
    Fault,
    JobFields,
    MeasureBlock,
    Vocabulary,
    shown,
)
from workloads.base import MeasureSettings
from workloads.registry import WORKLOADS, WorkloadSpec


def points(body: str, *names: str) -> list[tuple[object, ...]]:
    """The named settings of each job of one experiment."""
    found = []
    for job in one(body).jobs():
        parameters = dict(job.parameters)
        values = [parameters[n] if n in parameters else getattr(job, n) for n in names]
        found.append(tuple(v.value if isinstance(v, Accelerator) else v for v in values))
    return found


# ---------------------------------------------------------------- settings


def test_the_smallest_grid_is_one_job_with_defaults() -> None:
    """Workload and model are all that must be said."""
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
    """The nearest word counts."""
    text = HEAD.replace("}", ", output_tokens: 5, precision: fp32}")
    text += "  - {name: a}\n  - {name: b, output_tokens: 6}\n"
    text += "  - {name: c, axes: {precision: [int4]}}\n"
    found = [(dict(j.parameters)["output_tokens"], j.precision) for j in grid(text).jobs()]
    assert found == [(5, "fp32"), (6, "fp32"), (5, "int4")]


def test_stating_a_default_makes_no_other_job() -> None:
    """What is said and what is meant anyway have one identity."""
    said, meant = one("output_tokens: 128\ncards: 1"), one("axes: {}")
    assert said.jobs()[0].job_id == meant.jobs()[0].job_id


def test_every_field_of_a_job_can_be_set() -> None:
    """JobFields and Job agree, so nothing of a job is out of a grid's reach."""
    own = {"experiment", "parameters", "measure", "replicate"}
    assert set(FIELD_NAMES) == {f.name for f in fields(Job)} - own


def test_no_setting_is_also_a_key_of_the_format() -> None:
    """A parameter called `name` or `axes` could not be told from the key."""
    for entry in WORKLOADS.values():
        for model in entry.setting_models():
            assert not set(model.model_fields) & {*STRUCTURE, *FIELD_NAMES}


# ---------------------------------------------------------------- axes and ranges


def test_axes_make_a_product_in_the_order_of_the_file() -> None:
    """The last axis varies fastest."""
    body = "axes:\n  precision: [fp32, bf16]\n  batch_size: [4, 1]"
    assert points(body, "precision", "batch_size") == [
        ("fp32", 4),
        ("fp32", 1),
        ("bf16", 4),
        ("bf16", 1),
    ]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1..64 *2", [1, 2, 4, 8, 16, 32, 64]),
        ("1..9 +2", [1, 3, 5, 7, 9]),
        ("1..8", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("3..100*3", [3, 9, 27, 81]),
        ("1..10 *2", [1, 2, 4, 8]),
        ("5..5", [5]),
        (" 2 .. 6 + 2 ", [2, 4, 6]),
    ],
)
def test_ranges(text: str, numbers: list[int]) -> None:
    """Doubling, stepping and counting; the end is never passed."""
    assert list(parse_range(text)) == numbers  # type: ignore[arg-type]


@given(st.integers(0, 500), st.integers(0, 500), st.sampled_from("*+"), st.integers(0, 20))
def test_a_range_is_what_its_definition_says_or_a_fault(
    start: int, stop: int, operator: str, step: int
) -> None:
    """Against a naive model: start, then apply the step while the end is not passed."""
    made = parse_range(f"{start}..{stop} {operator}{step}")
    endless = (operator == "*" and (start < 1 or step < 2)) or (operator == "+" and step < 1)
    if start > stop or endless:
        assert isinstance(made, Fault)
        return
    expected = [start]
    while (following := expected[-1] * step if operator == "*" else expected[-1] + step) <= stop:
        expected.append(following)
    assert list(made) == expected  # type: ignore[arg-type]


def test_lists_may_hold_ranges_and_max() -> None:
    """`[1..4 *2, max]` is four values."""
    assert points("axes: {batch_size: [1..4 *2, max]}", "batch_size") == [
        (1,),
        (2,),
        (4,),
        ("max",),
    ]


def test_a_search_written_as_a_mapping_is_a_value_like_any_other() -> None:
    """Beside numbers in an axis, in `defaults`, and in a pattern of `exclude`; an old `max` has the
    id that it always had."""
    axis = "axes: {batch_size: [1, {max: {cap: 64}}, best]}"
    assert points(axis, "batch_size") == [(1,), ("max(cap=64)",), ("best",)]
    pattern = "exclude: [{batch_size: {max: {cap: 64, tolerance: 0}}}]"
    without = experiments(f"  - {{name: e, {axis}, {pattern}}}\n")
    assert [job.batch_size for job in without.jobs()] == [1, "best"]
    assert points("batch_size: {max: {cap: 1024}}", "batch_size") == [("max",)]


def test_batch_size_max_may_stand_alone() -> None:
    """As a setting and as an axis."""
    assert points("batch_size: max", "batch_size") == [("max",)]
    assert points("axes: {batch_size: max}", "batch_size") == [("max",)]


def test_accelerator_may_be_a_list_beside_the_axes() -> None:
    """Each job is then run on each kind, the kind varying slowest; included points too."""
    body = "accelerator: [HPU, GPU]\naxes: {batch_size: [1, 2]}\ninclude: [{batch_size: 9}]"
    assert points(body, "accelerator", "batch_size") == [
        ("HPU", 1),
        ("HPU", 2),
        ("GPU", 1),
        ("GPU", 2),
        ("HPU", 9),
        ("GPU", 9),
    ]


def test_parameters_are_axes_too() -> None:
    """Any parameter of the workload can vary, null included."""
    assert points("axes: {input_tokens: [null, 64]}", "input_tokens") == [(None,), (64,)]


# ---------------------------------------------------------------- zip, include, exclude


def test_zip_links_axes_row_by_row() -> None:
    """A linked group is one axis of the product, here with one more group and one axis."""
    body = (
        "axes: {precision: [fp32, bf16]}\n"
        "zip:\n  - {input_tokens: [8, 16], output_tokens: [1, 2]}\n  - {prompts: [3], cards: [2]}"
    )
    assert points(body, "precision", "input_tokens", "output_tokens", "prompts", "cards") == [
        ("fp32", 8, 1, 3, 2),
        ("fp32", 16, 2, 3, 2),
        ("bf16", 8, 1, 3, 2),
        ("bf16", 16, 2, 3, 2),
    ]


def test_exclude_matches_any_subset_of_settings_with_lists_and_ranges() -> None:
    """A pattern names values; a point that has one of each is left out. Fixed settings count."""
    body = (
        "cards: 2\naxes: {precision: [fp32, int4], batch_size: 1..8 *2}\n"
        "exclude:\n  - {precision: fp32, batch_size: 4..8, cards: 2}\n  - {batch_size: [1]}"
    )
    assert points(body, "precision", "batch_size") == [
        ("fp32", 2),
        ("int4", 2),
        ("int4", 4),
        ("int4", 8),
    ]


def test_include_adds_points_after_exclude() -> None:
    """What is included is not excluded again, and an entry with lists is a small product."""
    body = (
        "axes: {precision: [fp32], batch_size: [1, 2]}\nexclude: [{batch_size: 2}]\n"
        "include: [{precision: [fp32, int4], batch_size: 2, output_tokens: 7}]"
    )
    assert points(body, "precision", "batch_size", "output_tokens") == [
        ("fp32", 1, 128),
        ("fp32", 2, 7),
        ("int4", 2, 7),
    ]


def test_without_axes_the_included_points_are_all() -> None:
    """A list of points needs no dummy axis, and gains no extra job."""
    body = "include: [{precision: fp32, batch_size: 3}, {precision: int4}]"
    assert points(body, "precision", "batch_size") == [("fp32", 3), ("int4", 1)]


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
    """The jobs are the product of axes and zip rows less the excluded ones, each once, in order."""
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


# ---------------------------------------------------------------- duplicates, notes, identity


def test_a_job_of_two_experiments_is_planned_once_with_a_note() -> None:
    """The first experiment keeps it."""
    body = "  - {name: a, axes: {batch_size: [1, 2]}}\n  - {name: b, axes: {batch_size: [2, 3]}}\n"
    made = experiments(body)
    assert [(j.experiment, j.batch_size) for j in made.jobs()] == [("a", 1), ("a", 2), ("b", 3)]
    assert made.notes == ('1 job of experiment "b" stand in "a" too; planned once',)


def test_the_cached_id_is_the_content() -> None:
    """A job's id survives pickling, and a changed copy has another."""
    import pickle

    (job,) = one("batch_size: 4").jobs()
    assert pickle.loads(pickle.dumps(job)).job_id == job.job_id
    assert replace(job, batch_size=5).job_id != job.job_id
    assert replace(job, experiment="other").job_id == job.job_id


# ---------------------------------------------------------------- measure


def test_measure_is_inherited_key_by_key() -> None:
    """An experiment overrides single keys of the grid's block, which overrides the defaults."""
    made = grid(
        "name: g\nmeasure: {warmup: 0, max_repeats: 9}\n"
        + HEAD.removeprefix("name: g\n")
        + "  - {name: a, measure: {max_repeats: 4, time_limit_s: 7}}\n"
        + "  - {name: b, precision: fp32}\n"
    )
    a, b = (job.measure for job in made.jobs())
    assert a == MeasureSettings(warmup=0, max_repeats=4, time_limit_s=7.0)
    assert b == MeasureSettings(warmup=0, max_repeats=9)


def test_the_measure_block_is_measure_settings_with_limits() -> None:
    """Same names, same defaults: the block cannot drift from what workloads get."""
    assert MeasureBlock().model_dump() == {
        f.name: getattr(MeasureSettings(), f.name) for f in fields(MeasureSettings)
    }


# ---------------------------------------------------------------- workloads with their own rules


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
    """A default that only one workload knows reaches only its jobs."""
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
    """What only a combination shows is found before anything starts."""
    text = f"name: g\nexperiments:\n  - {{name: t, workload: tuning, model: m, {settings}}}\n"
    with pytest.raises(GridError, match=message) as caught:
        parse_grid(text.encode(), "g", vocabulary=TWO)
    assert [p.line for p in caught.value.problems] == [3]


# ---------------------------------------------------------------- files


def test_a_problem_of_a_job_points_at_the_value_in_the_file() -> None:
    """Later stages can say where a job's setting comes from."""
    made = one("axes: {cards: [1, 2]}\nprecision: fp32")
    job = made.jobs()[1]
    problem = made.problem(job, "cards", 2, "too many")
    assert (problem.line, problem.column) == (5, 23)
    assert made.problem(job, "isolation", "warm", "x").line == 4  # a built-in default


def test_the_text_is_kept_for_the_run(tmp_path: Path) -> None:
    """A run stores the grid as it was written, comments and all."""
    path = tmp_path / "g.yaml"
    path.write_text(HEAD + "  - name: e # why\n")
    made = load_grid(path, vocabulary=vocabulary())
    assert made.text == path.read_text()
    assert made.file == str(path)


_KEYS = ["name", "experiments", "defaults", "measure", "axes", "zip", "include", "exclude"]
_WORDS = st.sampled_from([*_KEYS, *JobFields.model_fields, "output_tokens", "warmup", "x"])
_VALUES = st.sampled_from(
    ["g", "text-generation", "fp32", "max", "1..4 *2", "4..1", 0, 1, 2.5, True, None, "HPU"]
)
_SHAPES = st.recursive(
    _VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(_WORDS, _SHAPES, max_size=5))
def test_any_structure_is_a_grid_or_a_grid_error(data: dict[str, object]) -> None:
    """Whatever stands where: a Grid with jobs, or problems that each have a line."""
    import yaml

    try:
        made = grid(yaml.safe_dump(data))
    except GridError as error:
        assert all(problem.line is not None for problem in error.problems)
    else:
        assert made.jobs()


_EXPERIMENT = st.dictionaries(_WORDS, _SHAPES, max_size=5)


@given(st.lists(_EXPERIMENT, min_size=1, max_size=3))
def test_any_experiments_are_a_grid_or_a_grid_error(blocks: list[dict[str, object]]) -> None:
    """The same with a sound frame around random experiments, which reaches deeper."""
    import yaml

    for number, block in enumerate(blocks):
        block["name"] = f"e{number}"
        block.pop("workload", None)
        block.pop("model", None)
    frame = {"name": "g", "defaults": {"workload": "text-generation", "model": "m"}}
    try:
        made = grid(yaml.safe_dump({**frame, "experiments": blocks}))
    except GridError as error:
        assert all(problem.line is not None for problem in error.problems)
    else:
        assert made.jobs()


def test_included_parameters_in_another_order_are_not_confused() -> None:
    """Names decide which value is whose, not the order in which they stand."""
    body = "axes: {output_tokens: [1], prompts: [2]}\ninclude: [{prompts: 1, output_tokens: 2}]"
    jobs = one(body).jobs()
    found = [
        (dict(job.parameters)["output_tokens"], dict(job.parameters)["prompts"]) for job in jobs
    ]
    assert found == [(1, 2), (2, 1)]


def test_the_identity_is_the_canonical_json() -> None:
    """Put together from parts, it is what `json.dumps` makes of the whole: ids never change."""
    for parameters in ((), (("b", 1), ("a", True)), (("a", 1.0), ("b", None), ("c", 'é"\\'))):
        job = Job(
            experiment="x",
            workload="w",
            model="mö",
            dataset="d",
            accelerator=Accelerator.GPU,
            cards=2,
            precision="bf16",
            batch_size="max",
            parameters=parameters,
        )
        text = json.dumps(job.identity(), sort_keys=True, separators=(",", ":"))
        assert job.job_id == hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- names of earlier versions

RENAMED = [
    (workload, name, old, new)
    for workload, entry in WORKLOADS.items()
    for name, declaration in entry.declared(entry.engines[0]).items()
    for old, new in declaration.renamed
]


@pytest.mark.parametrize(("workload", "name", "old", "new"), RENAMED)
def test_a_value_is_read_under_its_old_name(workload: str, name: str, old: str, new: str) -> None:
    """Wherever it stands; the job is the same one, and a note says what to write."""
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
    """Old grids are read with a notice, wherever they say it; any other value is refused with its
    line and what to write instead."""
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


def test_a_message_quotes_eighty_characters_of_a_text() -> None:
    """A longer one is cut, so that it fills no screen."""
    assert shown("x" * 80) == f'"{"x" * 80}"'
    assert shown("x" * 81) == f'"{"x" * 77}…"'
