"""Values, texts and files that programs trip over, drawn at random; and files of rows that nobody
should have written: every column, every type, every damage."""

from __future__ import annotations

import contextlib
import copy
import json
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from nested import places

from orchestrator.store import disk
from orchestrator.store.column_docs import COLUMN_DOCS

INTEGERS = [0, -1, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 5e-324, 1e300, 1.7976931348623157e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), 2.0**63, 1e15),
]
TEXTS = [
    *("", " ", "x", "0", "-1", "max", "null", "NaN", "true", "hpu-1", "a/b", "../x", "/etc/passwd"),
    *("a\0b", "a\nb", "a\r\nb", "\t", "\x1b[31m\x07", "\u202eevil", "[bold]x[/bold]", "[/]"),
    *("%s{0}", "💥" * 20, "裤 ✓", "<script>alert(1)</script>", "'; drop table rows; --", '"', "\\"),
    *("=", "=1+1", "\ufeff", "e\u0301" * 10, "²", "１２", "1e400", "9" * 400, "9" * 5000),
    "x" * 5000,
]
HUGE_TEXT = "y" * 1_000_000


def text(random: Random) -> str:
    """A text, rarely a huge one."""
    return HUGE_TEXT if random.random() < 0.01 else random.choice(TEXTS)


def nested_json(random: Random) -> str:
    """JSON nested too deeply for most, closed or not."""
    depth = random.choice([50, 900, 5_000, 100_000])
    start, end = random.choice([("[", "]"), ('{"a":', "}"), ('[{"":', "}]")])
    return start * depth + random.choice(["", "1"]) + (end * depth if random.random() < 0.6 else "")


BROKEN_JSON = ["", "{", "[1,", "nul", "NaN", "-Infinity", "1e999", '"\\ud800"']


def json_text(random: Random) -> str:
    """Text that may stand where JSON is expected."""
    choices = [
        lambda: json.dumps(json_value(random)),
        lambda: nested_json(random),
        lambda: "9" * random.choice([20, 400, 4_000, 5_000]),
        lambda: random.choice(BROKEN_JSON),
        lambda: text(random),
    ]
    return random.choice(choices)()


def json_value(random: Random, depth: int = 0) -> Any:
    scalars = [
        lambda: None,
        lambda: random.random() < 0.5,
        lambda: random.choice(INTEGERS),
        lambda: random.choice([1, -1]) * 10 ** random.choice([19, 30, 309, 400]),
        lambda: random.choice(FLOATS),
        lambda: text(random),
    ]
    kind = random.randrange(8 if depth < 3 else 6)
    if kind < len(scalars):
        return scalars[kind]()
    values = [json_value(random, depth + 1) for _ in range(random.choice([0, 1, 2, 5]))]
    return values if kind == 6 else {text(random)[:50]: value for value in values}


def mutated(random: Random, document: Any, changes: int | None = None) -> Any:
    document = copy.deepcopy(document)
    for _ in range(changes or random.choice([1, 1, 1, 2, 4])):
        path = random.choice(places(document))
        if not path:
            if random.random() < 0.1:
                return json_value(random)
            continue
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        action = random.random()
        if action < 0.7:
            parent[path[-1]] = json_value(random)
        elif action < 0.85:
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[text(random)[:50]] = json_value(random)
        else:
            parent.append(json_value(random))
    return document


def side_file(random: Random, sound: bytes) -> bytes:
    """Content for the place of a small file: its JSON or text changed, or anything."""
    choice = random.random()
    if choice < 0.6:
        try:
            changed = json.dumps(mutated(random, json.loads(sound)))
        except (ValueError, RecursionError):  # an earlier change made something else of it
            return damaged(random, sound)
        return changed.encode("utf-8", "surrogatepass")
    if choice < 0.75:
        return json_text(random).encode("utf-8", "surrogatepass")
    if choice < 0.9:
        return damaged(random, sound)
    return random.choice(
        [b"", b"\xff\xfe", b"\0" * 100, b"\n" * 1000, bytes(range(256)), sound * 50]
    )


def damaged(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 8])):
        at = random.randrange(len(changed) + 1)
        action = random.random()
        if action < 0.4 and changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
        elif action < 0.6:
            del changed[at:]
        elif action < 0.8:
            del changed[at : at + random.randrange(64)]
        else:
            changed[at:at] = random.randbytes(random.randrange(64))
    return bytes(changed)


def value_of(random: Random, kind: pa.DataType, depth: int = 0) -> Any:
    """A value that an array of this type can hold, seldom a decent one."""
    if random.random() < 0.15:
        return None
    if pa.types.is_boolean(kind):
        return random.random() < 0.5
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        low = -(2 ** (bits - 1)) if pa.types.is_signed_integer(kind) else 0
        return min(max(random.choice(INTEGERS), low), low + 2**bits - 1)
    if pa.types.is_floating(kind):
        return random.choice(FLOATS)
    if pa.types.is_timestamp(kind):
        return random.choice(
            [0, -1, 1, 10**15, 2**62, -(2**62), 2**63 - 1, -(2**63), 253402300799 * 10**6]
        )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return json_text(random) if random.random() < 0.3 else text(random)
    count = random.choice([0, 1, 1, 2, 3, 200 if depth == 0 and random.random() < 0.1 else 1])
    if pa.types.is_map(kind):
        key, item = kind.key_type, kind.item_type
        return [(value_of(random, key, 1) or "", value_of(random, item, 1)) for _ in range(count)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [value_of(random, kind.value_type, depth + 1) for _ in range(count)]
    if pa.types.is_struct(kind):
        return {field.name: value_of(random, field.type, depth + 1) for field in kind}
    raise TypeError(f"no hostile value for {kind}; add one, since the schema has it now")


def nearby(random: Random, kind: pa.DataType, sound: Any) -> Any:
    """The sound value with one thing in it replaced, so that all else is passed."""
    if isinstance(sound, list) and sound and random.random() < 0.9:
        changed = list(sound)
        at = random.randrange(len(changed))
        if pa.types.is_map(kind):
            key, _ = changed[at]
            changed[at] = (key, value_of(random, kind.item_type, 1))
        else:
            changed[at] = nearby(random, kind.value_type, changed[at])
        return changed
    if isinstance(sound, dict) and random.random() < 0.9:
        field = kind.field(random.randrange(kind.num_fields))
        return sound | {field.name: nearby(random, field.type, sound.get(field.name))}
    return value_of(random, kind)


def other_type(random: Random, kind: pa.DataType) -> pa.DataType:
    """Another type, often one that looks alike: in width, in nesting, in encoding."""
    simple = [
        *(pa.null(), pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float32()),
        *(pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.binary(4), pa.date32()),
        *(pa.time64("us"), pa.duration("s"), pa.timestamp("us"), pa.timestamp("ns", "UTC")),
        *(pa.timestamp("us", "Europe/Berlin"), pa.timestamp("s", "UTC"), pa.decimal128(38, 5)),
    ]
    choices = [
        lambda: random.choice(simple),
        lambda: pa.list_(random.choice([kind, *simple])),
        lambda: pa.large_list(random.choice([kind, *simple])),
        lambda: pa.struct([("x", random.choice([kind, *simple]))]),
        lambda: pa.map_(pa.string(), random.choice([kind, *simple])),
        lambda: pa.dictionary(pa.int32(), random.choice([pa.string(), pa.int64()])),
    ]
    if pa.types.is_nested(kind):
        choices += [lambda: _other_child(random, kind)] * 8
    return random.choice(choices)()


def _other_child(random: Random, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_map(kind):
        return pa.map_(pa.string(), other_type(random, kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(other_type(random, kind.value_type))
    if pa.types.is_large_list(kind):  # of an earlier change
        return pa.large_list(other_type(random, kind.value_type))
    fields = list(kind)
    at = random.randrange(len(fields))
    action = random.random()
    if action < 0.6:
        fields[at] = pa.field(fields[at].name, other_type(random, fields[at].type))
    elif action < 0.8:
        del fields[at]
    else:
        fields.insert(at, pa.field(random.choice(["x", fields[at].name]), pa.int64()))
    return pa.struct(fields)


_VERSION = b"nightgrid.schema_version"
#: What a change raises where there is nothing to be changed, or Arrow makes no array of it.
MISFITS = (TypeError, LookupError, ValueError, OverflowError, pa.ArrowException)


def hostile_file(random: Random, sound: pa.Table) -> tuple[str, bytes, str]:
    """Name, content and a description of a file of rows, from two ``sound`` ones at least."""
    choice = random.random()
    if choice < 0.08:
        about, data = _another_format(random)
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
        # An earlier change left no column, no row, or values of which nothing can be made.
        with contextlib.suppress(*MISFITS):
            table, what = random.choice(CHANGES)(random, table)
            changes.append(what)
    return table, changes


def _put(table: pa.Table, at: int, values: list[Any]) -> pa.Table:
    field = table.schema.field(at)
    return table.set_column(at, field, pa.array(values, field.type))


def value(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """Another value of the right type, in one row or in all."""
    at = random.randrange(table.num_columns)
    field = table.schema.field(at)
    values = _plain(table, at)
    rows = range(len(values)) if random.random() < 0.3 else [random.randrange(len(values))]
    how = random.choice(["near", "near", "any", "null"])
    for row in rows:
        near, other = nearby(random, field.type, values[row]), value_of(random, field.type)
        values[row] = {"near": near, "any": other, "null": None}[how]
    return _put(table, at, values), f"{field.name}={values[rows[0]]!r:.60}"


def _plain(table: pa.Table, at: int) -> list[Any]:
    column = table.column(at)
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64()).to_pylist()
    return column.to_pylist()


def kind(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """A column of another type: its own values where they can be cast, else others."""
    at = random.randrange(table.num_columns)
    name, column = table.schema.names[at], table.column(at)
    other = other_type(random, column.type)
    made = pa.nulls(table.num_rows, other)
    with contextlib.suppress(*MISFITS):
        made = pa.array([value_of(random, other) for _ in range(table.num_rows)], other)
    with contextlib.suppress(*MISFITS):
        made = column.cast(other)
    return table.set_column(at, name, made), f"{name}: {other!s:.60}"


def binary(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    texts = [i for i, field in enumerate(table.schema) if pa.types.is_string(field.type)]
    at = random.choice(texts)
    values = [random.choice([b"\xff\xfe", b"\xed\xa0\x80", b"ok\xc3"])] * table.num_rows
    column = pa.array(values, pa.binary()).view(pa.string())
    field = table.schema.field(at)
    return table.set_column(at, field, column), f"{field.name} not UTF-8"


def columns(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
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
    if action == "none":
        return table.slice(0, 0), "no rows"
    times = 2 if action == "twice" or table.nbytes > 100_000 else random.choice([20, 200])
    times = 1 if table.nbytes > 20_000_000 else times
    return pa.concat_tables([table] * times), f"rows {times} times"


def many(random: Random, table: pa.Table) -> tuple[pa.Table, str]:
    """One record of a nested column over and over, which takes a few bytes in a file."""
    lists = [i for i, field in enumerate(table.schema) if pa.types.is_list(field.type)]
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
        table = _put(table, at, values)
        told.append(f"{field.name}={number}")
    return table, ", ".join(told)


CHANGES = [
    *(*[value] * 10, *[ends] * 4, *[kind] * 5, *[columns] * 2),
    *(binary, rows, many, metadata),
]


def _parquet(random: Random, table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(table, sink, store_schema=random.random() < 0.85)
    except (pa.ArrowException, UnicodeError):  # a type that Parquet does not have
        return b"PAR1" + random.randbytes(200) + b"PAR1"
    return sink.getvalue().to_pybytes()


def _another_format(random: Random) -> tuple[str, bytes]:
    sink = pa.BufferOutputStream()
    feather.write_feather(pa.table({"job_id": ["x"]}), sink)
    contents = {
        "empty": b"",
        "text": b"job_id;state\nx;SUCCEEDED\n",
        "JSON": json_text(random).encode("utf-8", "surrogatepass"),
        "Arrow": sink.getvalue().to_pybytes(),
        "zip": b"PK\x05\x06" + bytes(18),  # without a file
        "noise": random.randbytes(500),
        "magic": b"PAR1" + random.randbytes(40) + b"\xff\xff\xff\x7fPAR1",
    }
    return random.choice([*contents.items()])
