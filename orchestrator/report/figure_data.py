"""The data of every figure as a tidy table: one line an observation, units in the column names.

``nightgrid report --figures DIR`` writes each as CSV beside its pictures, so that a figure can be
drawn again with other tools. Nothing is sampled or cut here; the page's figures may be.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.contests import interval, memory_kind, peak_memory_bytes
from orchestrator.report.fronts import latency
from orchestrator.report.grouping import Setting, described
from orchestrator.report.published import REFERENCES
from orchestrator.report.safe import csv_field, finite
from orchestrator.report.summary import Summary

Record = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureData:
    """One figure's table. ``records`` share their keys, which are the columns."""

    name: str  # of the files: "throughput-against-batch-size"
    title: str
    records: tuple[Record, ...]

    def to_csv(self) -> str:
        """A head line, then one line a record; what a spreadsheet would compute is quoted."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        columns = list(dict.fromkeys(name for record in self.records for name in record))
        writer.writerow(columns)
        for record in self.records:
            writer.writerow([plain(record.get(name)) for name in columns])
        return text.getvalue()


def figure_data(summary: Summary) -> tuple[FigureData, ...]:
    """The tables of all figures that have something to show, in the page's order."""
    every = ((name, title, tuple(records)) for name, title, records in figure_records(summary))
    return tuple(
        FigureData(name=name, title=title, records=records)
        for name, title, records in every
        if records
    )


def figure_records(summary: Summary) -> tuple[tuple[str, str, Iterator[Record]], ...]:
    """Name and title of every figure, and its records, which are made as they are asked for: of a
    large run there are millions."""
    return (
        ("best-settings", "Best settings", _best(summary)),
        ("precision-by-batch-size", "Precision by batch size", _cells(summary)),
        ("throughput-against-batch-size", "Throughput against batch size", _curve(summary)),
        ("throughput-against-latency", "Throughput against latency", _fronts(summary)),
        ("prompts", "Prompts in three dimensions", _prompts(summary)),
        ("techniques", "What each technique buys", _effects(summary)),
        ("training-steps", "Where the time of a training step goes", _steps(summary)),
        ("scaling", "Scaling over cards", _scaling(summary)),
        ("roofline", "Share of the card's limits", _roofline(summary)),
        ("published", "Measured against published", _published(summary)),
        ("cards", "What each card did", _cards(summary)),
    )


def plain(value: object) -> str:
    """A value as CSV has it: numbers in full, nothing for None, NaN and infinity."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return "" if finite(value) is None else repr(value)
    return csv_field(str(value))


@lru_cache(maxsize=1024)
def setting_record(setting: Setting) -> dict[str, object]:
    """The columns that say what work was done, and where."""
    return {
        "workload": setting.workload,
        "model": setting.model,
        "dataset": setting.dataset,
        "accelerator": setting.accelerator,
        "device": setting.device,
        "emulated": setting.emulated,
        "cards": setting.cards,
        "engine": setting.engine,
        "isolation": setting.isolation,
        "parameters": described(dict(setting.parameters)),
    }


def row_record(row: Measurement) -> dict[str, object]:
    """The columns with a row's settings and figures."""
    low, high = interval(row) if row.metrics.throughput_low is not None else (None, None)
    return {
        "job_id": row.job_id,
        "precision": row.precision,
        "batch_size_requested": row.batch_size_requested,
        "batch_size_per_card": row.batch_size,
        "state": str(row.state),
        "throughput": row.metrics.throughput,
        "throughput_low": low,
        "throughput_high": high,
        "throughput_unit": row.metrics.throughput_unit,
        "random_weights": row.random_weights,
        "synthetic_data": row.synthetic_data,
    }


def _best(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(summary.settings[contest.fastest.job_id])
        | row_record(contest.fastest)
        | {
            "verdict": contest.verdict.value,
            "tied_job_ids": " ".join(row.job_id for row in contest.tied),
            "latency_p50_s": contest.fastest.metrics.latency_p50_s,
            "peak_memory_bytes": peak_memory_bytes(contest.fastest),
            "peak_memory_of": memory_kind(contest.fastest),
        }
        for contest in summary.contests
    )


def _cells(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(table.setting) | row_record(row) | {"best": row.job_id == table.best}
        for table in summary.tables
        for row in table.cells.values()
    )


def _curve(summary: Summary) -> Iterator[Record]:
    return (record for record in _cells(summary) if record["state"] == State.SUCCEEDED.value)


def _fronts(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(summary.settings[row.job_id])
        | row_record(row)
        | {"latency_p50_s": latency(row), "on_front": on_front}
        for front in summary.fronts
        for on_front, rows in ((True, front.best), (False, front.beaten))
        for row in rows
    )


def _prompts(summary: Summary) -> Iterator[Record]:
    return (
        {
            "job_id": row.job_id,
            "model": row.model,
            "device": row.device_name,
            "emulated": row.emulated,
            "precision": row.precision,
            "batch_size_per_card": row.batch_size,
            "input_tokens": item.input_tokens,
            "output_tokens": item.output_tokens,
            "latency_s": item.latency_s,
        }
        for row in summary.rows
        if row.state is State.SUCCEEDED
        for _, item in row.items
    )


def _effects(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(effect.setting)
        | {
            "changed": effect.name,
            "before": effect.before,
            "after": effect.after,
            "batch_size_requested": pair.row.batch_size_requested,
            "ratio": pair.ratio.value,
            "ratio_low": pair.ratio.low,
            "ratio_high": pair.ratio.high,
            "told_apart": pair.ratio.decided,
            "total_tokens_per_s": pair.row.metrics.total_tokens_per_s,
            "baseline_total_tokens_per_s": pair.base.metrics.total_tokens_per_s,
            "peak_memory_bytes": peak_memory_bytes(pair.row),
            "baseline_peak_memory_bytes": peak_memory_bytes(pair.base),
            "job_id": pair.row.job_id,
            "baseline_job_id": pair.base.job_id,
        }
        for effect in summary.effects
        for pair in effect.pairs
    )


def _steps(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(summary.settings[one.row.job_id])
        | row_record(one.row)
        | {
            "cards": one.row.cards,
            "step_s": one.step_s,
            "data_share": one.data,
            "forward_share": one.forward,
            "backward_share": one.backward,
            "optimizer_share": one.optimizer,
            "communication_share": one.communication,
        }
        for one in summary.steps
    )


def _scaling(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(one.setting)
        | row_record(step.row)
        | {
            "cards": step.row.cards,
            "base_cards": one.base.cards,
            "speedup": step.speedup.value,
            "speedup_low": step.speedup.low,
            "speedup_high": step.speedup.high,
            "efficiency": step.efficiency,
        }
        for one in summary.scalings
        for step in one.steps
    )


def _roofline(summary: Summary) -> Iterator[Record]:
    return (
        setting_record(summary.settings[share.row.job_id])
        | row_record(share.row)
        | {
            "data_sheet": share.sheet.device,
            "bandwidth_share_at_least": share.bandwidth,
            "compute_share": share.compute,
            "prefill_compute_share": share.prefill,
            "arithmetic": share.arithmetic,
            "operations_per_weight_byte": share.intensity,
            "flops_per_s_per_card": share.flops_per_s,
            "source": share.sheet.source,
        }
        for share in summary.roofline.shares
    )


def _published(summary: Summary) -> Iterator[Record]:
    return (
        {
            "task": one.task,
            "who": "this run" if line.ours else "published",
            "model": line.figure.model,
            "dataset": line.figure.dataset,
            "device": line.figure.device,
            "cards": line.figure.cards,
            "batch_size_per_card": line.figure.batch_size,
            "precision": line.figure.precision,
            "metric": line.figure.metric,
            "value": line.figure.value,
            "unit": line.figure.unit,
        }
        | {f"speedup_over_{device}": line.speedups.get(device) for device in REFERENCES}
        | {
            "best_against_best": ", ".join(sorted(line.best_against_best)),
            "steps": line.figure.steps,
            "time": line.figure.time,
            "software": line.figure.software,
            "doubtful": line.figure.doubtful,
            "note": line.figure.note,
        }
        | {"source": line.figure.source}
        for one in summary.published
        for line in one.lines
    )


def _cards(summary: Summary) -> Iterator[Record]:
    return (
        {
            "node": lane.node,
            "card": lane.card,
            "accelerator": lane.accelerator,
            "start_s_since_epoch": span.start,
            "end_s_since_epoch": span.end,
            "attempt_id": span.attempt_id,
            "purpose": span.row.purpose,
            "state": str(span.row.state),
            "model": span.row.model,
            "precision": span.row.precision,
        }
        for lane in summary.timeline.lanes
        for span in lane.spans
    )


def write_csv(data: Iterable[FigureData]) -> dict[str, str]:
    """File names and contents."""
    return {f"{one.name}.csv": one.to_csv() for one in data}
