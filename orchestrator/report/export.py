"""The rows for other programs: CSV for a spreadsheet, JSON for a script.

Both hold the newest final row of each job. Raw samples stay in the Parquet tables; these exports
carry what was derived from them. Column names bear their units, and every row says whether it is
emulated, random or synthetic.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields

from orchestrator.measurement import Measurement, Metrics
from orchestrator.report.contests import Contest, memory_kind, peak_memory_bytes
from orchestrator.report.figure_data import figure_data
from orchestrator.report.safe import csv_field, finite
from orchestrator.report.summary import Summary

#: Findings that the JSON carries; the other figures are its rows in another order.
JSON_FIGURES = (
    "throughput-against-latency",
    "techniques",
    "training-steps",
    "scaling",
    "roofline",
    "published",
)

_LEFT_OUT = frozenset({"metrics", "samples", "items", "measure", "parameters", "versions",
                       "details"})  # fmt: skip


def to_csv(summary: Summary) -> str:
    """One line a job. Tuples are joined by spaces; mappings become columns of their own."""
    flat = [_flat(row) for row in summary.rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_field(column) for column in columns])
    for row in flat:
        writer.writerow([_plain(row.get(column)) for column in columns])
    return text.getvalue()


def to_json(summary: Summary) -> str:
    """The summary's findings and its rows as one JSON object."""
    return json.dumps(document(summary), ensure_ascii=True, allow_nan=False, indent=2) + "\n"


def document(summary: Summary) -> dict[str, object]:
    """The summary's findings and its rows as values that JSON knows."""
    return {
        "run": summary.run,
        "verdict": summary.verdict,
        "unsettled": summary.unsettled,
        "counts": {str(state): count for state, count in summary.counts.items()},
        "flags": [{"name": f.name, "count": f.count, "of": f.of} for f in summary.flags],
        "damaged": list(summary.damaged),
        "shared": dict(summary.shared),
        "best": [_contest(contest) for contest in summary.contests],
        "underway": {
            "done": summary.underway.done,
            "total": summary.underway.total,
            "running": summary.underway.running,
            "eta_s": finite(summary.underway.eta_s),
            "silent_s": finite(summary.underway.silent_s),
        }
        if summary.underway
        else None,
        "figures": {
            one.name: [{k: _jsonable(v) for k, v in record.items()} for record in one.records]
            for one in figure_data(summary)
            if one.name in JSON_FIGURES
        },
        "causes": [
            {
                "state": str(cause.state),
                "failure_class": cause.failure_class or None,
                "reason": cause.reason,
                "job_ids": [row.job_id for row in cause.rows],
                "log": cause.example.log,
            }
            for cause in summary.causes
        ],
        "cards": [
            {
                "node": lane.node,
                "card": lane.card,
                "accelerator": lane.accelerator,
                "attempts": len(lane.spans),
                "busy_s": finite(lane.busy_s),
                "idle_s": finite(lane.idle_s),
            }
            for lane in summary.timeline.lanes
        ],
        "provenance": {
            fact.name: [value for value, _ in fact.values]
            for fact in (*summary.provenance.versions, *summary.provenance.facts)
        },
        "rows": records(summary.rows),
    }


def records(rows: Iterable[Measurement]) -> list[dict[str, object]]:
    """Each row as one mapping of plain values, without its raw samples."""
    return [{name: _jsonable(value) for name, value in _flat(row).items()} for row in rows]


def _contest(contest: Contest) -> dict[str, object]:
    best = contest.fastest
    return {
        "model": contest.setting.model,
        "dataset": contest.setting.dataset,
        "accelerator": contest.setting.accelerator,
        "device": contest.setting.device,
        "emulated": contest.setting.emulated,
        "cards": contest.setting.cards,
        "parameters": dict(contest.setting.parameters),
        "job_id": best.job_id,
        "precision": best.precision,
        "batch_size": best.batch_size,
        "throughput": finite(best.metrics.throughput),
        "throughput_low": finite(best.metrics.throughput_low),
        "throughput_high": finite(best.metrics.throughput_high),
        "unit": contest.unit,
        "tied_job_ids": [row.job_id for row in contest.tied],
        "lowest_latency_job_id": contest.quickest.job_id if contest.quickest else None,
        "smallest_memory_job_id": contest.leanest.job_id if contest.leanest else None,
        "most_work_per_joule_job_id": contest.thriftiest.job_id if contest.thriftiest else None,
    }


def _flat(row: Measurement) -> dict[str, object]:
    """A row without nesting: ``parameters.output_tokens``, ``versions.torch``."""
    flat: dict[str, object] = {
        field.name: getattr(row, field.name)
        for field in fields(Measurement)
        if field.name not in _LEFT_OUT
    }
    flat |= {field.name: getattr(row.metrics, field.name) for field in fields(Metrics)}
    flat["peak_memory_bytes"] = peak_memory_bytes(row)
    flat["peak_memory_of"] = memory_kind(row)
    flat["work_per_joule"] = finite(row.metrics.work_per_joule)
    nested: dict[str, Mapping[str, object]] = {
        "parameters": row.parameters,
        "versions": row.versions,
        "details": row.details,
    }
    for prefix, mapping in nested.items():
        flat |= {f"{prefix}.{name}": value for name, value in sorted(mapping.items())}
    return flat


def _plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "" if finite(value) is None else repr(value)
    if isinstance(value, tuple):
        return csv_field(" ".join(map(str, value)))
    return csv_field(str(value))


def _jsonable(value: object) -> object:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return finite(value, 15)
    if isinstance(value, tuple):
        return [_jsonable(one) for one in value]
    return str(value)
