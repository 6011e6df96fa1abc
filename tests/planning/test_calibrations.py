"""fp8 on Gaudi: the plan adds the measurement, and the jobs in fp8 wait for it."""

from __future__ import annotations

from orchestrator.core.job import Accelerator
from orchestrator.core.plan import Action
from orchestrator.core.topology import Node
from orchestrator.grid.dependencies import calibration_of, with_implied
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan

WORKLOAD = "fp8-calibration"
GRID = """\
name: night
defaults: {workload: text-generation, model: tiny-chatglm3, engine: optimum-habana}
experiments:
  - name: sizes
    axes: {precision: [bf16, fp8], batch_size: [1, 2], cards: [1, 2]}
"""
CARDS = [
    Node(node_id="n", name="n", accelerator=Accelerator.HPU, card_indices=tuple(range(8))),
]


def test_each_model_and_card_count_is_measured_once_before_its_jobs() -> None:
    """Four jobs in fp8 on one and on two cards wait for two calibrations, in bf16."""
    plan = make_plan(parse_grid(GRID.encode(), "grid"), CARDS, [])
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
    """bf16, another engine, another card, and the calibration itself."""
    jobs = parse_grid(GRID.replace("optimum-habana", "transformers").encode(), "grid").jobs()
    assert with_implied(jobs) == jobs
    measured = with_implied(parse_grid(GRID.encode(), "grid").jobs())
    assert [calibration_of(job) for job in measured if job.workload == WORKLOAD] == [None, None]


def test_where_the_measurement_cannot_run_the_jobs_say_so() -> None:
    """On emulated cards without Gaudi's software neither can."""
    emulated = [Node(**{**_fields(CARDS[0]), "emulated": True})]
    plan = make_plan(parse_grid(GRID.encode(), "grid"), emulated, [])
    assert {item.action for item in plan.jobs} == {Action.UNSUPPORTED}


def _fields(node: Node) -> dict[str, object]:
    return {name: getattr(node, name) for name in Node.__dataclass_fields__}
