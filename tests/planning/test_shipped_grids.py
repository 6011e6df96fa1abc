"""The grids that come with Nightgrid: what each is there to show is planned, or says why not."""

from __future__ import annotations

from pathlib import Path

from grid_cases import vocabulary

from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import Grid, load_grid
from orchestrator.planning.planner import make_plan
from workloads.training.techniques import all_techniques
from workloads.training.techniques.strategy import Strategy

GRIDS = Path(__file__).resolve().parents[2] / "grids"


def shipped(name: str) -> Grid:
    return load_grid(GRIDS / f"{name}.yaml", vocabulary=vocabulary())


def planned(made: Grid, cluster: str) -> tuple[PlannedJob, ...]:
    """The plan's jobs; those that do not run say why, and no others say anything."""
    jobs = make_plan(made, parse_emulation(cluster, made.accelerators()), []).jobs
    for item in jobs:
        assert item.action in (Action.RUN, Action.UNSUPPORTED)
        assert bool(item.reason) == (item.action is Action.UNSUPPORTED)
    return jobs


def test_each_form_waits_for_what_it_is_made_from() -> None:
    jobs = planned(load_grid(GRIDS / "deployment.yaml"), "1x2:CPU")
    assert {item.action for item in jobs} == {Action.RUN}
    saved, needs = {}, {}
    for item in jobs:
        given = dict(item.job.parameters)
        saved[item.job.job_id] = given.get("save_model") or given.get("save_calibration")
        needs[saved[item.job.job_id]] = item.needs
    made = ("sparse", "student", "narrow", "int8", "int4", "ranges")
    assert needs.pop("deployed") == ()
    for name in made:
        assert [saved[job_id] for job_id in needs[f"deployed-{name}"]] == ["deployed"]
    served = [item for item in jobs if item.job.workload == "text-generation"]
    assert {item.job.model for item in served} == {
        "deployed",
        *(f"deployed-{name}" for name in made if name != "ranges"),
    }
    for item in served:
        calibration = dict(item.job.parameters).get("calibration")
        wanted = {"deployed", item.job.model, *([calibration] if calibration else [])}
        assert {saved[job_id] for job_id in item.needs} == wanted
        assert len(set(item.needs)) == len(item.needs)
    (reference,) = [item for item in jobs if item.job.workload == "quality-reference"]
    assert reference.job.model == "deployed"
    assert {item.after for item in served} == {(reference.job.job_id,)}


def test_every_technique_has_a_row_and_each_experiment_its_baseline() -> None:
    """Strategies have a grid of their own (chatglm3-finetune)."""
    jobs = shipped("techniques").jobs()
    rows = [dict(job.parameters) for job in jobs]
    for kind in all_techniques():
        changed = any(
            row[name] != info.default for row in rows for name, info in kind.model_fields.items()
        )
        assert changed != (kind is Strategy), kind.title
    defaults = {
        name: info.default
        for kind in all_techniques()
        if kind is not Strategy
        for name, info in kind.model_fields.items()
    }
    for experiment in ("lora", "full", "gang"):
        own = [row for row, job in zip(rows, jobs, strict=True) if job.experiment == experiment]
        assert any(all(row[name] == value for name, value in defaults.items()) for row in own)
