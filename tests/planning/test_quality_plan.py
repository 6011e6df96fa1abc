"""The reference of quality: planned once for a model and dataset, and waited for, not needed."""

from __future__ import annotations

from schedule_cases import Cluster, job, node

from orchestrator.core.events import RunAttempt
from orchestrator.core.job import Accelerator, State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Node
from orchestrator.grid.dependencies import quality_reference_of
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan

GRID = """\
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
CARDS = [
    Node(node_id="n", name="n", accelerator=Accelerator.CPU, card_indices=(0,), server_cards=1)
]


def test_each_model_and_dataset_has_one_reference_before_its_jobs() -> None:
    """In fp32 with transformers; a job that compares nothing comes after nothing."""
    plan = make_plan(parse_grid(GRID.encode(), "grid"), CARDS, [])
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


def test_a_job_waits_for_its_reference_and_runs_however_that_ends() -> None:
    """A reference that failed makes rows that are not compared, not rows that are missing."""
    for end in (State.SUCCEEDED, State.OUT_OF_MEMORY):
        reference, held = job("reference"), job("held")
        cluster = Cluster(
            [
                PlannedJob(job=reference, action=Action.RUN),
                PlannedJob(job=held, action=Action.RUN, after=(reference.job_id,)),
            ]
        )
        cluster.join(node())
        cluster.ready()
        assert cluster.only().job == reference
        cluster.ends(cluster.only(), end)
        cluster.play_out()
        assert cluster.finals()["held"].state is State.SUCCEEDED
        order = [c.attempt.job for c in cluster.log if isinstance(c, RunAttempt)]
        assert order == [reference, held]


def test_a_reference_of_an_earlier_run_is_not_waited_for() -> None:
    """It is there already, or it is not; the rows say which."""
    reference, held = job("reference"), job("held")
    cluster = Cluster(
        [
            PlannedJob(job=reference, action=Action.REUSE),
            PlannedJob(job=held, action=Action.RUN, after=(reference.job_id,)),
        ]
    )
    cluster.join(node())
    cluster.ready()
    assert cluster.only().job == held
    cluster.ends(cluster.only())
    cluster.play_out()
