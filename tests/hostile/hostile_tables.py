"""Files of rows that nobody should have written: every column, every type, every damage."""

from __future__ import annotations

import io
import zipfile
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from hostile_values import damaged, json_text, nearby, other_type, text, value_of

from orchestrator.store import disk
from orchestrator.store.column_docs import COLUMN_DOCS

_VERSION = b"nightgrid.schema_version"


def hostile_file(random: Random, sound: pa.Table) -> tuple[str, bytes, str]:
    """Name, content and a description of a file of rows, from two ``sound`` ones at least."""
    choice = random.random()
    if choice < 0.08:
        about, data = _another_format(random, sound)
    else:
        table, changes = _changed(random, sound)
        data = _parquet(random, table)
        about = "; ".join(changes)
        if choice < 0.2:
            data = damaged(random, data)
            about += "; bytes damaged"
    name, told = _name(random, data)
    return name, data, f"{about}; {told}"


def _name(random: Random, data: bytes) -> tuple[str, str]:
    choice = random.random()
    if choice < 0.6:
        job = random.choice(["0123456789abcdef", "rows", "x", "_"])
        number = random.choice([0, 1, 7, 999_999_999])
        return f"{job}-{number}-{disk.digest(data)}.parquet", "fitting name"
    if choice < 0.9:
        return f"compacted-{random.choice([0, 1, 10**12])}-{disk.digest(data)}.parquet", "compacted"
    names = ["x.parquet", "a b.parquet", "a\nb.parquet", "\x1b[31m.parquet", "裤.parquet"]
    names += [b"\xff\xfe.parquet".decode("utf-8", "surrogateescape"), "[bold].parquet"]
    return random.choice(names), "odd name"


def _changed(random: Random, table: pa.Table) -> tuple[pa.Table, list[str]]:
    changes: list[str] = []
    for _ in range(random.choice([1, 1, 1, 1, 2, 5])):
        table, what = random.choice(CHANGES)(random, table)
        changes.append(what)
    return table, changes


def _put(table: pa.Table, at: int, values: list[Any]) -> pa.Table:
    field = table.schema.field(at)
    return table.set_column(at, field, pa.array(values, field.type))


def value(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """Another value of the right type, in one row or in all."""
    if not table.num_rows or not table.num_columns:
        return table, "nothing"
    at = random.randrange(table.num_columns)
    field = table.schema.field(at)
    values = _plain(table, at)
    rows = range(len(values)) if random.random() < 0.3 else [random.randrange(len(values))]
    near = random.random() < 0.6
    try:
        for row in rows:
            values[row] = (
                nearby(random, field.type, values[row]) if near else value_of(random, field.type)
            )
        return _put(table, at, values), f"{field.name}={values[rows[0]]!r:.60}"
    except (TypeError, ValueError, pa.ArrowException, OverflowError):
        return table, "nothing"  # of a type that an earlier change brought


def _plain(table: pa.Table, at: int) -> list[Any]:
    column = table.column(at)
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64()).to_pylist()
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # an earlier change: text that is not UTF-8, a time
        return [None] * table.num_rows


def null(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    if not table.num_columns:
        return table, "nothing"
    at = random.randrange(table.num_columns)
    field = table.schema.field(at)
    nulls = pa.nulls(table.num_rows, field.type)
    return table.set_column(at, field, nulls), f"{field.name} null"


def kind(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """A column of another type: its own values where they can be cast, else others."""
    if not table.num_columns:
        return table, "nothing"
    at = random.randrange(table.num_columns)
    name, column = table.schema.names[at], table.column(at)
    other = other_type(random, column.type)
    try:
        made = column.cast(other)
    except (pa.ArrowException, KeyError):
        try:
            made = pa.array([value_of(random, other) for _ in range(table.num_rows)], other)
        except (TypeError, pa.ArrowException, OverflowError, ValueError):
            made = pa.nulls(table.num_rows, other)
    return table.set_column(at, name, made), f"{name}: {other!s:.60}"


def binary(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    texts = [i for i, field in enumerate(table.schema) if pa.types.is_string(field.type)]
    if not texts or not table.num_rows:
        return table, "nothing"
    at = random.choice(texts)
    values = [random.choice([b"\xff\xfe", b"\xed\xa0\x80", b"ok\xc3"])] * table.num_rows
    column = pa.array(values, pa.binary()).view(pa.string())
    field = table.schema.field(at)
    return table.set_column(at, field, column), f"{field.name} not UTF-8"


def columns(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    if not table.num_columns:
        return table, "nothing"
    at = random.randrange(table.num_columns)
    name = table.schema.names[at]
    action = random.choice(["drop", "double", "rename", "add", "shuffle"])
    if action == "drop":
        return table.remove_column(at), f"no {name}"
    if action == "shuffle":
        names = list(range(table.num_columns))
        random.shuffle(names)
        return table.select(names), "columns shuffled"
    meta = table.schema.metadata
    pairs = list(zip(table.schema.names, table.columns, strict=True))
    if action == "double":
        pairs.append((name, table.column(at)))
    elif action == "rename":
        pairs[at] = (text(random)[:30], table.column(at))
    else:
        other = other_type(random, pa.int64())
        pairs.append((text(random)[:30], pa.chunked_array([pa.nulls(table.num_rows, other)])))
    made = pa.Table.from_arrays([c for _, c in pairs], names=[n for n, _ in pairs])
    return made.replace_schema_metadata(meta), f"{action} {name}"


def rows(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    action = random.choice(["none", "twice", "many"])
    if table.nbytes > 20_000_000:
        return table, "nothing"
    if action == "none" or not table.num_columns:
        return table.slice(0, 0), "no rows"
    times = 2 if action == "twice" or table.nbytes > 100_000 else random.choice([20, 200])
    return pa.concat_tables([table] * times), f"rows {times} times"


def many(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """One record of a nested column over and over, which takes a few bytes in a file."""
    lists = [i for i, field in enumerate(table.schema) if pa.types.is_list(field.type)]
    if not lists or not table.num_rows:
        return table, "nothing"
    at, count = random.choice(lists), random.choice([1000, 500_000])
    field = table.schema.field(at)
    known = table.column(at).combine_chunks().flatten()
    one = known[:1] if len(known) else pa.nulls(1, field.type.value_type)
    ends = [0, *[count] * table.num_rows]
    column = pa.ListArray.from_arrays(ends, one.take(pa.repeat(0, count)))
    return table.set_column(at, field.name, column), f"{count:,} {field.name} in one row"


def metadata(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    meta = dict(table.schema.metadata or {})
    action = random.choice(["none", "version", "more"])
    if action == "none":
        return table.replace_schema_metadata(None), "no metadata"
    if action == "version":
        versions = ["", "0", "-1", "one", "²", "2", "999999", "1" * 5000, "\u0661"]
        meta[_VERSION] = random.choice(versions).encode()
        return table.replace_schema_metadata(meta), f"version {meta[_VERSION]!r:.20}"
    meta[text(random)[:30].encode() or b"x"] = random.randbytes(100)
    return table.replace_schema_metadata(meta), f"metadata {action}"


def ends(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """Numbers that are allowed and that nothing ever measures, in many columns: they pass the
    store's checks, and everything behind has to cope."""
    told = []
    for at in random.sample(
        range(table.num_columns), k=min(table.num_columns, random.choice([1, 5, 40]))
    ):
        field = table.schema.field(at)
        doc = COLUMN_DOCS.get(field.name)
        whole = pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type)
        if doc is None or not (whole or pa.types.is_floating(field.type)) or not table.num_rows:
            continue
        allowed = doc.allowed
        number: Any = random.choice([allowed.low, allowed.high, max(allowed.low, 1), 5e-324, 1e-9])
        if not allowed.finite and random.random() < 0.5:
            number = random.choice([float("nan"), float("inf"), float("-inf")])
        if whole:
            number = max(round(number), int(allowed.low))
        if pa.types.is_timestamp(field.type):
            number *= 1_000_000
        values = _plain(table, at)
        values[random.randrange(len(values))] = number
        if random.random() < 0.3:
            values = [number] * len(values)
        try:
            table = _put(table, at, values)
        except (TypeError, ValueError, pa.ArrowException, OverflowError):
            continue  # of a type that an earlier change brought
        told.append(f"{field.name}={number}")
    return table, ", ".join(told)


CHANGES = [
    *(*[value] * 8, *[ends] * 4, *[kind] * 5, *[null] * 2, *[columns] * 2),
    *(binary, rows, many, metadata),
]


def _parquet(random: Random, table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {
        "compression": random.choice(["none", "snappy", "zstd", "gzip", "brotli", "lz4"]),
        "use_dictionary": random.random() < 0.5,
        "write_statistics": random.random() < 0.5,
        "data_page_version": random.choice(["1.0", "2.0"]),
        "store_schema": random.random() < 0.85,
    }
    if random.random() < 0.2:
        options["row_group_size"] = 1
    try:
        pq.write_table(table, sink, **options)
    except (pa.ArrowException, UnicodeError):  # a type that Parquet does not have
        return b"PAR1" + random.randbytes(200) + b"PAR1"
    return sink.getvalue().to_pybytes()


def _another_format(random: Random, table: pa.Table) -> tuple[str, bytes]:
    what = random.choice(["empty", "text", "JSON", "Arrow", "zip", "noise", "magic"])
    if what == "Arrow":
        sink = pa.BufferOutputStream()
        feather.write_feather(pa.table({"job_id": ["x"]}), sink)
        return what, sink.getvalue().to_pybytes()
    if what == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("a", "b")
        return what, buffer.getvalue()
    contents = {
        "empty": b"",
        "text": b"job_id;state\nx;SUCCEEDED\n",
        "JSON": json_text(random).encode("utf-8", "surrogatepass"),
        "noise": random.randbytes(500),
        "magic": b"PAR1" + random.randbytes(40) + b"\xff\xff\xff\x7fPAR1",
    }
    return what, contents[what]
