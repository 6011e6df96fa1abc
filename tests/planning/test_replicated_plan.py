"""Replicates in a grid and in its plan: what they are, what they cost, what is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from orchestrator.core.errors import GridError
from orchestrator.core.plan import Plan
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import Grid, parse_grid
from orchestrator.grid.vocabulary import Vocabulary
from orchestrator.planning.forecast import cost_of_replicates
from orchestrator.planning.planner import card_seconds, make_plan
from orchestrator.scheduler.estimator import PRIOR_START_S
from orchestrator.watch.plan_text import plan_json, print_plan, summary_lines

VOCABULARY = Vocabulary.installed(check_data=False)


def grid(**experiment: Any) -> Grid:
    """Two cells on CPU cards, with more said of the experiment."""
    told = {
        "name": "night",
        "defaults": {"workload": "text-generation", "model": "tiny-chatglm3", "accelerator": "CPU"},
        "experiments": [{"name": "one", "axes": {"batch_size": [1, 2]}, **experiment}],
    }
    return parse_grid(json.dumps(told).encode(), "grid", vocabulary=VOCABULARY)


def plan(asked: Grid) -> Plan:
    """Its plan on four emulated cards."""
    return make_plan(asked, parse_emulation("1x4:CPU", asked.accelerators()), [])


def test_replicates_are_jobs_of_their_own() -> None:
    once, thrice = grid().jobs(), grid(replicates=3).jobs()
    assert thrice[:2] == once
    assert [job.replicate for job in thrice] == [1, 1, 2, 2, 3, 3]
    assert len({job.job_id for job in thrice}) == 6
    assert {job.cell_id for job in thrice} == {job.job_id for job in once}
    assert all(dict(job.parameters) == dict(once[0].parameters) for job in thrice)


@pytest.mark.parametrize("value", [0, -1, 1001, "3", 2.5, None])
def test_a_number_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(GridError, match="replicates"):
        grid(replicates=value)


def test_replicates_count_against_the_most_jobs_of_a_grid() -> None:
    with pytest.raises(GridError, match="1,002,000 jobs"):
        grid(replicates=1000, axes={"batch_size": ["1..1002"]})


def test_replicates_that_would_replace_each_others_adapter_are_refused() -> None:
    with pytest.raises(GridError, match="replicates: 3 with save_adapter"):
        grid(workload="finetuning", replicates=3, axes={}, save_adapter="mine", method="lora")


def test_the_plan_says_what_replicates_cost() -> None:
    once, thrice = plan(grid()), plan(grid(replicates=3))
    cost = cost_of_replicates(thrice)
    assert cost is not None and cost_of_replicates(once) is None
    assert (cost.jobs, cost.fresh_processes) == (4, 2)
    assert cost.card_seconds == pytest.approx(2 * (card_seconds(once) + PRIOR_START_S))
    assert card_seconds(thrice) == pytest.approx(card_seconds(once) + cost.card_seconds)
    assert any("replicates from 2 on are 4 jobs" in line for line in summary_lines(thrice))
    assert not any("replicate" in line for line in summary_lines(once))
    told = json.loads(plan_json(thrice))
    assert told["summary"]["replicates"]["fresh_processes"] == 2
    assert [job.get("replicate", 1) for job in told["jobs"]] == [1, 1, 2, 2, 3, 3]
    text = io.StringIO()
    print_plan(thrice, text)
    assert "replicate" in text.getvalue().splitlines()[3]
    alone = cost_of_replicates(plan(grid(replicates=2, isolation="process")))
    assert alone is not None and (alone.jobs, alone.fresh_processes) == (2, 2)
