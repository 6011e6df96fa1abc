"""The data that the page carries for its scripts: rows by column, prompts, and spans of cards.

Ten thousand rows must open fast, so columns are stored once each, repeated texts are kept in a
dictionary, numbers have six significant figures, and what grows without bound is capped: prompts
of the scatter are sampled, outputs and log tails have a budget. What was left out is counted, and
the page says so; nothing is lost, since the Parquet tables keep all of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from orchestrator.analysis.metrics import titled
from orchestrator.analysis.rankings import memory_kind, peak_memory_bytes
from orchestrator.analysis.selection import described, precision_rank
from orchestrator.analysis.summary import SHORT_STATE, STATE_MEANING, Summary
from orchestrator.analysis.timeline import Lane, Span, Timeline
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.util.format import finite, one_line, tail, visible

MOST_POINTS = 6_000
MOST_SPANS = 20_000  # of the timeline; with more, those of a moment are drawn as one
SLOWEST_KEPT = 100  # the slowest prompts are always shown: they are what one looks for
MOST_TEXT = 1_500_000  # characters of outputs, and as many of log tails
LONGEST_OUTPUT = 600
LONGEST_TAIL = 4_000

Json = dict[str, object]
Read = Callable[[Measurement], object]


def payload(
    summary: Summary,
    measurements: Sequence[Measurement],
    listed: Sequence[Measurement] | None = None,
    points: Json | None = None,
) -> Json:
    """Everything the scripts draw from, as one JSON-able object.

    Args:
        summary: what the page says.
        measurements: all rows that ``summary`` was made from.
        listed: the rows that the page lists, in their order; None: all of the summary.
        points: their ``prompt_points``, where these were made already.
    """
    rows = summary.rows if listed is None else listed
    index = {row.job_id: number for number, row in enumerate(rows)}
    return {
        "run": visible(summary.run),
        "count": len(rows),
        "states": {
            str(s): {"short": SHORT_STATE[s], "meaning": STATE_MEANING[s]} for s in SHORT_STATE
        },
        "precisions": sorted({row.precision for row in rows}, key=precision_rank),
        "labels": {
            "precision": any(label.precision for label in summary.labels.values()),
            "batch": any(label.batch for label in summary.labels.values()),
        },
        "columns": _columns(summary, measurements, rows),
        "scatter": prompt_points(rows) if points is None else points,
        "timeline": _timeline(summary, index),
    }


def _columns(
    summary: Summary, measurements: Sequence[Measurement], rows: Sequence[Measurement]
) -> Json:
    """Columns by name: ``{"v": […]}`` of numbers, ``{"d": […], "c": […]}`` of coded texts."""
    attempts: dict[str, int] = {}
    for row in measurements:
        if row.started_at is not None:
            attempts[row.job_id] = attempts.get(row.job_id, 0) + 1
    shared_settings, labels = summary.settings, summary.labels
    texts: dict[str, Read] = {
        "state": lambda r: str(r.state),
        # A label is put together again (``data.js``): each is another, its parts are few.
        "before": lambda r: f"{labels[r.job_id].where} {labels[r.job_id].work}".strip(),
        "after": lambda r: labels[r.job_id].rest,
        "experiment": lambda r: r.experiment,
        "workload": lambda r: r.workload,
        "model": lambda r: r.model,
        "dataset": lambda r: r.dataset,
        "device": lambda r: shared_settings[r.job_id].where,
        "precision": lambda r: r.precision,
        "batch": lambda r: r.batch_size_requested,
        "engine": lambda r: r.engine,
        "isolation": lambda r: r.isolation,
        "parameters": lambda r: described(dict(shared_settings[r.job_id].parameters)),
        "unit": lambda r: r.metrics.throughput_unit,
        "memory_kind": memory_kind,
        "where": cells.where,
        "reason": lambda r: one_line(r.reason, 900),
        "flags": lambda r: one_line("; ".join(map(str, summary.raised.get(r.job_id, ()))), 900),
        "failure_class": lambda r: r.failure_class or "",
        "stop_reason": lambda r: r.stop_reason or "",
        "warm_up": cells.warm_up,
        "energy_source": lambda r: r.metrics.energy_source or "",
        "precision_detail": lambda r: r.precision_detail or "",
        "driver": lambda r: r.driver_version or "",
        "commit": _commit,
        "versions": lambda r: described(r.versions),
        "details": lambda r: one_line(described({**titled(r), **r.details}), 900),
        "log": lambda r: one_line(r.log or "", 300) if r.state is not State.SUCCEEDED else "",
    }
    numbers: dict[str, Read] = {
        "cards": lambda r: r.cards,
        "batch_size": lambda r: r.batch_size,
        "throughput": lambda r: r.metrics.throughput,
        "low": lambda r: r.metrics.throughput_low,
        "high": lambda r: r.metrics.throughput_high,
        "total_rate": lambda r: r.metrics.total_tokens_per_s,
        "repeats": lambda r: r.metrics.repeats or None,
        "ttft": lambda r: r.metrics.ttft_s,
        "tpot50": lambda r: r.metrics.tpot_p50_s,
        "tpot95": lambda r: r.metrics.tpot_p95_s,
        "tpot99": lambda r: r.metrics.tpot_p99_s,
        "latency50": lambda r: r.metrics.latency_p50_s,
        "latency95": lambda r: r.metrics.latency_p95_s,
        "memory": peak_memory_bytes,
        "weights": lambda r: r.weight_bytes,
        "parameter_count": lambda r: r.parameter_count,
        "load": lambda r: r.load_s,
        "compile": lambda r: r.compile_s,
        "warmup": lambda r: r.warmup_s,
        "measured": lambda r: r.metrics.measure_s,
        "energy": lambda r: r.metrics.energy_j,
        "power": lambda r: r.metrics.power_w,
        "per_joule": lambda r: r.metrics.work_per_joule,
        "attempts": lambda r: attempts.get(r.job_id, 0),
        "started": lambda r: r.started_at and round(r.started_at, 1),
        "duration": _duration,
        "jobs_before": lambda r: r.jobs_before,
        "threads": lambda r: r.threads,
        "niceness": lambda r: r.niceness,
        "emulated": lambda r: int(r.emulated),
        "random": lambda r: None if r.random_weights is None else int(r.random_weights),
        "synthetic": lambda r: None if r.synthetic_data is None else int(r.synthetic_data),
        "resident": lambda r: None if r.model_was_resident is None else int(r.model_was_resident),
    }
    columns: Json = {"job_id": {"v": [row.job_id for row in rows]}}
    for name, read in texts.items():
        columns[name] = _coded(visible(str(read(row))) for row in rows)
    for name, read in numbers.items():
        values = [_number(read(row), exact=name == "started") for row in rows]
        if any(value is not None for value in values):
            columns[name] = {"v": values}
    columns["tail"] = _coded(_within_budget(map(_tail, rows)))
    columns["outputs"] = _coded(_within_budget(map(_outputs, rows)))
    return columns


def _number(value: object, *, exact: bool) -> float | int | None:
    if not isinstance(value, (int, float)):
        return None
    return finite(value, 15 if exact else 6)


def _coded(texts: Iterable[str]) -> Json:
    codes: dict[str, int] = {}
    return {"c": [codes.setdefault(text, len(codes)) for text in texts], "d": list(codes)}


def _within_budget(texts: Iterable[str]) -> Iterable[str]:
    """The texts; once the distinct ones exceed the budget, a note replaces every new one."""
    known: set[str] = set()
    spent = 0
    for text in texts:
        if text and text not in known:
            if spent + len(text) > MOST_TEXT:
                yield "Left out of the page for its size; the Parquet tables have it."
                continue
            known.add(text)
            spent += len(text)
        yield text


def _tail(row: Measurement) -> str:
    return tail(row.failure_tail or "", LONGEST_TAIL)


def _outputs(row: Measurement) -> str:
    texts = [visible(item.output_text) for _, item in row.items if item.output_text is not None]
    return "\x1e".join(
        text if len(text) <= LONGEST_OUTPUT else text[:LONGEST_OUTPUT] + "…" for text in texts
    )


def _commit(row: Measurement) -> str:
    if not row.git_commit:
        return ""
    return row.git_commit[:12] + (" with uncommitted changes" if row.git_dirty else "")


def _duration(row: Measurement) -> float | None:
    if row.started_at is None or row.ended_at is None:
        return None
    return row.ended_at - row.started_at


def prompt_points(rows: Sequence[Measurement]) -> Json:
    """Prompts as columns: number of the row, input and output tokens, latency in seconds."""
    every = [
        (item.latency_s, number, item.input_tokens, item.output_tokens)
        for number, row in enumerate(rows)
        if row.state is State.SUCCEEDED
        for _, item in row.items
        if finite(item.latency_s) is not None
    ]
    shown = every
    if len(every) > MOST_POINTS:
        order = sorted(range(len(every)), key=lambda i: every[i], reverse=True)
        # A random sample with a fixed seed: the same rows always give the same page, and no
        # regularity of the dataset's order can fall in step with it.
        rest = random.Random(0).sample(order[SLOWEST_KEPT:], MOST_POINTS - SLOWEST_KEPT)
        shown = [every[i] for i in sorted(order[:SLOWEST_KEPT] + rest)]
    return {
        "total": len(every),
        "row": [point[1] for point in shown],
        "input": [point[2] for point in shown],
        "output": [point[3] for point in shown],
        "latency": [finite(point[0], 5) for point in shown],
    }


def _timeline(summary: Summary, index: dict[str, int]) -> Json:
    """Lanes and their spans; times in seconds since the first start. Where spans are too many to
    be told apart, those of a moment that ended alike are one, and ``jobs`` says of how many."""
    timeline = summary.timeline
    origin = timeline.windows[0][0] if timeline.windows else 0.0
    states = [str(state) for state in SHORT_STATE]
    shown = shown_spans(timeline)
    spans = [(n, span) for n, span, _ in shown]
    jobs = [number for _, _, number in shown] if len(spans) < _spans(timeline) else []
    if jobs:
        index = {}
    told: Json = {
        "origin": round(origin, 3),
        "windows": [[round(a - origin, 2), round(b - origin, 2)] for a, b in timeline.windows],
        "lanes": [
            {
                "node": visible(lane.node),
                "card": lane.card,
                "kind": lane.accelerator,
            }
            for lane in timeline.lanes
        ],
        "lane": [number for number, _ in spans],
        "start": [round(span.start - origin, 2) for _, span in spans],
        "end": [round(span.end - origin, 2) for _, span in spans],
        "row": [index.get(span.row.job_id, -1) for _, span in spans],
        "state": [states.index(str(span.row.state)) for _, span in spans],
        "attempt": [span.row.attempt_number for _, span in spans],
        "probe": [int(span.row.purpose != "measure") for _, span in spans],
    }
    return told | ({"jobs": jobs} if jobs else {})


def shown_spans(timeline: Timeline) -> list[tuple[int, Span, int]]:
    """The number of the lane, the span and the count of its jobs, merged where there are too many
    spans to be told apart."""
    lanes = timeline.lanes
    if _spans(timeline) <= MOST_SPANS:
        return [(n, span, 1) for n, lane in enumerate(lanes) for span in lane.spans]
    slot = timeline.wall_s * len(lanes) / MOST_SPANS
    return [(n, *one) for n, lane in enumerate(lanes) for one in _merged(lane, slot)]


def _spans(timeline: Timeline) -> int:
    return sum(len(lane.spans) for lane in timeline.lanes)


def _merged(lane: Lane, slot_s: float) -> Iterable[tuple[Span, int]]:
    """The spans of a lane, those that start within one slot of time and ended alike as one."""
    slots: dict[object, tuple[Span, float, int]] = {}
    for span in lane.spans:
        key = (span.start // slot_s, span.row.state, span.row.purpose != "measure")
        first, end, count = slots.get(key, (span, span.end, 0))
        slots[key] = (first, max(end, span.end), count + 1)
    return [(replace(first, end=end), count) for first, end, count in slots.values()]
