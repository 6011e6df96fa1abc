"""``docs/schema.md`` from the schema: every column with its type, unit and meaning.

``python -m orchestrator.schema_markdown > docs/schema.md`` writes it; a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.schema import RAW_COLUMNS, SCHEMA_VERSION, schema

if TYPE_CHECKING:
    import pyarrow as pa


def markdown() -> str:
    """``docs/schema.md``: every column with its type, unit and description."""
    parts = [
        "# Columns of the result tables",
        "Generated from `orchestrator/schema.py` by `python -m orchestrator.schema_markdown`; "
        "do not edit.",
        f"Schema version {SCHEMA_VERSION}. One row per attempt, successful or not. Take the newest "
        "row with `final` of each `job_id` for what became of a job; the pair (`invocation_id`, "
        "`attempt_id`) tells copies of a row.",
        _table([(column.name, column) for column in schema()]),
    ]
    for name in ("measure", *RAW_COLUMNS):
        kind = schema().field(name).type
        struct = kind if name == "measure" else kind.value_type
        parts += [f"## Fields of `{name}`", _table([(f.name, f) for f in struct])]
    parts += ["## Reading them", _EXAMPLES.strip()]
    return "\n\n".join(parts) + "\n"


def _table(named: Sequence[tuple[str, pa.Field]]) -> str:
    lines = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    for name, field in named:
        metadata = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
        unit = metadata.get("unit", "")
        lines.append(f"| `{name}` | {_short(field.type)} | {unit} | {metadata['description']} |")
    return "\n".join(lines)


def _short(kind: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_map(kind):
        return "map of strings"
    if pa.types.is_list(kind):
        return f"list of {_short(kind.value_type)}"
    return "struct" if pa.types.is_struct(kind) else str(kind).replace("double", "float64")


_EXAMPLES = """
Any reader of Parquet opens `<results>/<run>/rows/*.parquet`, also while the run writes:

```sql
-- DuckDB: the best batch size of each precision
SELECT precision, arg_max(batch_size, throughput) AS batch_size, max(throughput) AS tokens_per_s
FROM read_parquet('results/smoke/rows/*.parquet')
WHERE final AND state = 'SUCCEEDED' GROUP BY precision;

-- DuckDB: every timed batch
SELECT job_id, unnest(samples, recursive := true) FROM read_parquet('results/smoke/rows/*.parquet');
```

```python
pyarrow.dataset.dataset("results/smoke/rows").to_table()
pandas.read_parquet("results/smoke/rows")
polars.read_parquet("results/smoke/rows/*.parquet")
Store.open(Path("results"), "smoke").measurements()  # verified, typed, each row once
```

Nightgrid's own reader verifies the checksum that each file name holds, reports damaged files and
sees each row once even during a compaction. The others see a row twice for the moment between the
appearance of a compacted file and the removal of the fragments it replaces.
"""


if __name__ == "__main__":
    print(markdown(), end="")
