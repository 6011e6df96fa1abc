"""Plans: what becomes of each job and why, on which cards, how it is printed, how fast."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from core_cases import a_past_row
from grid_cases import HEAD, experiments, grid, one
from rich.console import Console

from orchestrator.cli.main import main
from orchestrator.core.errors import ClusterError, GridError
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.plan import Action, PastRow, Plan
from orchestrator.core.topology import Node, assumed_servers, parse_emulation
from orchestrator.grid.dependencies import Thing
from orchestrator.grid.parser import Grid
from orchestrator.planning.forecast import cost_of_replicates
from orchestrator.planning.planner import card_seconds, make_plan
from orchestrator.scheduler.estimator import PRIOR_START_S
from orchestrator.util.format import seconds
from orchestrator.watch.plan_text import plan_json, print_plan, summary_lines
from workloads.models.precision import support
from workloads.models.products import Saving

HPU, GPU, CPU = Accelerator.HPU, Accelerator.GPU, Accelerator.CPU


@dataclass(frozen=True)
class Flat:
    """An estimator that gives every job the same time."""

    total_s: float = 10.0
    load_s: float = 4.0

    def estimate(self, job: Job) -> Flat:
        return self


def past(job: Job, state: State, **changes: bool) -> PastRow:
    return a_past_row(job, state=state, reason="it broke", **changes)


EMULATED = parse_emulation("1x8:HPU", ())


def test_a_row_of_other_work_than_its_settings_mean_now_is_not_reused() -> None:
    made = one("precision: bf16\nengine: transformers")
    (job,) = made.jobs()
    old = a_past_row(job, state=State.SUCCEEDED, emulated=True, outdated="before work version 2: x")
    (planned,) = make_plan(made, EMULATED, [old]).jobs
    assert planned.action is Action.RUN
    (planned,) = make_plan(made, EMULATED, [old, past(job, State.SUCCEEDED, emulated=True)]).jobs
    assert planned.action is Action.REUSE


def decide(*rows: tuple[State, bool], nodes: list[Node] = EMULATED, **options: bool) -> Action:
    """The action for the one job of a grid with these earlier rows (state, emulated)."""
    made = one("precision: bf16\nengine: transformers")
    (job,) = made.jobs()
    history = [past(job, state, emulated=emulated) for state, emulated in rows]
    (planned,) = make_plan(made, nodes, history, **options).jobs
    return planned.action


@pytest.mark.parametrize(
    ("rows", "action"),
    [
        ((), Action.RUN),
        ((State.SUCCEEDED,), Action.REUSE),
        ((State.FAILED,), Action.SKIP),
        ((State.TIMED_OUT,), Action.SKIP),
        ((State.OUT_OF_MEMORY,), Action.SKIP),
        ((State.PRUNED,), Action.SKIP),
        ((State.LOST,), Action.RUN),
        ((State.NOT_STARTED,), Action.RUN),
        ((State.UNSUPPORTED,), Action.RUN),
        ((State.RUNNING,), Action.RUN),
        ((State.FAILED, State.SUCCEEDED), Action.REUSE),
        ((State.SUCCEEDED, State.FAILED), Action.SKIP),  # as on today's software
        ((State.SUCCEEDED, State.LOST), Action.REUSE),
    ],
)
def test_the_newest_row_decides(rows: tuple[State, ...], action: Action) -> None:
    assert decide(*((state, True) for state in rows)) is action


def test_a_failure_is_quoted_with_the_option_that_tries_again_if_its_row_is_final() -> None:
    made = one("precision: bf16")
    row = past(made.jobs()[0], State.OUT_OF_MEMORY)
    reason = make_plan(made, EMULATED, [row]).jobs[0].reason
    assert reason == "OUT_OF_MEMORY earlier: it broke; --retry-failed tries it again"
    assert make_plan(made, EMULATED, [replace(row, final=False)]).jobs[0].action is Action.RUN


@pytest.mark.parametrize(
    ("before", "now", "action"),
    [
        ("model files-1, dataset files-2", "files-1", Action.REUSE),
        ("model files-1, dataset files-2", "files-3", Action.RUN),
        ("dataset files-2", "files-3", Action.REUSE),  # of an earlier version, which did not say
        ("model files-1", "", Action.REUSE),  # the files are not here
    ],
)
def test_what_was_measured_on_other_files_is_measured_anew(
    before: str, now: str, action: Action
) -> None:
    made = one("precision: bf16\nengine: transformers\nmodel: /srv/m")
    row = replace(a_past_row(made.jobs()[0]), took=before)

    def saving_of(thing: Thing) -> Saving:
        return Saving(content=now if thing[0] == "model" else "")

    (planned,) = make_plan(made, EMULATED, [row], saving_of=saving_of).jobs
    assert planned.action is action
    assert ("--keep-changed" in planned.reason) == (action is Action.RUN)


@pytest.mark.parametrize("spelling", ["/srv/m/", "/srv//m", "/srv/x/../m"])
def test_a_row_of_another_spelling_of_a_path_counts(spelling: str) -> None:
    made = one("precision: bf16\nengine: transformers\nmodel: /srv/m/")
    (job,) = made.jobs()
    assert job.model == "/srv/m"
    old = replace(job, model=spelling)
    (planned,) = make_plan(made, EMULATED, [a_past_row(old)]).jobs
    assert planned.action is Action.REUSE and planned.job.job_id == old.job_id


def test_emulated_rows_never_stand_in_for_real_ones() -> None:
    real = assumed_servers([HPU])
    assert decide((State.SUCCEEDED, True), nodes=real) is Action.RUN
    assert decide((State.SUCCEEDED, False), nodes=real) is Action.REUSE
    assert decide((State.SUCCEEDED, False)) is Action.RUN
    assert decide((State.SUCCEEDED, True), (State.FAILED, False)) is Action.REUSE


def test_retry_failed_and_force() -> None:
    assert decide((State.FAILED, True), retry_failed=True) is Action.RUN
    assert decide((State.SUCCEEDED, True), retry_failed=True) is Action.REUSE
    assert decide((State.SUCCEEDED, True), force=True) is Action.RUN


def test_unsupported_precisions_carry_the_tables_reason_even_if_forced() -> None:
    made = one("engine: transformers\naxes: {precision: [fp32, fp16, bf16, fp8, int8, int4]}")
    rows = [past(job, State.SUCCEEDED, emulated=False) for job in made.jobs()]
    for planned in make_plan(made, assumed_servers([HPU]), rows, force=True).jobs:
        entry = support(planned.job.precision, "hpu")
        assert (planned.action is Action.UNSUPPORTED) == (not entry.supported)
        assert entry.reason in planned.reason


def test_packages_of_precisions_that_will_run_are_imported_once_on_a_processor() -> None:
    """Before workers are forked: of int4, and not of fp8, which does not run on this card."""
    made = one("engine: transformers\naxes: {precision: [fp32, fp8, int4]}")
    plan = make_plan(made, EMULATED, [])
    assert plan.host_packages == support("int4", "cpu").packages == ("bitsandbytes",)


def test_an_emulated_card_must_also_manage_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.planning import planner as planning

    def table(precision: str, device: str, *asked: str) -> object:
        if device == "cpu":
            return replace(support("fp32", "cpu"), supported=False, reason="no such cpu path")
        return support(precision, device, *asked)

    monkeypatch.setattr(planning, "support", table)
    made = one("precision: bf16")
    assert make_plan(made, assumed_servers([HPU]), []).jobs[0].action is Action.RUN
    planned = make_plan(made, EMULATED, []).jobs[0]
    assert planned.action is Action.UNSUPPORTED
    assert planned.reason == "bf16 on cpu, which emulates here: no such cpu path"


def test_a_kind_of_card_that_no_node_has_makes_rows_that_say_so() -> None:
    made = one("accelerator: [HPU, GPU]")
    hpu, gpu = make_plan(made, EMULATED, []).jobs
    assert hpu.action is Action.RUN
    assert gpu.action is Action.UNSUPPORTED
    assert gpu.reason == "no node has GPU cards; there is: HPU"


def test_a_cluster_with_none_of_the_grids_cards_is_refused() -> None:
    with pytest.raises(ClusterError, match="asks for GPU cards and the nodes have HPU"):
        make_plan(one("accelerator: GPU"), EMULATED, [])


def test_card_counts_are_checked_against_the_nodes() -> None:
    made = one("axes: {cards: [8, 16]}")
    assert len(make_plan(made, parse_emulation("2x8", [HPU]), []).jobs) == 2
    with pytest.raises(GridError, match="16 HPU") as caught:
        make_plan(made, EMULATED, [])
    assert caught.value.problems[0].hint == "a job can have 1, 2, 4, 8 of them"


def test_problems_with_card_counts_come_in_the_order_of_the_file() -> None:
    counts = ([32, 16, 64], [24, 9])
    made = experiments(
        "".join(f"  - {{name: e{n}, axes: {{cards: {each}}}}}\n" for n, each in enumerate(counts))
    )
    with pytest.raises(GridError) as caught:
        make_plan(made, EMULATED, [])
    said = [problem.message.split()[4] for problem in caught.value.problems]
    assert said == ["32", "16", "64", "24", "9"]


@pytest.mark.parametrize(
    ("spec", "named", "nodes"),
    [
        ("2x8", [], ["hpu-1 8", "hpu-2 8"]),
        ("2x8", [GPU], ["gpu-1 8", "gpu-2 8"]),
        ("3x2", [HPU, CPU], ["hpu-1 2", "cpu-1 2", "hpu-2 2"]),
        ("2x8:hpu, 1x4:GPU", [CPU], ["hpu-1 8", "hpu-2 8", "gpu-1 4"]),
        ("1x1:GPU,2x2", [HPU, GPU], ["gpu-1 1", "hpu-1 2", "gpu-2 2"]),
    ],
)
def test_emulated_nodes(spec: str, named: list[Accelerator], nodes: list[str]) -> None:
    made = parse_emulation(spec, named)
    assert [f"{node.name} {len(node.cards)}" for node in made] == nodes
    assert len({node.node_id for node in made}) == len(made)
    assert all(node.emulated and "emulated" in node.device_name for node in made)


def test_a_single_cpu_card_is_no_emulation() -> None:
    assert [n.emulated for n in parse_emulation("1x1:CPU", [])] == [False]
    assert [n.emulated for n in parse_emulation("1x2:CPU", [])] == [True]
    assert [n.emulated for n in parse_emulation("1x1:CPU,1x1:HPU", [])] == [True, True]


def planned(body: str, spec: str) -> Plan:
    made = one(body)
    nodes = parse_emulation(spec, made.accelerators())
    return make_plan(made, nodes, [], estimator=Flat())  # type: ignore[arg-type]


def printed(plan: Plan, *, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, no_color=True)
    print_plan(plan, file, console if terminal else None)
    return file.getvalue()


def test_the_listing_has_every_job_and_uncut_reasons() -> None:
    plan = planned("axes: {precision: [fp32, int8], batch_size: 1..3}", "1x8:HPU")
    text = printed(plan, terminal=False)
    assert "\x1b" not in text
    for item in plan.jobs:
        (line,) = [line for line in text.splitlines() if line.startswith(item.job.job_id)]
        assert line.endswith(item.reason or str(item.action))
    assert "3 run, 0 reuse, 0 skip, 3 unsupported" in text
    low, high = seconds(plan.duration.low_s), seconds(plan.duration.high_s)
    assert f"{low} to {high} (most likely" in text and "; 0.01 card-hours" in text


def test_the_questions_of_a_grid_are_listed() -> None:
    made = grid(
        f"{HEAD}  - {{name: e}}\nquestions: [{{best: throughput, for: {{precision: bf16}}}}]\n"
    )
    plan = make_plan(made, EMULATED, [], estimator=Flat())  # type: ignore[arg-type]
    question = "Best throughput for precision bf16"
    assert f"question 1: {question}\n" in printed(plan, terminal=False)
    assert json.loads(plan_json(plan))["questions"] == [question]


def test_what_all_jobs_share_is_said_once() -> None:
    text = printed(planned("axes: {batch_size: [1, 2]}", "1x8:HPU"), terminal=False)
    heading = next(line for line in text.splitlines() if line.startswith("job_id"))
    assert heading.split() == ["job_id", "batch_size", "estimate", "action", "reason"]
    (shared,) = (line for line in text.splitlines() if line.startswith("Every job"))
    assert shared.startswith(
        "Every job: experiment e, workload text-generation, model tiny-chatglm3"
    )
    assert ", attention sdpa," in shared and "null" not in shared and '"' not in shared


def test_each_workload_has_a_table_with_what_varies_in_it() -> None:
    made = grid(
        HEAD
        + """
  - {name: a, axes: {batch_size: [1, 2]}}
  - {name: b, workload: finetuning, method: lora, axes: {padding: [dynamic, fixed]}}
  - {name: c, workload: finetuning, method: lora, gradient_checkpointing: true}
  - {name: d, workload: finetuning, method: lora, logits: learned}
  - {name: e, workload: finetuning, method: lora, attention: eager}
"""
    )
    nodes = parse_emulation("1x8:HPU", made.accelerators())
    plan = make_plan(made, nodes, [], estimator=Flat())  # type: ignore[arg-type]
    text = printed(plan, terminal=False)
    first, second = (line for line in text.splitlines() if line.startswith("job_id"))
    assert first.split() == ["job_id", "batch_size", "estimate", "action", "reason"]
    assert second.split() == ["job_id", "experiment", "settings", "estimate", "action", "reason"]
    assert "\ntext-generation: 2 jobs\n" in text and "\nfinetuning: 5 jobs\n" in text
    assert "gradient_checkpointing true" in text and max(map(len, second)) < 120


def test_a_terminal_folds_reasons_and_loses_none_of_their_words() -> None:
    plan = planned("precision: int8", "1x8:HPU")
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(plan, terminal=True))
    words = Counter(text.split())
    assert not Counter(plan.jobs[0].reason.split()) - words


def test_json_has_every_field_of_every_job() -> None:
    plan = planned("axes: {precision: [fp32, int8], cards: [1, 2]}", "2x8:HPU")
    data = json.loads(plan_json(plan))
    assert data["summary"]["jobs"] == 4
    assert data["summary"]["unsupported"] == 2
    assert [node["name"] for node in data["nodes"]] == ["hpu-1", "hpu-2"]
    for item, row in zip(plan.jobs, data["jobs"], strict=True):
        assert row["job_id"] == item.job.job_id
        assert {key: row[key] for key in item.job.identity()} == item.job.identity()
        assert row["action"] == item.action.value
        assert row["reason"] == item.reason
        assert row["estimate_s"] == item.estimate_s
        assert row["measure"]["max_repeats"] == item.job.measure.max_repeats
    assert [row["card_sets"] for row in data["jobs"]] == [16, 8, 16, 8]


def test_notes_of_the_grid_and_faults_of_hosts_with_their_nodes_reach_the_reader() -> None:
    nodes = [replace(node, faults=("GPU2 is left out: lost",)) for node in EMULATED]
    made = grid(HEAD + "  - {name: a}\n  - {name: b}\n")
    plan = make_plan(made, nodes, [], estimator=Flat(), host_notes=["little memory"])  # type: ignore[arg-type]
    names = ", ".join(node.name for node in EMULATED)
    assert plan.host_notes == ("little memory", f"{names}: GPU2 is left out: lost")
    text = printed(plan, terminal=False)
    assert f"note: {names}: GPU2 is left out: lost" in text and "planned once" in text
    data = json.loads(plan_json(plan))
    assert data["host_notes"] == list(plan.host_notes) and data["notes"] == list(made.notes)


def test_rows_of_the_run_are_taken_into_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from measurements import row

    from orchestrator.store.store import Store

    path = tmp_path / "g.yaml"
    path.write_text(HEAD + "  - name: e\n")
    arguments = ["plan", str(path), "--emulate", "1x8:HPU", "--results", str(tmp_path), "--json"]

    def actions(*more: str) -> list[str]:
        assert main([*arguments, *more]) == 0
        return [job["action"] for job in json.loads(capsys.readouterr().out)["jobs"]]

    assert actions() == ["run"]
    (job,) = one("axes: {}").jobs()
    measured = row(job_id=job.job_id, state=State.SUCCEEDED, final=True, emulated=True)
    with Store(tmp_path, "g") as store:
        store.append(measured)
    assert actions() == ["reuse"]
    assert actions("--force") == ["run"]
    assert actions("--run", "another") == ["run"]


# ---------------------------------------------------------------- replicates


def cells(more: str = "") -> Grid:
    """Two cells on CPU cards, with more said of the experiment."""
    axes = "" if "axes" in more else "axes: {batch_size: [1, 2]}\n"
    return one(f"accelerator: CPU\n{axes}{more}")


def on_cpus(made: Grid) -> Plan:
    return make_plan(made, parse_emulation("1x4:CPU", made.accelerators()), [])


def test_replicates_are_jobs_of_their_own() -> None:
    once, thrice = cells().jobs(), cells("replicates: 3").jobs()
    assert thrice[:2] == once
    assert [job.replicate for job in thrice] == [1, 1, 2, 2, 3, 3]
    assert len({job.job_id for job in thrice}) == 6
    assert {job.cell_id for job in thrice} == {job.job_id for job in once}
    assert all(dict(job.parameters) == dict(once[0].parameters) for job in thrice)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        *((f"replicates: {value}", "replicates") for value in ("0", "1001", "'3'", "2.5", "null")),
        ("replicates: 1000\naxes: {batch_size: 1..1002}", "1,002,000 jobs"),
        (
            "workload: finetuning\nreplicates: 3\naxes: {}\nsave_adapter: mine\nmethod: lora",
            "replicates: 3 with save_adapter",  # each would replace the others'
        ),
    ],
)
def test_replicates_that_cannot_be_are_refused(more: str, message: str) -> None:
    with pytest.raises(GridError, match=message):
        cells(more)


def test_the_plan_says_what_replicates_cost() -> None:
    once, thrice = on_cpus(cells()), on_cpus(cells("replicates: 3"))
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
    assert "replicate" in printed(thrice, terminal=False).splitlines()[3]
    alone = cost_of_replicates(on_cpus(cells("replicates: 2\nisolation: process")))
    assert alone is not None and (alone.jobs, alone.fresh_processes) == (2, 2)
