"""From raw samples and outcomes to the row: by hand, and by laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurements import attempt, from_table, job, rank, recorded, worker

from orchestrator.analysis.measurement import Provenance, measurement_of, to_microseconds
from orchestrator.analysis.samples import metrics_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Accelerator, State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.topology import Node
from orchestrator.store.codec import to_table
from workloads.base import Item, Result, Sample
from workloads.util.statistics import ratio_interval

NODE = Node(
    node_id="n1",
    name="hpu-1",
    accelerator=Accelerator.HPU,
    card_indices=tuple(range(8)),
    device_name="emulated HPU on CPU",
    emulated=True,
)


def repeats(*walls: float, rank: int = 0, **changes: object) -> list[tuple[int, Sample]]:
    """One batch a repeat, with these wall times."""
    return [
        (rank, sample(repeat=number, wall_s=wall, **changes)) for number, wall in enumerate(walls)
    ]


def measured(record: RecordRow, **changes: object) -> Measurement:
    """The record's row in a fixed run."""
    values: dict = {"run": "night", "invocation_id": "i1", "recorded_at": 2000.0, "nodes": [NODE]}
    return measurement_of(record, **{**values, **changes})


def test_the_interval_of_throughput_by_hand() -> None:
    """100 tokens in 1, 2 and 4 s are 100, 50 and 25 tokens/s: mean 58.33, t interval of three."""
    metrics = metrics_of(repeats(1.0, 2.0, 4.0))
    half = 4.302653 * math.sqrt((41.667**2 + 8.333**2 + 33.333**2) / 2 / 3)
    assert metrics.throughput_high == pytest.approx(175 / 3 + half, rel=1e-4)
    assert metrics.throughput_low == pytest.approx(175 / 3 - half, rel=1e-4)
    assert metrics.relative_half_width == pytest.approx(half / (175 / 3), rel=1e-4)


def test_percentiles_of_steps_and_batches() -> None:
    metrics = metrics_of(
        [
            (0, sample(batch=batch, ttft_s=float(batch), step_s=(0.01, 0.02, 0.03, 0.04, 0.05)))
            for batch in range(61)
        ],
        [
            (0, Item(index=i, input_tokens=1, output_tokens=1, latency_s=float(i)))
            for i in range(101)
        ],
    )
    assert metrics.ttft_s == 30.0 and metrics.ttft_p95_s == 57.0
    assert metrics.tpot_p50_s == 0.03 and metrics.tpot_p95_s == 0.05 and metrics.tpot_p99_s == 0.05
    assert metrics.latency_p50_s == 50.0 and metrics.latency_p95_s == 95.0


@pytest.mark.parametrize(
    ("confidence", "p95", "p99"), [(0.95, 59, 299), (0.99, 90, 459)], ids=["95%", "99%"]
)
def test_no_percentile_that_too_few_samples_support(confidence: float, p95: int, p99: int) -> None:
    for count in (p95 - 1, p95, p99 - 1, p99):
        metrics = metrics_of([(0, sample(step_s=(0.01,) * count))], confidence=confidence)
        assert metrics.tpot_p50_s == 0.01
        assert metrics.tpot_p95_s == (0.01 if count >= p95 else None)
        assert metrics.tpot_p99_s == (0.01 if count >= p99 else None)


def test_training_is_counted_in_samples() -> None:
    first = repeats(2.0, output_tokens=0, loss=4.0) + repeats(
        2.0, output_tokens=0, loss=2.0, rank=1
    )
    second = [(r, replace(s, repeat=1, loss=s.loss and s.loss / 2)) for r, s in first]
    metrics = metrics_of(second + first)
    assert metrics.throughput == metrics.items_per_s == 4.0
    assert metrics.throughput_unit == "samples/s"
    assert metrics.generated_tokens_per_s is None
    assert (metrics.loss_first, metrics.loss_last) == (3.0, 1.5)


def test_a_clock_that_stood_still_divides_nothing() -> None:
    assert metrics_of(repeats(0.0, 0.0)).throughput is None


def steps(walls: list[float], items: list[int]) -> list[tuple[int, Sample]]:
    """Steps of training, of which the first is warm-up and the loss goes down by one each."""
    return [
        (
            0,
            sample(
                repeat=n,
                warmup=n == 0,
                wall_s=wall,
                items=count,
                input_tokens=10 * count,
                output_tokens=0,
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
    metrics = metrics_of(steps([5.0, 2.0], [4, 4]))
    assert (metrics.throughput, metrics.throughput_low) == (2.0, None)
    assert ratio_interval([4], [2.0]) is None


def test_a_loss_that_is_no_number_stays_visible() -> None:
    samples = steps([1.0, 1.0, 1.0], [4] * 3)
    samples[-1] = (0, replace(samples[-1][1], loss=math.nan))
    metrics = metrics_of(samples)
    assert metrics.loss_last is not None and math.isnan(metrics.loss_last)
    assert metrics.throughput == 4.0


def result(**changes: object) -> Result:
    """One rank's result: three equal repeats."""
    values: dict = {
        "samples": tuple(s for _, s in repeats(1.0, 1.0, 1.0)),
        "items": (Item(index=0, input_tokens=5, output_tokens=9, latency_s=0.7),),
        "stop_reason": "confidence",
        "load_s": 2.0,
        "weight_bytes": 1000,
        "peak_host_memory_bytes": 5000,
        "precision_detail": "torch.bfloat16",
        "details": {"library": "x"},
        "synthetic_data": True,
    }
    return Result(**{**values, **changes})


def test_a_successful_attempt() -> None:
    asked = job(batch_size="max")
    tried = attempt(asked, number=2)
    tried = replace(tried, job=replace(asked, batch_size=16))
    real = worker(emulated=False, device_name="Gaudi2", driver_version="1.21.2")
    ended = rank(result=result(), worker=real, jobs_before=3, model_was_resident=True)
    record = replace(recorded(tried, ended), job=asked)
    row = measured(record, provenance=Provenance(git_commit="abc1234", git_dirty=False))
    assert (row.job_id, row.attempt_id) == (asked.job_id, f"{asked.job_id}-2")
    assert (row.batch_size, row.batch_size_requested) == (16, "max")
    assert row.parameters == dict(asked.parameters)
    assert (row.nodes, row.card_indices, row.emulated) == (("hpu-1",), (0,), False)
    assert (row.device_name, row.driver_version) == ("Gaudi2", "1.21.2")
    assert (row.started_at, row.ended_at) == (1000.0, 1010.0)
    assert row.versions == {"python": "3.11.7", "torch": "2.9.0"}
    assert (row.git_commit, row.git_dirty) == ("abc1234", False)
    assert (row.jobs_before, row.model_was_resident, row.worker_pid) == (3, True, 4711)
    assert row.metrics.throughput == 100.0 and row.stop_reason == "confidence"
    assert (row.load_s, row.weight_bytes, row.synthetic_data) == (2.0, 1000, True)
    assert row.samples[0][0] == 0 and len(row.samples) == 3 and len(row.items) == 1
    assert row.failure_class is None
    assert from_table(to_table([row])) == [row]


def test_a_gang_row_has_every_ranks_samples_and_the_largest_figures() -> None:
    tried = attempt(job(cards=2), cards=2)
    larger = rank(1, result(peak_host_memory_bytes=9000, load_s=1.0), ended_at=1020.0)
    row = measured(recorded(tried, larger, rank(0, result())))
    assert row.peak_host_memory_bytes == 9000 and row.load_s == 2.0
    assert [r for r, _ in row.samples] == [0, 0, 0, 1, 1, 1]
    assert row.metrics.throughput == 200.0
    assert (row.nodes, row.card_indices) == (("hpu-1",), (0, 1))
    assert row.ended_at == 1020.0


def test_a_gang_with_a_silent_rank_claims_no_throughput() -> None:
    tried = attempt(job(cards=2), cards=2)
    lost = rank(1, state=State.LOST, worker=None)
    row = measured(recorded(tried, rank(0, result()), lost, state=State.LOST))
    assert row.metrics == Metrics() and len(row.samples) == 3
    assert row.nodes == ("hpu-1",)


def test_a_failure_is_told_with_its_class_tail_and_log() -> None:
    tried = attempt(job())
    failure = Failure(FailureClass.CRASH, "signal 11", log="hpu-1:/l/w.log")
    ended = rank(failure=failure, state=State.FAILED)
    row = measured(recorded(tried, ended, state=State.FAILED))
    assert (row.failure_class, row.failure_tail, row.log) == (
        "crash",
        "signal 11",
        "hpu-1:/l/w.log",
    )
    assert row.metrics == Metrics() and row.driver_version is None


def test_a_job_that_never_ran() -> None:
    record = RecordRow(
        job=job(precision="int4", batch_size="max"),
        state=State.UNSUPPORTED,
        reason="no int4 on hpu",
        final=True,
    )
    row = measured(record, provenance=Provenance(versions={"python": "3.12"}))
    assert row.attempt_id == f"{row.job_id}-0" and row.attempt_number == 0
    assert row.started_at is row.ended_at is row.device_name is None
    assert row.nodes == row.card_indices == ()
    assert row.batch_size is None
    assert row.versions == {"python": "3.12"}
    assert row.emulated is True
    assert measured(record, nodes=[NODE, replace(NODE, emulated=False)]).emulated is False
    assert measured(record, nodes=[]).emulated is False


def test_an_attempt_whose_worker_left_no_word_is_placed_by_its_cards() -> None:
    tried = attempt(job())
    record = recorded(tried, rank(worker=None, state=State.LOST), state=State.LOST)
    row = measured(record)
    assert (row.nodes, row.device_name, row.emulated) == (("hpu-1",), NODE.device_name, True)
    assert measured(record, nodes=[]).nodes == ("n1",)


@given(st.floats(0, 4e9))
def test_times_survive_the_table(seconds: float) -> None:
    time = to_microseconds(seconds)
    assert time is not None and abs(time - seconds) < 1e-6
    record = RecordRow(job=job(), state=State.NOT_STARTED, reason="", final=True)
    (back,) = from_table(to_table([measured(record, recorded_at=seconds)]))
    assert back.recorded_at == time
