"""Results as a Hugging Face dataset: a directory that ``load_dataset`` opens and a hub can take.

    DIR/README.md            the dataset card: configurations, what the rows are, what is not real
    DIR/rows/*.parquet       one row an attempt
    DIR/samples/*.parquet    one row a timed batch
    DIR/items/*.parquet      one row a prompt

Arrow maps have no counterpart there, so ``parameters``, ``details`` and the like are JSON.
Needs nothing but pyarrow; the library ``datasets`` is for reading it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import StoreError
from orchestrator.report.query import read_runs

if TYPE_CHECKING:
    import pyarrow as pa

_KEYS = ("run", "invocation_id", "attempt_id", "job_id", "final")
_FILE = "train-00000-of-00001.parquet"


def export_datasets(results: Path, directory: Path, runs: Sequence[str] = ()) -> dict[str, int]:
    """Write the dataset; the number of rows of each configuration.

    Raises:
        StoreError: there are no runs, one cannot be read, or ``directory`` is in use.
    """
    import pyarrow.parquet as pq

    table, damaged = read_runs(results, runs)
    if directory.exists() and any(directory.iterdir()):
        raise StoreError(f"{directory} is not empty; name a new directory")
    tables = {
        "rows": _without_maps(table.drop_columns(["samples", "items"])),
        "samples": _nested(table, "samples"),
        "items": _nested(table, "items"),
    }
    tables = {name: one for name, one in tables.items() if one.num_rows or name == "rows"}
    try:
        for name, one in tables.items():
            (directory / name).mkdir(parents=True)
            pq.write_table(one, directory / name / _FILE, compression="zstd")
        card = dataset_card(table, list(tables), damaged)
        (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}") from error
    return {name: one.num_rows for name, one in tables.items()}


def dataset_card(table: pa.Table, configurations: Sequence[str], damaged: Sequence[str]) -> str:
    """``README.md``: its head gives ``load_dataset`` the configurations, its text is for people."""
    lines = ["---", "configs:"]
    for name in configurations:
        lines += [
            f"- config_name: {name}",
            "  data_files:",
            "  - split: train",
            f"    path: {name}/*.parquet",
        ]
        lines += ["  default: true"] if name == "rows" else []
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
    from orchestrator.results.schema_docs import COLUMN_DOCS

    for name in table.column_names:
        if name not in ("samples", "items"):
            unit, meaning, _ = COLUMN_DOCS[name]
            lines.append(f"| `{name}` | {unit} | {meaning} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return "".join(c for c in text if c.isprintable() and c != "`")


def _without_maps(table: pa.Table) -> pa.Table:
    """Maps as JSON texts."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_map(field.type):
            values = table.column(index).to_pylist()
            texts = [None if v is None else _json(field.name, dict(v)) for v in values]
            table = table.set_column(index, field.name, pa.array(texts, pa.string()))
    return table.replace_schema_metadata(None)


def _json(name: str, values: Mapping[str, Any]) -> str:
    told = {k: json.loads(v) for k, v in values.items()} if name == "parameters" else dict(values)
    return json.dumps(told, ensure_ascii=False, sort_keys=True)


def _nested(table: pa.Table, name: str) -> pa.Table:
    """One row an entry of a list column, with the keys of the row that it belongs to."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = table.column(name).combine_chunks()
    parents = pc.list_parent_indices(lists)
    struct = pc.list_flatten(lists)
    columns = {key: table.column(key).combine_chunks().take(parents) for key in _KEYS}
    for index, field in enumerate(struct.type):
        columns[field.name] = pc.struct_field(struct, index)
    return pa.table(columns)
