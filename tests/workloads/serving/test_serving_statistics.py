"""Figures of request tables, by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from workloads.serving.client import COLUMNS
from workloads.serving.statistics import (
    METRICS,
    client_figures,
    figures,
    is_tight,
    steady_window,
)


def row(index: int, sent: float, *events: float, **changes: Any) -> dict[str, Any]:
    """A request whose events come at these seconds after it was sent; the last is its end."""
    values = {
        "index": index,
        "worker": 0,
        "planned_s": None,
        "sent_s": sent,
        "first_s": sent + events[0] if events else None,
        "ended_s": sent + events[-1] if events else None,
        "input_tokens": 10,
        "output_tokens": len(events),
        "token_s": list(events),
        "tokens_per_event": [1] * len(events),
        "error": None,
        "status": 200,
        "server": 0,
    }
    return values | changes


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=COLUMNS)


def closed(concurrency: int, rounds: int, took: float = 1.0) -> pa.Table:
    """A closed loop in lockstep: each request has its tokens at 0.25, 0.5 and 1 of its time."""
    return table(
        *(
            row(i, (i // concurrency) * took, 0.25 * took, 0.5 * took, took)
            for i in range(concurrency * rounds)
        )
    )


def test_figures_of_a_load_in_lockstep() -> None:
    requests = closed(concurrency=4, rounds=10)
    window = steady_window(requests, 4)
    assert window == (1.0, 9.0)
    found = figures(requests, window, cards=2)
    assert found["output_tokens_per_s"] == 12 and found["tokens_per_s_per_card"] == 6
    assert found["total_tokens_per_s"] == 52 and found["requests_per_s"] == 4
    assert found["requests_measured"] == 36 and found["window_s"] == 8
    assert found["ttft_mean_s"] == found["ttft_p50_s"] == 0.25
    assert found["tpot_p50_s"] == pytest.approx(0.375)
    assert found["tokens_per_s_per_user"] == pytest.approx(1 / 0.375)
    assert found["itl_mean_s"] == pytest.approx(0.375) and found["latency_p50_s"] == 1.0
    assert found["error_share"] == 0
    assert "ttft_p90_s" not in found and "ttft_p99_s" not in found  # 36 requests
    assert found.keys() <= {metric.name for metric in METRICS}


def test_p99_is_empty_below_459_requests() -> None:
    for rounds, there in ((45, False), (47, True)):
        requests = closed(concurrency=10, rounds=rounds, took=0.1)
        found = figures(requests, steady_window(requests, 10))
        assert found["requests_measured"] == 10 * (rounds - 1)
        assert ("ttft_p99_s" in found) is there and "ttft_p90_s" in found


def test_windows_cut_ramp_up_and_drain() -> None:
    assert steady_window(closed(4, 2), 4) == (0.0, 2.0)  # two rounds: all of it
    # An open loop: from the median latency on until the last is sent.
    requests = table(*(row(i, i * 1.0, 0.5, 2.0) for i in range(20)))
    assert steady_window(requests, None) == (2.0, 19.0)
    slow = table(*(row(i, i * 1.0, 0.5, 30.0) for i in range(20)))
    assert steady_window(slow, None) == (0.0, 49.0)
    assert steady_window(table(), 1) == (0.0, 0.0)
    never = table(row(0, 0.0, error="timeout: never", ended_s=None))
    assert steady_window(never, 1) == (0.0, 0.0)


def test_errors_are_counted_by_kind_and_bring_no_tokens() -> None:
    requests = table(
        row(0, 0.0, 0.5, 1.0),
        row(1, 0.0, 0.5, 1.0, error="failed: HTTP 500: x"),
        row(2, 0.1, error="timeout: 5 s"),
        row(3, 0.1, error="timeout: 5 s"),
        row(4, 0.2, 0.5, 0.9, error="cancelled: time", ended_s=None),
    )
    found = figures(requests, (0.0, 2.0))
    assert found["errors_timeout"] == 2 and found["errors_failed"] == 1
    assert found["error_share"] == 3 / 5 and found["requests_measured"] == 1
    # The cancelled request's tokens were delivered; the failed one's are lost.
    assert found["output_tokens_per_s"] == 2.0 and found["requests_per_s"] == 0.5


def test_tokens_that_share_events_are_counted_by_the_usage() -> None:
    found = figures(table(row(0, 0.0, 0.5, 1.0, output_tokens=8)), (0.0, 1.0))
    assert found["output_tokens_per_s"] == pytest.approx(8)
    assert found["tpot_p50_s"] == pytest.approx(0.5 / 7)


def test_responses_without_streaming_have_a_latency_alone() -> None:
    rows = [row(i, 0.0, ended_s=1.0, output_tokens=6) for i in range(3)]
    found = figures(table(*rows), (0.0, 2.0), {"latency_s": 1.5})
    assert found["output_tokens_per_s"] == 9 and found["latency_p50_s"] == 1.0
    assert found["within_slo"] == 1 and not {"ttft_p50_s", "tpot_p50_s"} & found.keys()
    assert figures(table(*rows), (0.0, 2.0), {"ttft_s": 9.0})["within_slo"] == 0


def test_one_token_has_no_time_between_tokens() -> None:
    found = figures(table(row(0, 0.0, 0.5)), (0.0, 1.0), {"tpot_s": 0.001, "itl_s": 0.001})
    assert "tpot_p50_s" not in found and "itl_p50_s" not in found and found["within_slo"] == 1


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    requests = table(
        row(0, 0.0, 0.1, 0.2, 0.3),
        row(1, 0.0, 0.6, 0.7, 0.8),  # a late first token
        row(2, 0.0, 0.1, 0.5, 0.9),  # slow tokens
        row(3, 0.0, 0.1, 0.11, 0.3),  # one long gap
        row(4, 0.0, error="failed: x"),
    )
    window = (0.0, 2.0)
    for slo, kept in (
        ({"ttft_s": 0.5}, 3),
        ({"ttft_s": 0.5, "tpot_s": 0.15}, 2),
        ({"itl_s": 0.15}, 2),
        ({"ttft_s": 0.5, "itl_s": 0.15}, 1),
    ):
        found = figures(requests, window, slo)
        assert found["goodput_per_s"] == kept / 2 and found["within_slo"] == kept / 5, slo


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 0),
        ({"cpu_s": 9.0}, 1),
        ({"lag_p90_s": 0.0025}, 1),
        ({"lag_p90_s": 0.0015}, 0),
        ({"late_p90_s": 0.02}, 1),
        ({"late_p90_s": 0.005}, 0),
    ],
)
def test_a_client_that_limits_its_measurement_is_flagged(changes: Any, bound: float) -> None:
    summary = {"wall_s": 10.0, "cpu_s": 2.0, "lag_p90_s": 0.0, "late_p90_s": None}
    measured = {"tpot_p50_s": 0.01, "ttft_p50_s": 0.1}
    found = client_figures(summary | changes, measured)
    assert found["client_bound"] == bound
    assert found.keys() <= {metric.name for metric in METRICS}
    # A slow server's tokens hide a lag that a fast one's do not.
    slow = client_figures(summary | {"lag_p90_s": 0.0025}, {"tpot_p50_s": 0.1})
    assert slow["client_bound"] == 0


def test_repeats_are_tight_when_throughput_and_first_tokens_are() -> None:
    def repeats(*pairs: tuple[float, float]) -> list[dict[str, float]]:
        return [{"output_tokens_per_s": t, "ttft_p90_s": f} for t, f in pairs]

    assert is_tight(repeats((100, 1.0), (101, 1.01), (100, 1.0)), 0.95, 0.05)
    assert not is_tight(repeats((100, 1.0), (101, 2.0), (100, 1.0)), 0.95, 0.05)
    assert not is_tight(repeats((100, 1.0), (150, 1.0), (100, 1.0)), 0.95, 0.05)
    assert not is_tight(repeats((100, 1.0)), 0.95, 0.05)
