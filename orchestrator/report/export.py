"""The rows for other programs: CSV for a spreadsheet, JSON for a script.

Both hold the newest final row of each job. Raw samples stay in the Parquet tables; these exports
carry what was derived from them. Column names bear their units, and every row says whether it is
emulated, random or synthetic.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter

from orchestrator.analysis.flags import Raised, raised_on_each
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.report.contests import Contest, memory_kind, peak_memory_bytes
from orchestrator.report.figure_data import Record, figure_records
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

_LEFT_OUT = frozenset(
    {
        *("metrics", "samples", "items", "image", "measure", "parameters", "versions"),
        *("details", "workload_metrics"),
    }
)

_PLAIN = frozenset({str, int, bool, type(None)})
_PLAIN_FIELDS = tuple(f.name for f in fields(Measurement) if f.name not in _LEFT_OUT)
_METRICS = tuple(f.name for f in fields(Metrics))
_plain_values = attrgetter(*_PLAIN_FIELDS)
_metric_values = attrgetter(*_METRICS)


def to_csv(summary: Summary) -> str:
    """One line a job. Tuples are joined by spaces; mappings become columns of their own."""
    flat = [_flat(row, summary.raised.get(row.job_id, ())) for row in summary.rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([csv_field(column) for column in columns])
    for row in flat:
        writer.writerow([_plain(row.get(column)) for column in columns])
    return text.getvalue()


def to_json(summary: Summary) -> str:
    """The summary's findings and its rows as one JSON object."""
    return "".join(json_parts(summary))


def json_parts(summary: Summary) -> Iterator[str]:
    """The text of ``to_json`` in parts, a row a line: the whole of a large run is made of millions
    of values, which need not be there at the same time."""
    opening = "{\n"
    for name, value in _document(summary).items():
        yield f"{opening}{json.dumps(name)}: "
        opening = ",\n"
        if name == "figures":
            yield from _figures(summary)
        elif name == "rows":
            raised = summary.raised
            yield from _list_parts(_flat(row, raised.get(row.job_id, ())) for row in summary.rows)
        else:
            yield json.dumps(value, allow_nan=False, default=str)
    yield "\n}\n"


def document(summary: Summary) -> dict[str, object]:
    """The summary's findings and its rows as values that JSON knows."""
    return _document(summary) | {
        "figures": {
            name: [_plain_record(one) for one in records]
            for name, records in _figure_lists(summary)
        },
        "rows": [
            _plain_record(_flat(row, summary.raised.get(row.job_id, ()))) for row in summary.rows
        ],
    }


def _document(summary: Summary) -> dict[str, object]:
    """``document`` without its figures and rows."""
    return {
        "run": summary.run,
        "verdict": summary.verdict,
        "unsettled": summary.unsettled,
        "counts": {str(state): count for state, count in summary.counts.items()},
        "flags": [{"name": f.name, "count": f.count, "of": f.of} for f in summary.banners],
        "flagged": [
            {
                "flag": flagged.flag.name,
                "meaning": flagged.flag.description,
                "rows": [{"job_id": row.job_id, "reason": why} for row, why in flagged.rows],
            }
            for flagged in summary.flagged
        ],
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
        "figures": None,
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
                "assigned_s": finite(lane.assigned_s),
                "unassigned_s": finite(lane.unassigned_s),
            }
            for lane in summary.timeline.lanes
        ],
        "provenance": {
            fact.name: [value for value, _ in fact.values]
            for fact in (*summary.provenance.versions, *summary.provenance.facts)
        },
        "rows": None,
    }


def records(rows: Sequence[Measurement]) -> list[dict[str, object]]:
    """Each row as one mapping of plain values, without its raw samples."""
    pairs = zip(rows, raised_on_each(rows), strict=True)
    return [_plain_record(_flat(row, raised)) for row, raised in pairs]


def _plain_record(record: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value if type(value) in _PLAIN else _jsonable(value) for name, value in record.items()
    }


def _figure_lists(summary: Summary) -> Iterator[tuple[str, Iterator[Record]]]:
    """The records of those of ``JSON_FIGURES`` that have some."""
    for name, _, records in figure_records(summary):
        first = next(records, None) if name in JSON_FIGURES else None
        if first is not None:
            yield name, chain([first], records)


def _figures(summary: Summary) -> Iterator[str]:
    opening = "{\n"
    for name, records in _figure_lists(summary):
        yield f"{opening}{json.dumps(name)}: "
        opening = ",\n"
        yield from _list_parts(records)
    yield "{}" if opening == "{\n" else "\n}"


def _list_parts(records: Iterable[Record]) -> Iterator[str]:
    """A list, a record a line."""
    opening = "[\n"
    for record in records:
        yield opening + json.dumps(_plain_record(record), allow_nan=False)
        opening = ",\n"
    yield "[]" if opening == "[\n" else "\n]"


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
        "verdict": contest.verdict.value,
        "tied_job_ids": [row.job_id for row in contest.tied],
        "lowest_latency_job_id": contest.quickest.job_id if contest.quickest else None,
        "smallest_memory_job_id": contest.leanest.job_id if contest.leanest else None,
        "most_work_per_joule_job_id": contest.thriftiest.job_id if contest.thriftiest else None,
        "best_by_figure": [
            {
                "name": one.metric.name,
                "better": one.metric.better,
                "value": finite(one.value),
                "unit": one.metric.unit,
                "job_id": one.row.job_id,
                "tied": one.tied,
            }
            for one in contest.leaders
        ],
    }


def _flat(row: Measurement, raised: Iterable[Raised]) -> dict[str, object]:
    """A row without nesting: ``parameters.output_tokens``, ``versions.torch``."""
    flat = _own(row, raised)
    for prefix, mapping in _nested(row):
        flat |= _prefixed(prefix, mapping)
    return flat


def _own(row: Measurement, raised: Iterable[Raised]) -> dict[str, object]:
    own: dict[str, object] = dict(zip(_PLAIN_FIELDS, _plain_values(row), strict=True))
    own |= zip(_METRICS, _metric_values(row.metrics), strict=True)
    own["flags"] = "; ".join(map(str, raised))
    own["peak_memory_bytes"] = peak_memory_bytes(row)
    own["peak_memory_of"] = memory_kind(row)
    own["work_per_joule"] = finite(row.metrics.work_per_joule)
    return own


def _nested(row: Measurement) -> tuple[tuple[str, Mapping[str, object]], ...]:
    """The mappings of a row, each with the word before its names."""
    figures = {name: finite(value) for name, value in row.workload_metrics.items()}
    return (
        ("parameters", row.parameters),
        ("versions", row.versions),
        ("workload_metrics", figures),
        ("details", row.details),
    )


def _prefixed(prefix: str, mapping: Mapping[str, object]) -> dict[str, object]:
    return {f"{prefix}.{name}": value for name, value in sorted(mapping.items())}


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
