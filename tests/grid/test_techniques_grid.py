"""grids/techniques.yaml: every technique once, alone, and none refused without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from grid_cases import vocabulary

from orchestrator.core.plan import Action
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import Grid, load_grid
from orchestrator.planning.planner import make_plan
from workloads.training.techniques import all_techniques
from workloads.training.techniques.strategy import Strategy

SHIPPED = Path(__file__).resolve().parents[2] / "grids" / "techniques.yaml"


@pytest.fixture(scope="module")
def shipped() -> Grid:
    return load_grid(SHIPPED, vocabulary=vocabulary())


def test_every_technique_has_a_row(shipped: Grid) -> None:
    """At least one setting of each differs somewhere from its default; strategies have a grid of
    their own (chatglm3-finetune)."""
    rows = [dict(job.parameters) for job in shipped.jobs()]
    for kind in all_techniques():
        changed = any(
            row[name] != info.default for row in rows for name, info in kind.model_fields.items()
        )
        assert changed != (kind is Strategy), kind.title


@pytest.mark.parametrize("cluster", ["1x4:HPU", "1x4"])
def test_rows_run_or_say_why_not(shipped: Grid, cluster: str) -> None:
    """A third at most cannot be had on emulated Gaudi cards."""
    plan = make_plan(shipped, parse_emulation(cluster, shipped.accelerators()), [])
    assert {item.action for item in plan.jobs} == {Action.RUN, Action.UNSUPPORTED}
    assert all(bool(item.reason) == (item.action is Action.UNSUPPORTED) for item in plan.jobs)
    assert 3 * sum(item.action is Action.UNSUPPORTED for item in plan.jobs) < len(plan.jobs)


def test_each_experiment_has_its_baseline(shipped: Grid) -> None:
    """A row with every technique at its default, to compare the others with."""
    defaults = {
        name: info.default
        for kind in all_techniques()
        if kind is not Strategy
        for name, info in kind.model_fields.items()
    }
    for experiment in ("lora", "full", "gang"):
        rows = [dict(j.parameters) for j in shipped.jobs() if j.experiment == experiment]
        assert any(all(row[name] == value for name, value in defaults.items()) for row in rows)
