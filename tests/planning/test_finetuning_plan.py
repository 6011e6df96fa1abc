"""Fine-tuning in grids: what is refused with its place, what becomes a row, and its metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from grid_cases import grid, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.analysis.samples import metrics_of
from orchestrator.core.errors import GridError
from orchestrator.core.job import Accelerator
from orchestrator.core.plan import Action
from orchestrator.core.topology import parse_emulation
from orchestrator.grid.parser import Grid, load_grid
from orchestrator.planning.planner import make_plan
from workloads.base import Sample
from workloads.training.parallel.layout import model_parallel_size, pipeline_size
from workloads.util.statistics import ratio_interval

HEAD = "name: g\ndefaults: {workload: finetuning, model: tiny-chatglm3}\nexperiments:\n"
SHIPPED = Path(__file__).resolve().parents[2] / "grids" / "chatglm3-finetune.yaml"


def one(body: str) -> Grid:
    return grid(f"{HEAD}  - {{name: e, {body}}}\n")


@pytest.mark.parametrize(
    ("body", "where", "message", "hint"),
    [
        ("rank: 0", "experiments[0].rank", "0: at least 1 is wanted", ""),
        ("method: full, rank: 4", "experiments[0].rank", "method full has no adapter", "leave"),
        ("targets: kproj", "experiments[0].targets", "no linear layer is named kproj", "q_proj"),
        (
            "batch_size: 6, axes: {gradient_accumulation: [1, 2, 4]}",
            "experiments[0].axes.gradient_accumulation[2]",
            "a batch of 6 cannot be cut into 4 equal parts",
            "1, 2, 3, 6",
        ),
        (
            "axes: {method: [full, lora], freeze_layers: [0, 1]}",
            "experiments[0].axes.freeze_layers[1]",
            "beside method: full",
            "method: full",
        ),
        ("precision: fp16", "experiments[0].precision", "plain fp16 ends in NaN", "autocast"),
        ("save_adapter: ../x", "experiments[0].save_adapter", "should match pattern", ""),
    ],
)
def test_what_is_wrong_is_refused_where_it_stands(
    body: str, where: str, message: str, hint: str
) -> None:
    """One problem for one mistake, at the value that is to blame."""
    with pytest.raises(GridError) as caught:
        one(body)
    (problem,) = caught.value.problems
    assert problem.path == where
    assert message in problem.message and hint in problem.hint
    assert problem.line == 4


def test_what_a_device_cannot_do_becomes_a_row() -> None:
    """The same grid runs on one kind of card and says why it does not on the other; a card that
    the CPU emulates has the limits of both."""
    made = one("accelerator: [HPU, GPU], axes: {optimizer: [adamw, adamw-8bit, adamw-8bit-paged]}")
    plan = make_plan(made, parse_emulation("1x1:HPU,1x1:GPU", made.accelerators()), [])
    found = {
        (item.job.accelerator, dict(item.job.parameters)["optimizer"]): (item.action, item.reason)
        for item in plan.jobs
    }
    assert found[Accelerator.HPU, "adamw"] == (Action.RUN, "")
    assert found[Accelerator.GPU, "adamw-8bit"] == (Action.RUN, "")
    action, reason = found[Accelerator.HPU, "adamw-8bit"]
    assert action is Action.UNSUPPORTED and "Gaudi lacks" in reason
    action, reason = found[Accelerator.GPU, "adamw-8bit-paged"]
    assert action is Action.UNSUPPORTED
    assert "bitsandbytes moves" in reason and "on cpu, which emulates" in reason


def test_the_shipped_grid_covers_methods_and_techniques() -> None:
    """Every method, and a dozen rows of techniques; nothing in it is refused for no reason."""
    made = load_grid(SHIPPED, vocabulary=vocabulary())
    jobs = made.jobs()
    trained = [job for job in jobs if job.workload == "finetuning"]
    assert {dict(job.parameters)["method"] for job in trained} == {
        *("full", "lora", "dora", "vera", "qlora", "qat", "qat-lora")
    }
    assert sum(job.experiment in ("techniques", "full") for job in jobs) >= 12
    plan = make_plan(made, parse_emulation("1x8", made.accelerators()), [])
    for item in plan.jobs:
        assert item.action in (Action.RUN, Action.UNSUPPORTED)
        assert bool(item.reason) == (item.action is Action.UNSUPPORTED)


# ------------------------------------------------------------------ metrics of training


def steps(walls: list[float], items: list[int]) -> list[tuple[int, Sample]]:
    return [
        (
            0,
            Sample(
                repeat=n,
                batch=0,
                warmup=n == 0,
                complete=True,
                wall_s=wall,
                cpu_s=wall,
                items=count,
                input_tokens=10 * count,
                output_tokens=0,
                computed_tokens=20 * count,
                loss=9.0 - n,
            ),
        )
        for n, (wall, count) in enumerate(zip(walls, items, strict=True))
    ]


@given(work=st.lists(st.tuples(st.floats(0.01, 10.0), st.integers(1, 64)), min_size=3, max_size=12))
def test_samples_per_second_are_all_samples_over_all_time(work: list[tuple[float, int]]) -> None:
    """Not the mean of the steps' rates, which short steps would dominate; warm-up is left out."""
    metrics = metrics_of(steps([w for w, _ in work], [n for _, n in work]))
    total, items = sum(w for w, _ in work[1:]), sum(n for _, n in work[1:])
    assert metrics.throughput_unit == "samples/s"
    assert metrics.throughput == pytest.approx(items / total)
    assert metrics.total_tokens_per_s == pytest.approx(10 * items / total)
    assert metrics.repeats == len(work) - 1
    assert metrics.loss_first == 9.0 and metrics.loss_last == 10.0 - len(work)
    assert metrics.throughput_low is not None and metrics.throughput_high is not None
    slack = 1e-9 * metrics.throughput
    assert metrics.throughput_low - slack <= metrics.throughput <= metrics.throughput_high + slack


def test_equal_steps_give_the_interval_of_their_rates() -> None:
    """Where all steps do the same, the ratio's interval is (to first order) that of the rates."""
    metrics = metrics_of(steps([1.0, 1.0, 1.01, 0.99, 1.0], [4] * 5))
    rates = [4 / wall for wall in (1.0, 1.01, 0.99, 1.0)]
    mean = sum(rates) / 4
    spread = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / 3 / 4) * 3.182446
    assert metrics.relative_half_width == pytest.approx(spread / mean, rel=1e-2)


def test_one_step_has_a_rate_and_no_interval() -> None:
    """A single timed step says nothing of how much steps vary."""
    metrics = metrics_of(steps([5.0, 2.0], [4, 4]))
    assert (metrics.throughput, metrics.throughput_low) == (2.0, None)
    assert ratio_interval([4], [2.0]) is None


def test_a_loss_that_is_no_number_stays_visible() -> None:
    """It is neither dropped nor replaced."""
    samples = steps([1.0, 1.0, 1.0], [4] * 3)
    samples[-1] = (0, replace(samples[-1][1], loss=math.nan))
    metrics = metrics_of(samples)
    assert metrics.loss_last is not None and math.isnan(metrics.loss_last)
    assert metrics.throughput == 4.0


def test_every_layout_of_the_parallelism_grid_runs() -> None:
    """Eight cards and one global batch in each; the plan notes every pipeline's idle share."""
    made = load_grid(SHIPPED.with_name("parallelism.yaml"), vocabulary=vocabulary())
    plan = make_plan(made, parse_emulation("1x8", made.accelerators()), [])
    assert {item.action for item in plan.jobs} == {Action.RUN}
    jobs = [item.job for item in plan.jobs]
    for job in jobs:
        held = model_parallel_size(dict(job.parameters), job.cards)
        assert int(job.batch_size) * job.cards // held == 16
    shares = {note.rpartition("= ")[2] for note in plan.notes if "idle share" in note}
    assert shares == {"20.0%", "11.1%", "42.9%"}
    assert {pipeline_size(dict(job.parameters), job.cards) for job in jobs} == {1, 2, 4}
