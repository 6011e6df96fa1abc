"""Jobs that a plan adds: calibrations, which jobs need, and references of quality, awaited."""

from __future__ import annotations

import pytest
from schedule_cases import busy_cluster, job, node

from orchestrator.core.events import RunAttempt
from orchestrator.core.job import State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.dependencies import calibration_of, quality_reference_of, with_implied
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan

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
    plan = make_plan(parse_grid(FP8.encode(), "grid"), GAUDI, [])
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
    jobs = parse_grid(FP8.replace("optimum-habana", "transformers").encode(), "grid").jobs()
    assert with_implied(jobs) == jobs
    measured = with_implied(parse_grid(FP8.encode(), "grid").jobs())
    assert [calibration_of(job) for job in measured if job.workload == WORKLOAD] == [None, None]


def test_where_the_measurement_cannot_run_the_jobs_say_so() -> None:
    plan = make_plan(parse_grid(FP8.encode(), "grid"), [node(emulated=True)], [])
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
    plan = make_plan(parse_grid(QUALITY.encode(), "grid"), parse_emulation("1x1:CPU", ()), [])
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
