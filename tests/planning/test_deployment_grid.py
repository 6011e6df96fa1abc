"""grids/deployment.yaml: one model through all its forms, each after what it is made from."""

from __future__ import annotations

from pathlib import Path

from orchestrator.core.plan import Action
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import load_grid
from orchestrator.planning.planner import make_plan

SHIPPED = Path(__file__).resolve().parents[2] / "grids" / "deployment.yaml"


def test_each_form_waits_for_what_it_is_made_from() -> None:
    """Edges from training to smaller models, from those to their rows, from the measured ranges to
    the static graph; one reference, of the trained model, is held against all."""
    grid = load_grid(SHIPPED)
    planned = make_plan(grid, parse_emulation("1x2:CPU", grid.accelerators()), []).jobs
    assert {item.action for item in planned} == {Action.RUN}
    saved, needs = {}, {}
    for item in planned:
        given = dict(item.job.parameters)
        saved[item.job.job_id] = given.get("save_model") or given.get("save_calibration")
        needs[saved[item.job.job_id]] = item.needs
    made = ("sparse", "student", "narrow", "int8", "int4", "ranges")
    assert needs.pop("deployed") == ()
    for name in made:
        assert [saved[job_id] for job_id in needs[f"deployed-{name}"]] == ["deployed"]
    served = [item for item in planned if item.job.workload == "text-generation"]
    assert {item.job.model for item in served} == {
        "deployed",
        *(f"deployed-{name}" for name in made if name != "ranges"),
    }
    for item in served:
        calibration = dict(item.job.parameters).get("calibration")
        wanted = {"deployed", item.job.model, *([calibration] if calibration else [])}
        assert {saved[job_id] for job_id in item.needs} == wanted
        assert len(set(item.needs)) == len(item.needs)
    (reference,) = [item for item in planned if item.job.workload == "quality-reference"]
    assert reference.job.model == "deployed"
    assert {item.after for item in served} == {(reference.job.job_id,)}
