"""Export rows: CSV for a spreadsheet, JSON for a script, a dataset for a hub.

CSV and JSON hold the newest final row of each job without raw samples, which stay in Parquet.
Column names include units, and each row says whether it is emulated, random or synthetic.
``--format vendor`` is the table that vendors publish, with columns for what that leaves out.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.comparison import JobPair, RunComparison
from orchestrator.analysis.flags import Raised, barred, bounded, raised_on
from orchestrator.analysis.metrics import figure_changes, memory_kind, peak_memory_bytes
from orchestrator.analysis.rankings import Ranking
from orchestrator.analysis.selection import precision_rank
from orchestrator.analysis.serving import LOADS
from orchestrator.analysis.summary import Summary
from orchestrator.core.errors import StoreError
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.report import figure_data
from orchestrator.report.figure_data import AT_LEAST, Record, columns
from orchestrator.report.query import read_runs
from orchestrator.store.column_docs import COLUMN_DOCS
from orchestrator.store.disk import digest
from orchestrator.util.format import finite

if TYPE_CHECKING:
    import pyarrow as pa

#: Figures in the JSON; the others are its rows in another order.
JSON_FIGURES = (
    *("throughput-against-latency", "techniques", "training-steps", "scaling", "roofline"),
    *("published", "served"),
)

_MAPPINGS = ("parameters", "versions", "workload_metrics", "details")
_LEFT_OUT = frozenset({"metrics", "samples", "items", "image", "measure", *_MAPPINGS})
_row = columns(*(field.name for field in fields(Measurement) if field.name not in _LEFT_OUT))
_metrics = columns(*(field.name for field in fields(Metrics)))


def to_csv(summary: Summary) -> str:
    """Return one line per job; tuples are joined by spaces, mappings become columns."""
    return figure_data.to_csv(_rows(summary))


def to_json(summary: Summary) -> str:
    """Return the summary's findings and rows as one JSON object."""
    return "".join(json_parts(summary))


def document(summary: Summary) -> dict[str, Any]:
    """Return the object of ``to_json`` as Python values."""
    return dict(json.loads(to_json(summary)))


def json_parts(summary: Summary) -> Iterator[str]:
    """Yield the text of ``to_json``, a row per line, to save memory in large runs."""
    yield from _members(_findings(summary))
    yield "\n"


def _members(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of an object; iterators become lists with an entry per line."""
    opening = "{\n"
    for name, value in values.items():
        yield f"{opening}{json.dumps(name)}: "
        opening = ",\n"
        if name == "figures":
            yield from _members(value)
        elif isinstance(value, Iterator):
            line = "[\n"
            for record in value:
                yield line + json.dumps(_plain_record(record), allow_nan=False)
                line = ",\n"
            yield "[]" if line == "[\n" else "\n]"
        else:
            yield json.dumps(value, allow_nan=False, default=str)
    yield "{}" if opening == "{\n" else "\n}"


def _findings(summary: Summary) -> dict[str, object]:
    records, underway = figure_data.figure_records(summary), summary.underway
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
        "answers": [
            asdict(one) | {"sentence": one.sentence, "basis": one.basis} for one in summary.answers
        ],
        "best": [_ranking(ranking) for ranking in summary.rankings],
        "underway": underway
        and {
            **_progress(underway),
            "eta_s": finite(underway.eta_s),
            "silent_s": finite(summary.silent_s),
        },
        "figures": {
            name: chain([first], records[name])
            for name in JSON_FIGURES
            if (first := next(records[name], None)) is not None
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
                "assigned_s": finite(lane.assigned_s),
                "unassigned_s": finite(lane.unassigned_s),
            }
            for lane in summary.timeline.lanes
        ],
        "provenance": {
            fact.name: [value for value, _ in fact.values]
            for fact in (*summary.provenance.versions, *summary.provenance.facts)
        },
        "rows": _rows(summary),
    }


def _rows(summary: Summary) -> Iterator[Record]:
    return (_flat(row, summary.raised.get(row.job_id, ())) for row in summary.rows)


def records(rows: Sequence[Measurement]) -> list[dict[str, object]]:
    """Return each row as a flat mapping of plain values, without raw samples."""
    pairs = zip(rows, raised_on(rows), strict=True)
    return [_plain_record(_flat(row, raised)) for row, raised in pairs]


def _plain_record(record: Mapping[str, object]) -> dict[str, object]:
    return {name: _plain(value) for name, value in record.items()}


def _plain(value: object) -> object:
    if type(value) in (str, int, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return finite(value, 15)
    return list(map(_plain, value)) if isinstance(value, tuple) else str(value)


_ranked = columns("model", "dataset", "accelerator", "device", "emulated", "cards")
_best = columns("job_id", "precision", "batch_size")
_leader = columns(
    name="metric.name",
    better="metric.better",
    value="value",
    unit="metric.unit",
    job_id="row.job_id",
    tied="tied",
)
_difference = columns("key", "before", "after")
_metric = columns("name", "title", "unit", "better")
_progress = columns("done", "total", "running")


def _ranking(ranking: Ranking) -> dict[str, object]:
    best = ranking.fastest
    return {
        **_ranked(ranking.setting),
        "parameters": dict(ranking.setting.parameters),
        **_best(best),
        "throughput": finite(best.metrics.throughput),
        "throughput_low": finite(best.metrics.throughput_low),
        "throughput_high": finite(best.metrics.throughput_high),
        "throughput_is": AT_LEAST if ranking.at_least(best) else "",
        "unit": ranking.unit,
        "verdict": ranking.verdict.value,
        "measure_again_job_ids": [row.job_id for row in ranking.to_measure_again],
        "tied_job_ids": [row.job_id for row in ranking.tied],
        "lowest_latency_job_id": _job_id(ranking.lowest_latency),
        "smallest_memory_job_id": _job_id(ranking.smallest_memory),
        "most_work_per_joule_job_id": _job_id(ranking.most_work_per_joule),
        "best_by_figure": [_leader(one) | {"value": finite(one.value)} for one in ranking.leaders],
    }


def _job_id(row: Measurement | None) -> str | None:
    return row.job_id if row is not None else None


def _flat(row: Measurement, raised: Sequence[Raised]) -> Record:
    """Return a row without nesting: ``parameters.output_tokens``, ``versions.torch``."""
    record = _row(row) | _metrics(row.metrics)
    record["flags"] = "; ".join(map(str, raised))
    record["throughput_is"] = AT_LEAST if bounded(raised) else ""
    record["peak_memory_bytes"] = peak_memory_bytes(row)
    record["peak_memory_of"] = memory_kind(row)
    record["work_per_joule"] = finite(row.metrics.work_per_joule)
    for prefix in _MAPPINGS:
        for name, value in sorted(getattr(row, prefix).items()):
            value = finite(value) if prefix == "workload_metrics" else value
            record[f"{prefix}.{name}"] = value
    return record


def comparison_json(comparison: RunComparison, limit: float | None = None) -> dict[str, object]:
    """Return the comparison as a JSON-able object."""
    return {
        "before": comparison.before,
        "after": comparison.after,
        "confidence": comparison.confidence,
        "noise": finite(comparison.noise),
        "noise_estimated": comparison.noise_estimated,
        "overall_ratio": finite(comparison.overall),
        "changes": [_change_json(change, limit) for change in comparison.changes],
        "turned": [
            _named(t.after)
            | {"before": str(t.before.state), "after": str(t.after.state), "broken": t.broken}
            for t in comparison.turned
        ],
        "refused": [
            _named(one.after) | {"differences": list(map(_difference, one.differences))}
            for one in comparison.refused
        ],
        "warnings": [
            {"key": key, "before": before, "after": after, "jobs": jobs}
            for (key, before, after), jobs in comparison.warnings.items()
        ],
        "only_before": comparison.only_before,
        "only_after": comparison.only_after,
    }


def _change_json(change: JobPair, limit: float | None) -> dict[str, object]:
    record = _named(change.after) | {
        "throughput_before": finite(change.before.metrics.throughput),
        "throughput_after": finite(change.after.metrics.throughput),
        "unit": change.after.metrics.throughput_unit,
        "ratio": finite(change.ratio.value),
        "ratio_low": finite(change.ratio.low),
        "ratio_high": finite(change.ratio.high),
        "p_value": finite(change.ratio.p_value),
        "significant": change.significant,
        "figures": [
            _metric(one.metric)
            | {"before": finite(one.before), "after": finite(one.after), "improved": one.improved}
            for one in figure_changes(change.before, change.after)
        ],
    }
    if limit is not None:
        record["regression"] = change.significant and 1 - change.ratio.value >= limit
    return record


_job = columns(
    *("job_id", "workload", "model", "dataset", "accelerator", "cards", "precision"),
    batch_size="batch_size_requested",
    engine="engine",
)


def _named(row: Measurement) -> dict[str, object]:
    return {**_job(row), "parameters": dict(row.parameters), "emulated": row.emulated}


# ---------------------------------------------------------------- the vendors' table


def to_vendor_csv(summary: Summary) -> str:
    """Return rows that generated tokens, by model, device, cards, precision and batch size; without
    those whose flags rank them nowhere, since the table has no place for a reason."""
    generated = (
        row
        for row in summary.rows
        if row.state is State.SUCCEEDED
        and row.metrics.generated_tokens_per_s is not None
        and not barred(summary.raised.get(row.job_id, ()))
    )
    records = []
    for row in sorted(generated, key=_order):
        values = (
            *(row.model, row.device_name or str(row.accelerator), row.cards, row.precision),
            *(*lengths(row), _batch(row), row.metrics.generated_tokens_per_s, row.emulated),
            *(bool(row.random_weights), bool(row.synthetic_data)),
            AT_LEAST if summary.at_least(row) else "",
        )
        records.append(dict(zip(_VENDOR, values, strict=True)))
    return figure_data.to_csv(records, _VENDOR)


def _batch(row: Measurement) -> int | None:
    """Return the batch of the whole job, as vendors give it: rows have that of a card, loads of a
    served model as many as are in flight. None for an open loop, which has no batch."""
    if any(row.parameters.get(name) for name in LOADS):
        users = row.parameters.get("concurrency")
        return int(users) if users else None
    return row.batch_size * row.cards if row.batch_size is not None else None


_VENDOR = (
    *("model", "device", "cards", "precision", "input_length", "output_length", "length_kind"),
    *("batch_size", "tokens_per_s", "emulated", "random_weights", "synthetic_data"),
    "tokens_per_s_is",
)


def lengths(row: Measurement) -> tuple[int | None, int | None, str]:
    """Return input and output length in tokens, and whether they are ``fixed`` or a ``mean``."""
    fixed_input, fixed_output = map(row.parameters.get, ("input_tokens", "output_tokens"))
    exactly = row.parameters.get("ignore_eos") is True  # else a prompt may end early
    if exactly and isinstance(fixed_input, int) and isinstance(fixed_output, int):
        return fixed_input, fixed_output, "fixed"
    if not row.items:
        return None, None, ""
    read = round(fmean(item.input_tokens for _, item in row.items))
    return read, round(fmean(item.output_tokens for _, item in row.items)), "mean"


def _order(row: Measurement) -> tuple[object, ...]:
    device, rank = row.device_name or "", precision_rank(row.precision)
    return (row.model, device, row.cards, rank, _batch(row) or 0)


# ---------------------------------------------------------------- a Hugging Face dataset

_KEYS = ("run", "invocation_id", "attempt_id", "job_id", "final")


def export_datasets(results: Path, directory: Path, runs: Sequence[str] = ()) -> dict[str, int]:
    """Write the dataset; return the number of rows by configuration.

    Raises:
        StoreError: there are no runs, one cannot be read, or ``directory`` is in use.
    """
    import pyarrow.parquet as pq

    table, damaged = read_runs(results, runs)
    if directory.exists() and any(directory.iterdir()):
        raise StoreError(f"{directory} is not empty; name a new directory")
    tables = {
        "rows": _without_maps(table.drop_columns(["samples", "items"])),
        "samples": _entries(table, "samples"),
        "items": _entries(table, "items"),
    }
    tables = {name: one for name, one in tables.items() if one.num_rows or name == "rows"}
    try:
        files = {}
        for name, one in tables.items():
            (directory / name).mkdir(parents=True)
            content = io.BytesIO()
            pq.write_table(one, content, compression="zstd")
            # `datasets` caches by the card's text and the last name of the directory, so that other
            # rows must have another file's name there.
            data = content.getvalue()
            files[name] = f"{name}/train-{digest(data)}.parquet"
            (directory / files[name]).write_bytes(data)
        card = dataset_card(table, files, damaged)
        (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}") from error
    return {name: one.num_rows for name, one in tables.items()}


def dataset_card(table: pa.Table, files: Mapping[str, str], damaged: Sequence[str]) -> str:
    """Return ``README.md``; its front matter holds the configurations for ``load_dataset``."""
    lines = ["---", "configs:"]
    for name, file in files.items():
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train"]
        lines += [f"    path: {file}", *["  default: true"] * (name == "rows")]
    lines += ["tags:", "- benchmark", "---", "", "# Nightgrid results", ""]
    runs = Counter(table.column("run").to_pylist())
    lines += [f"- run `{_code(run)}`: {count:,} rows" for run, count in sorted(runs.items())]
    lines += [""]
    for column, words in (
        ("emulated", "ran on emulated cards: no number of theirs is one of a card"),
        ("random_weights", "had random weights"),
        ("synthetic_data", "had synthetic data"),
    ):
        count = sum(value is True for value in table.column(column).to_pylist())
        lines += [f"- {count:,} of {table.num_rows:,} rows {words}"] if count else []
    lines += [f"- not read: `{_code(text)}`" for text in damaged]
    lines += ["", "## Columns of `rows`", "", "| column | unit | meaning |", "|---|---|---|"]
    for name in table.column_names:
        if name not in ("samples", "items"):
            unit, meaning, _ = COLUMN_DOCS[name]
            lines.append(f"| `{name}` | {unit} | {meaning} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c != "`")


def _without_maps(table: pa.Table) -> pa.Table:
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_map(field.type):
            values = table.column(index).to_pylist()
            texts = [None if v is None else _json(field.name, dict(v)) for v in values]
            table = table.set_column(index, field.name, pa.array(texts, pa.string()))
    return table.replace_schema_metadata(None)


def _json(name: str, values: Mapping[str, Any]) -> str:
    plain = {k: json.loads(v) for k, v in values.items()} if name == "parameters" else dict(values)
    return json.dumps(plain, ensure_ascii=False, sort_keys=True)


def _entries(table: pa.Table, name: str) -> pa.Table:
    """Return one row per entry of a list column, with the keys of its row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = table.column(name).combine_chunks()
    parents = pc.list_parent_indices(lists)
    struct = pc.list_flatten(lists)
    columns = {key: table.column(key).combine_chunks().take(parents) for key in _KEYS}
    for index, field in enumerate(struct.type):
        columns[field.name] = pc.struct_field(struct, index)
    return pa.table(columns)
