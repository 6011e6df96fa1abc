"""Jobs that need others: by the names of what these save, or calibrations and references of quality
that the plan adds; refused where they cannot be met, scheduled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_cases import a_past_row
from grid_cases import grid
from schedule_cases import Cluster, Fixed, busy_cluster, cluster_of, job, node
from simulated_runs import Scattered

from orchestrator.core.errors import GridError
from orchestrator.core.events import RunAttempt
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import FailureClass
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.dependencies import (
    Thing,
    calibration_of,
    measured_again,
    quality_reference_of,
    took,
    with_implied,
    with_needs,
)
from orchestrator.grid.parser import load_grid
from orchestrator.planning.planner import make_plan
from orchestrator.scheduler.simulator import simulate
from workloads.models.products import Saving

SAVER = job("saver", workload="finetuning", parameters=(("save_adapter", "advert"),))
USER = job("user", parameters=(("adapter", "advert"),))
OTHER = job("other")


def saved(run_id: str, by: Job, attempt: int) -> Callable[[Thing], Saving]:
    """Notes that say so of the adapter."""
    note = Saving(f"{run_id}-{by.job_id}", attempt)
    return lambda thing: note if thing == ("adapter", "advert") else Saving()


def run(*jobs: Job, **needs: tuple[Job, ...]) -> list[PlannedJob]:
    """All to be run; keywords name a job's dataset and what it needs."""
    return [
        PlannedJob(
            job=each,
            action=Action.RUN,
            needs=tuple(other.job_id for other in needs.get(each.dataset, ())),
        )
        for each in jobs
    ]


def test_what_needs_an_unsupported_job_is_unsupported_for_that_reason() -> None:
    plan = with_needs(
        [
            PlannedJob(job=USER, action=Action.RUN, estimate_s=9.0),
            PlannedJob(job=SAVER, action=Action.UNSUPPORTED, reason="no NF4 here"),
        ]
    )
    assert plan[0].action is Action.UNSUPPORTED and plan[0].estimate_s == 0
    assert plan[0].reason == (
        f"needs the adapter of job {SAVER.job_id}, which is unsupported: no NF4 here"
    )


@pytest.mark.parametrize("action", [Action.SKIP, Action.UNSUPPORTED])
def test_what_cannot_be_measured_again_keeps_its_row(action: Action) -> None:
    """Its need is not run, or needs itself what is not: an attempt would end as NOT_STARTED, and
    that row would take the place of the good one."""
    tuned, second = job("tuned"), job("second")
    saver, user = PlannedJob(job=SAVER, action=action), PlannedJob(job=USER, action=Action.REUSE)
    user = replace(user, needs=(SAVER.job_id,))
    middle = PlannedJob(job=tuned, action=Action.RUN, needs=(SAVER.job_id,))
    last = PlannedJob(job=second, action=Action.REUSE, needs=(tuned.job_id,))

    def again(*plan: PlannedJob) -> list[PlannedJob]:
        return measured_again(list(plan), lambda job: "", lambda job: 9.0, saved("here", SAVER, 1))

    plan = [last, middle, user, saver]
    assert again(*plan) == plan
    saver = replace(saver, action=Action.REUSE)
    actions = [item.action for item in again(last, middle, user, saver)]
    assert actions == [Action.RUN, Action.RUN, Action.RUN, Action.REUSE]


@pytest.mark.parametrize(
    ("saved_by", "run_ids", "again"),
    [
        (f"here-{SAVER.job_id}", ("here",), False),
        (f"before-{SAVER.job_id}", ("here", "before"), False),  # results that were copied
        (f"there-{SAVER.job_id}", (), False),  # the run's id cannot be read
        ("", ("here",), False),  # an older version's note
        (f"there-{SAVER.job_id}", ("here",), True),
        (f"here-{OTHER.job_id}", ("here",), True),
        (f"there-{OTHER.job_id}", (), True),
    ],
)
def test_a_name_that_another_run_took_over_is_saved_again(
    saved_by: str, run_ids: tuple[str, ...], again: bool
) -> None:
    """One grid saves a name, then another grid, then the first is run again: what takes the name
    there is measured on its own grid's product. Where nobody takes it, nothing is done."""
    user = PlannedJob(job=USER, action=Action.REUSE, needs=(SAVER.job_id,))
    saver = PlannedJob(job=SAVER, action=Action.REUSE)

    def planned(*plan: PlannedJob) -> dict[str, Action]:
        found = measured_again(
            list(plan), lambda job: "", lambda job: 9.0, lambda thing: Saving(saved_by), run_ids
        )
        return {item.job.job_id: item.action for item in found}

    done = planned(user, saver)
    assert {done[SAVER.job_id], done[USER.job_id]} == {Action.RUN if again else Action.REUSE}
    assert planned(saver)[SAVER.job_id] is Action.REUSE


GRID = """\
name: chain
defaults: {{model: tiny-chatglm3, accelerator: HPU, precision: fp32}}
experiments:
  - name: with the adapter
    workload: text-generation
    adapter: {wanted}
  - name: training
    workload: finetuning
    axes: {{rank: {values}}}
    save_adapter: advert
"""


MODELS = """\
name: chain
defaults: {{accelerator: HPU, precision: fp32}}
experiments:
  - name: with the model
    workload: text-generation
    model: {wanted}
    quality: true
  - name: training
    workload: finetuning
    model: tiny-chatglm3
    method: full
    axes: {{steps: {values}}}
    save_model: tuned
"""


def grid_file(
    tmp_path: Path, text: str = GRID, wanted: str = "advert", values: str = "[8]"
) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(text.format(wanted=wanted, values=values))
    return path


def test_the_plan_orders_a_grid_by_the_names_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_ADAPTERS", str(tmp_path))
    grid = load_grid(grid_file(tmp_path))
    nodes = parse_emulation("1x8", grid.accelerators())
    user, saver = make_plan(grid, nodes, []).jobs
    assert user.needs == (saver.job.job_id,) and saver.needs == ()
    assert simulate([user, saver], nodes, Scattered(1)).rows[0].job == saver.job
    row = a_past_row(saver.job)
    user, saver = make_plan(grid, nodes, [row]).jobs
    assert saver.action is Action.REUSE
    assert {r.state for r in simulate([user, saver], nodes, Scattered(1)).rows} == {State.SUCCEEDED}
    used = a_past_row(user.job)
    user, _ = make_plan(grid, nodes, [used]).jobs  # the saver was changed since, or its row is lost
    assert user.action is Action.RUN and user.estimate_s > 0
    assert user.reason == f"job {saver.job.job_id} makes anew what this was measured on"
    twice = saved("here", saver.job, 2)
    used = replace(used, took=took(("adapter", "advert"), f"here-{saver.job.job_id}-2"))
    user, _ = make_plan(grid, nodes, [row, used], saving_of=twice).jobs
    assert user.action is Action.REUSE
    thrice = saved("here", saver.job, 3)
    user, saver = make_plan(grid, nodes, [row, used], saving_of=thrice).jobs
    assert (user.action, saver.action) == (Action.RUN, Action.REUSE)
    assert user.reason == "adapter advert was made anew since this was measured"


@pytest.mark.parametrize(
    ("text", "wanted", "values", "says"),
    [
        (GRID, "adverts", "[8]", "job of this grid saves adapter 'adverts'.*did you mean 'advert'"),
        (GRID, "nothing", "[8]", "save_adapter: nothing"),
        (GRID, "x" * 300, "[8]", "and there is none"),  # no system has such a path
        (GRID, "advert", "[8, 16]", "2 jobs of this grid save adapter 'advert'"),
        (MODELS, "tuned2", "[8]", "there is no model named 'tuned2'.*save_model: tuned2"),
        (MODELS, "tuned", "[8, 9]", "2 jobs of this grid save model 'tuned'"),
    ],
)
def test_what_no_job_or_several_jobs_save_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    wanted: str,
    values: str,
    says: str,
) -> None:
    monkeypatch.setenv("NIGHTGRID_ADAPTERS", str(tmp_path))
    with pytest.raises(GridError, match=f"(?s){says}") as refused:
        load_grid(grid_file(tmp_path, text, wanted, values))
    assert [problem.line for problem in refused.value.problems] == [6]


def test_an_adapter_that_exists_needs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_ADAPTERS", str(tmp_path))
    write_adapter(tmp_path / "earlier")
    grid = load_grid(grid_file(tmp_path, wanted="earlier"))
    user, _ = make_plan(grid, parse_emulation("1x8", grid.accelerators()), []).jobs
    assert user.needs == () and user.action is Action.RUN


def write_adapter(directory: Path, config: str = "{}", weights: bytes = b"") -> None:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(config)
    one = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    whole = len(one).to_bytes(8, "little") + one + b"1"
    (directory / "adapter_model.safetensors").write_bytes(weights or whole)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": '{"r": 4,'}, "adapter_config.json cannot be read as JSON"),
        ({"config": '{"peft_type": "PREFIX_TUNING"}'}, "a PREFIX_TUNING adapter"),
        ({"weights": b"version https://git-lfs.github.com/spec/v1"}, "a Git LFS pointer"),
        ({"weights": bytes([99]) + bytes(7) + b"{"}, "header would be 99 bytes"),
        ({}, "has no adapter_model.safetensors"),
        ({}, "has no adapter_config.json, so it is not"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_an_adapter_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: Mapping[str, Any],
    says: str,
    by_name: bool,
) -> None:
    monkeypatch.setenv("NIGHTGRID_ADAPTERS", str(tmp_path / "adapters"))
    write_adapter(directory := tmp_path / "adapters" / "earlier", **changes)
    if not changes:
        next(file for file in directory.iterdir() if file.name in says).unlink()
    with pytest.raises(GridError, match=says) as refused:
        load_grid(grid_file(tmp_path, wanted="earlier" if by_name else str(directory)))
    assert "there is none" not in str(refused.value)


def test_what_needs_a_failed_job_ends_with_that_reason() -> None:
    third = job("third")
    cluster = busy_cluster(
        *run(third, USER, SAVER, OTHER, third=(USER,), user=(SAVER,)), max_attempts=1
    )
    cluster.ends(cluster.run_of("saver"), State.FAILED, FailureClass.ERROR)
    finals = cluster.finals()
    assert finals["saver"].state is State.FAILED
    assert finals["user"].state is finals["third"].state is State.NOT_STARTED
    assert f"needs job {SAVER.job_id}, which ended as FAILED" in finals["user"].reason
    assert f"needs job {USER.job_id}, which ended as NOT_STARTED" in finals["third"].reason
    cluster.play_out()
    assert cluster.finals()["other"].state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Action.SKIP, "which is not run: failed earlier"),
        (Action.UNSUPPORTED, "which is unsupported: failed earlier"),
        (None, "which is not part of this run"),
    ],
)
def test_what_can_never_start_ends_at_once(action: Action | None, says: str) -> None:
    jobs = run(USER, user=(SAVER,))
    if action is not None:
        jobs.append(PlannedJob(job=SAVER, action=action, reason="failed earlier"))
    cluster = Cluster(jobs)
    cluster.tick()
    assert cluster.finals()["user"].state is State.NOT_STARTED
    assert says in cluster.finals()["user"].reason
    assert cluster.finished is not None


def test_jobs_that_need_each_other_do_not_hang_the_run() -> None:
    cluster = cluster_of(*run(USER, SAVER, OTHER, user=(SAVER,), saver=(USER,)))
    for name in ("user", "saver"):
        assert "can never start" in cluster.finals()[name].reason
    cluster.play_out()
    assert cluster.finals()["other"].state is State.SUCCEEDED


def test_what_others_wait_for_goes_first() -> None:
    """However short it is and whatever models its neighbours share: a gang that waits for it would
    otherwise come after every one-card job."""
    first = job("first", model="another")
    gang = job("gang", cards=2)
    singles = [job(f"single {number}") for number in range(12)]
    planned = run(*singles, first, gang, gang=(first,))
    estimates = Fixed(run_s=100.0, by_name={"first": 5.0, "gang": 20.0})
    cluster = cluster_of(*planned, cards=2, estimates=estimates)
    cluster.play_out()
    order = [row.job.dataset for row in cluster.rows]
    assert order[0] == "first" and order.index("gang") <= 4


def test_a_job_with_a_saved_model_waits_for_it_and_so_does_its_reference(tmp_path: Path) -> None:
    grid = load_grid(grid_file(tmp_path, MODELS, "tuned"))
    planned = make_plan(grid, parse_emulation("1x8", grid.accelerators()), []).jobs
    needs = {item.job.workload: item.needs for item in planned}
    saver = next(item.job.job_id for item in planned if item.job.workload == "finetuning")
    assert needs == {"text-generation": (saver,), "quality-reference": (saver,), "finetuning": ()}


# ---------------------------------------------------------------- jobs that a plan adds

WORKLOAD = "fp8-calibration"
FP8 = """\
name: night
defaults: {workload: text-generation, model: tiny-chatglm3, engine: optimum-habana}
experiments:
  - name: sizes
    axes: {precision: [bf16, fp8], batch_size: [1, 2], cards: [1, 2]}
"""
GAUDI = [node(emulated=False)]


def test_each_model_and_card_count_is_measured_once_before_its_jobs() -> None:
    plan = make_plan(grid(FP8), GAUDI, [])
    measured = [item for item in plan.jobs if item.job.workload == WORKLOAD]
    assert [(item.job.cards, item.job.precision) for item in measured] == [(1, "bf16"), (2, "bf16")]
    by_cards = {item.job.cards: item.job.job_id for item in measured}
    for item in plan.jobs:
        assert item.action is Action.RUN, item.reason
        wanted = (by_cards[item.job.cards],) if item.job.precision == "fp8" else ()
        assert item.needs == wanted
    place = {item.job.job_id: number for number, item in enumerate(plan.jobs)}
    assert all(place[need] < place[item.job.job_id] for item in plan.jobs for need in item.needs)


def test_what_runs_otherwise_needs_no_calibration() -> None:
    jobs = grid(FP8.replace("optimum-habana", "transformers")).jobs()
    assert with_implied(jobs) == jobs
    measured = with_implied(grid(FP8).jobs())
    assert [calibration_of(job) for job in measured if job.workload == WORKLOAD] == [None, None]


def test_where_the_measurement_cannot_run_the_jobs_say_so() -> None:
    plan = make_plan(grid(FP8), [node(emulated=True)], [])
    assert {item.action for item in plan.jobs} == {Action.UNSUPPORTED}


QUALITY = """\
name: night
defaults: {workload: text-generation, model: tiny-chatglm3, accelerator: CPU, quality: true}
experiments:
  - name: sizes
    axes:
      precision: [bf16, int4]
      batch_size: [1, 2]
      dataset: [english-prompts, advertisegen-synthetic]
  - {name: plain, quality: false, precision: fp32}
"""


def test_each_model_and_dataset_has_one_reference_before_its_jobs() -> None:
    plan = make_plan(grid(QUALITY), parse_emulation("1x1:CPU", ()), [])
    references = {
        item.job.dataset: item.job for item in plan.jobs if item.job.workload == "quality-reference"
    }
    assert set(references) == {"english-prompts", "advertisegen-synthetic"}
    assert len(plan.jobs) == 8 + 2 + 1
    for each in references.values():
        assert (each.precision, each.engine, each.batch_size) == ("fp32", "transformers", 1)
        assert quality_reference_of(each) is None
    for item in plan.jobs:
        compares = dict(item.job.parameters).get("quality")
        wanted = (references[item.job.dataset].job_id,) if compares else ()
        assert item.after == wanted and not item.needs


@pytest.mark.parametrize("end", [State.SUCCEEDED, State.OUT_OF_MEMORY])
@pytest.mark.parametrize("action", [Action.RUN, Action.REUSE])
def test_a_job_waits_for_its_reference_and_runs_however_that_ends(
    action: Action, end: State
) -> None:
    reference, other = job("reference"), job("other")
    cluster = busy_cluster(
        PlannedJob(job=reference, action=action),
        PlannedJob(job=other, action=Action.RUN, after=(reference.job_id,)),
    )
    if action is Action.RUN:
        cluster.ends(cluster.only(), end)
    cluster.play_out()
    assert cluster.finals()["other"].state is State.SUCCEEDED
    order = [c.attempt.job for c in cluster.log if isinstance(c, RunAttempt)]
    assert order == ([reference, other] if action is Action.RUN else [other])
