"""Lazy records of every figure: one per observation, units in the names, nothing sampled or cut."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from orchestrator.analysis.hardware import REFERENCES
from orchestrator.analysis.metrics import PARTS, memory_kind, peak_memory_bytes
from orchestrator.analysis.selection import Setting, described, stated_parameters
from orchestrator.analysis.summary import Summary
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.util.format import csv_field, finite

Record = dict[str, object]

#: Value of ``throughput_is`` of a lower bound.
AT_LEAST = "at least"


def columns(*names: str, **paths: str) -> Callable[[Any], Record]:
    """Return a reader of records by attribute names, or ``column="path.to.attribute"``."""
    wanted = dict(zip(names, names, strict=True)) | paths
    read = attrgetter(*wanted.values())
    return lambda value: dict(zip(wanted, read(value), strict=True))


def figure_records(summary: Summary) -> dict[str, Iterator[Record]]:
    """Return the lazy records of every figure by file name, in the page's order."""
    settings = summary.settings

    def of(row: Measurement) -> Record:
        return _work(settings[row.job_id]) | _ROW(row)

    return {
        "best-settings": _best(summary),
        "precision-by-batch-size": _cells(summary),
        "throughput-against-batch-size": (
            record for record in _cells(summary) if record["state"] is State.SUCCEEDED
        ),
        "throughput-against-latency": (
            of(row)
            | {"throughput_is": AT_LEAST if summary.at_least(row) else ""}
            | {"latency_p50_s": row.metrics.latency_p50_s, "on_front": on_front}
            for front in summary.fronts
            for on_front, rows in ((True, front.best), (False, front.beaten))
            for row in rows
        ),
        "prompts": (
            _PROMPTED(row) | _PROMPT(item)
            for row in summary.rows
            if row.state is State.SUCCEEDED
            for _, item in row.items
        ),
        "techniques": _effects(summary),
        "training-steps": (of(one.row) | _STEP(one) for one in summary.steps),
        "scaling": (
            _work(one.setting) | _ROW(step.row) | {"base_cards": one.base.cards} | _SPEEDUP(step)
            for one in summary.scalings
            for step in one.steps
        ),
        "roofline": (of(share.row) | _SHARE(share) for share in summary.roofline.shares),
        "published": _published(summary),
        "served": _served(summary),
        "cards": (
            _LANE(lane) | _SPAN(span) for lane in summary.timeline.lanes for span in lane.spans
        ),
    }


def figure_csv(summary: Summary) -> dict[str, str]:
    """Return file names and contents of the figures that have records."""
    figures = {name: list(records) for name, records in figure_records(summary).items()}
    return {f"{name}.csv": to_csv(records) for name, records in figures.items() if records}


def to_csv(records: Iterable[Mapping[str, object]], names: Sequence[str] = ()) -> str:
    """Return CSV with spreadsheet formulas neutralised; ``names`` default to the records' keys."""
    records = list(records)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = names or list(dict.fromkeys(name for record in records for name in record))
    writer.writerow(map(csv_field, names))
    for record in records:
        writer.writerow([plain(record.get(name)) for name in names])
    return text.getvalue()


def plain(value: object) -> str:
    """Format a CSV value: full precision, "" for None, NaN and infinity, tuples joined."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return "" if finite(value) is None else repr(value)
    return csv_field(" ".join(map(str, value)) if isinstance(value, tuple) else str(value))


# ---------------------------------------------------------------- each figure

_WORK = columns(
    *("workload", "model", "dataset", "accelerator", "device", "emulated", "cards", "engine"),
    "isolation",
)
_ROW = columns(
    *("job_id", "precision", "batch_size_requested"),
    batch_size_per_card="batch_size",
    state="state",
    throughput="metrics.throughput",
    throughput_low="metrics.throughput_low",
    throughput_high="metrics.throughput_high",
    throughput_unit="metrics.throughput_unit",
    random_weights="random_weights",
    synthetic_data="synthetic_data",
)
_STEP = columns("step_s", **{f"{part}_share": part for part in PARTS})
_PAIR = columns(
    batch_size_requested="row.batch_size_requested",
    ratio="ratio.value",
    ratio_low="ratio.low",
    ratio_high="ratio.high",
    told_apart="ratio.decided",
    ratio_is="ratio.side",
    total_tokens_per_s="row.metrics.total_tokens_per_s",
    baseline_total_tokens_per_s="base.metrics.total_tokens_per_s",
)
_SPEEDUP = columns(
    cards="row.cards",
    speedup="speedup.value",
    speedup_low="speedup.low",
    speedup_high="speedup.high",
    speedup_is="speedup.side",
    efficiency="efficiency",
)
_SHARE = columns(
    data_sheet="sheet.device",
    bandwidth_share_at_least="bandwidth",
    compute_share="compute",
    prefill_compute_share="prefill",
    arithmetic="arithmetic",
    operations_per_weight_byte="intensity",
    flops_per_s_per_card="flops_per_s",
    source="sheet.source",
)
_PROMPT = columns("input_tokens", "output_tokens", "latency_s")
_PROMPTED = columns(
    *("job_id", "model"),
    device="device_name",
    emulated="emulated",
    precision="precision",
    batch_size_per_card="batch_size",
)
_FIGURE = columns(
    *("model", "dataset", "device", "cards"),
    batch_size_per_card="batch_size",
    precision="precision",
    metric="metric",
    value="value",
    unit="unit",
)
_FIGURE_ABOUT = columns("steps", "time", "software", "doubtful", "note", "source")
_LANE = columns("node", "card", "accelerator")
_SPAN = columns(
    start_s_since_epoch="start",
    end_s_since_epoch="end",
    attempt_id="attempt_id",
    purpose="row.purpose",
    state="row.state",
    model="row.model",
    precision="row.precision",
)


@lru_cache(maxsize=1024)
def _work(setting: Setting) -> Record:
    return _WORK(setting) | {"parameters": described(stated_parameters(setting))}


def _best(summary: Summary) -> Iterator[Record]:
    for ranking in summary.rankings:
        best = ranking.fastest
        own = {
            "verdict": ranking.verdict.value,
            "tied_job_ids": " ".join(row.job_id for row in ranking.tied),
            "latency_p50_s": best.metrics.latency_p50_s,
            "peak_memory_bytes": peak_memory_bytes(best),
            "peak_memory_of": memory_kind(best),
        }
        yield _work(summary.settings[best.job_id]) | _ROW(best) | own


def _cells(summary: Summary) -> Iterator[Record]:
    for table in summary.tables:
        for row in table.cells.values():
            yield _work(table.setting) | _ROW(row) | {"best": row.job_id in table.best}


def _effects(summary: Summary) -> Iterator[Record]:
    for effect in summary.effects:
        change = {"changed": effect.name, "before": effect.before, "after": effect.after}
        for pair in effect.pairs:
            own = {
                "peak_memory_bytes": peak_memory_bytes(pair.row),
                "baseline_peak_memory_bytes": peak_memory_bytes(pair.base),
                "job_id": pair.row.job_id,
                "baseline_job_id": pair.base.job_id,
            }
            yield _work(effect.setting) | change | _PAIR(pair) | own


def _published(summary: Summary) -> Iterator[Record]:
    for one in summary.published:
        for line in one.lines:
            yield (
                {"task": one.about.task, "who": "this run" if line.row else "published"}
                | _FIGURE(line.figure)
                | {f"speedup_over_{device}": line.speedups.get(device) for device in REFERENCES}
                | {"best_against_best": ", ".join(sorted(line.best_against_best))}
                | _FIGURE_ABOUT(line.figure)
            )


def _served(summary: Summary) -> Iterator[Record]:
    point_of = columns("load", "per_card", "per_user", "latency_s", "cost", "flagged")
    for served in summary.served:
        front = {point.row.job_id for point in served.front}
        for curve in served.curves:
            about = {"curve": curve.name, "load_name": curve.load_name}
            for point in curve.points:
                job_id = point.row.job_id
                marks = {"on_front": job_id in front, "knee": point is curve.knee}
                own = point_of(point) | marks | {"job_id": job_id}
                yield _work(served.setting) | about | own
