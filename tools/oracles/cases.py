"""The oracles: each is a table of cases, and a case computes one value of the present product."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from tools.oracles.product import (
    ROOT,
    command,
    exit_code_names,
    job_ids,
    simulated_night,
    write_run,
)

Cases = Mapping[str, Callable[[], Any]]
NIGHTS = 400
#: Nights whose commands are kept as text; of the others a digest of every 25 commands.
WHOLE_NIGHTS = 40
_CHUNK = 25


# ---------------------------------------------------------------- job ids


def frozen_ids() -> Cases:
    """The frozen job ids, with the id that each job has now. Version 0.1.0 wrote the file: jobs of
    every workload, engine, device, precision and setting, and all jobs of the shipped grids, as a
    grid says them. Results are found again by ids; lines may be added, never changed."""
    file = ROOT / "tests" / "core" / "frozen_identities.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return {"ids": lambda: dict(job_ids(lines))}


# ---------------------------------------------------------------- reports and comparisons


@cache
def _results() -> Path:
    """A results directory with every recorded run, and with a later copy of each, whose figures
    differ by a known share."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    _results.directory = tempfile.TemporaryDirectory(prefix="oracles-")  # type: ignore[attr-defined]
    results = Path(_results.directory.name)  # type: ignore[attr-defined]
    tables: dict[str, pa.Table] = {}
    for source, table in (
        ("h100", pq.read_table(ROOT / "results" / "h100" / "grids.parquet")),
        ("past", _whole_rows(pq.read_table(ROOT / "results" / "past_runs" / "rows.parquet"))),
    ):
        for run in sorted(set(table["run"].to_pylist())):
            tables[f"{source}-{run}"] = table.filter(pc.equal(table["run"], run))
    for file in sorted((ROOT / "results" / "h100").glob("*_rows.jsonl")):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        if "attempt_id" in rows[0]:  # else a benchmark's own rows
            name = file.stem.removesuffix("_rows").replace("_", "-")
            tables[f"h100-{name}"] = _table(rows, tables["h100-g1-tiny"].schema)
    (written,) = (ROOT / "tests" / "store" / "version_0_1_0").glob("*.parquet")
    tables["version-0-1-0"] = pq.read_table(written)
    for name, table in tables.items():
        write_run(results / name, table)
        write_run(results / f"{name}-later", _later(table))
    return results


def _whole_rows(table: Any) -> Any:
    """The past runs, of which durations were kept, with the columns that every row must have."""
    import pyarrow as pa

    settings = ("workload", "model", "dataset", "accelerator", "cards", "precision", "engine")
    settings += ("isolation", "parameters", "batch_size_requested")
    attempts: dict[tuple[str, str], int] = {}
    columns: dict[str, list[Any]] = {"job_id": [], "attempt_id": [], "attempt_number": []}
    for row in table.to_pylist():
        text = json.dumps([row[name] for name in settings] + [row["replicate"] or 1])
        job_id = hashlib.sha256(text.encode()).hexdigest()[:16]
        number = attempts[row["run"], job_id] = attempts.get((row["run"], job_id), 0) + 1
        columns["job_id"].append(job_id)
        columns["attempt_id"].append(f"{job_id}-{number}")
        columns["attempt_number"].append(number)
    columns |= {
        name: [value] * table.num_rows
        for name, value in (
            ("schema_version", 1),
            ("purpose", "measure"),
            ("reason", "measured"),
            ("experiment", "past"),
        )
    }
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    pairs = [[tuple(pair) for pair in row or ()] for row in table["parameters"].to_pylist()]
    at = table.schema.get_field_index("parameters")
    return table.set_column(at, "parameters", pa.array(pairs, pa.map_(pa.string(), pa.string())))


def _table(rows: list[dict[str, Any]], schema: Any) -> Any:
    """Rows that were printed as JSON, as a table."""
    import pyarrow as pa

    columns = []
    for column in schema:
        values = [row.get(column.name) for row in rows]
        if column.name in ("run", "invocation_id"):
            values = ["printed"] * len(rows)
        elif pa.types.is_map(column.type):
            values = [list((value or {}).items()) for value in values]
        elif pa.types.is_list(column.type):
            values = [value or [] for value in values]
        elif pa.types.is_timestamp(column.type):
            values = [value and datetime.fromisoformat(value) for value in values]
        columns.append(pa.array(values, column.type))
    return pa.Table.from_arrays(columns, names=schema.names)


def _later(table: Any) -> Any:
    """The same rows from faster cards: all durations are shorter by up to 20 %, by the row's
    place, and rates higher."""
    import pyarrow as pa

    rows = [
        {name: _faster(name, value, 0.9 + 0.1 * math.sin(1.0 + at)) for name, value in row.items()}
        for at, row in enumerate(table.to_pylist())
    ]
    return pa.Table.from_pylist(rows, schema=table.schema)


def _faster(name: str, value: Any, factor: float) -> Any:
    """A value of a row, or of one of its samples, when all takes this share of its time."""
    if name == "measure":  # these are settings
        return value
    if isinstance(value, list):
        return [_faster(name, each, factor) for each in value]
    if isinstance(value, dict):
        return {key: _faster(key, inner, factor) for key, inner in value.items()}
    if not isinstance(value, float):
        return value
    if name.endswith("_per_s") or name.startswith("throughput") or name == "power_w":
        return value / factor
    return value * factor if re.search(r"_(s|ms|us)$", name) else value


def _runs() -> list[str]:
    return sorted(path.name for path in _results().iterdir() if not path.name.endswith("-later"))


def _json(*arguments: str) -> Any:
    """The JSON that a command prints, with its exit code."""
    code, out, err = command(*arguments, "--json", "--results", str(_results()))
    return {"exit_code": code, "answer": json.loads(out) if out else None, "said": bool(err)}


def _text(*arguments: str) -> Any:
    """The text that a command prints; its numbers are compared."""
    code, out, _ = command(*arguments, "--results", str(_results()))
    return {"exit_code": code, "text": out}


def reports() -> Cases:
    """``report --json`` and the report's text of every recorded run."""
    cases: dict[str, Callable[[], Any]] = {}
    for run in _runs():
        cases[f"{run}/json"] = partial(_json, "report", run)
        cases[f"{run}/text"] = partial(_text, "report", run, "--format", "terminal", "--verbose")
    return cases


def comparisons() -> Cases:
    """``compare --json`` of every recorded run with its later copy, and of some with others."""
    pairs = [(run, f"{run}-later") for run in _runs()]
    pairs += [
        ("version-0-1-0", "version-0-1-0"),
        ("h100-g2-precision", "h100-g3-batching"),
        ("h100-g1-tiny", "h100-g5-faults"),
        ("past-cpu", "past-gen"),
    ]
    cases: dict[str, Callable[[], Any]] = {}
    for before, after in pairs:
        cases[f"{before}/{after}"] = partial(_json, "compare", before, after, "--all")
    return cases


# ---------------------------------------------------------------- simulated nights


def nights() -> Cases:
    """The schedule's commands in 400 simulated nights."""
    return {f"seed-{seed:03}": partial(_night, seed) for seed in range(NIGHTS)}


def _night(seed: int) -> dict[str, Any]:
    night = simulated_night(seed)
    commands = night.pop("commands")
    night["commands"] = len(commands)
    if seed % (NIGHTS // WHOLE_NIGHTS) == 0:
        return night | {"text": commands}
    chunks = ["\n".join(commands[at : at + _CHUNK]) for at in range(0, len(commands), _CHUNK)]
    digests = [hashlib.sha256(chunk.encode()).hexdigest()[:6] for chunk in chunks]
    return night | {"digests": digests}


# ---------------------------------------------------------------- schema, exit codes, plans


def schema() -> Cases:
    """The JSON Schema of grid files as it is generated; descriptions are prose."""
    return {"grid": lambda: _without_prose(json.loads(command("schema", "grid")[1]))}


def _without_prose(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_prose(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    prose = {"description", "title", "$comment", "markdownDescription"}
    return {
        key: _without_prose(value)
        for key, value in schema.items()
        if not (key in prose and isinstance(value, str))
    }


def exit_codes() -> Cases:
    """The table of exit codes, and what command lines exit with."""
    smoke = str(ROOT / "grids" / "smoke.yaml")
    run, faster, results = (
        "h100-g2-precision",
        "h100-g2-precision-later",
        ("--results", str(_results())),
    )
    lines: dict[str, tuple[str, ...]] = {
        "nothing": (),
        "no such command": ("no-such-command",),
        "help": ("run", "--help"),
        "unknown option": ("report", "--no-such-option"),
        "plan": ("plan", smoke, *results),
        "plan without a file": ("plan", str(ROOT / "no-such-grid.yaml"), *results),
        "plan of emulated nodes": ("plan", smoke, "--emulate", "1x2", *results),
        "plan of senseless nodes": ("plan", smoke, "--emulate", "many", *results),
        "simulate": ("simulate", smoke, "--emulate", "1x8", *results),
        "report without a run": ("report", "no-such-run", *results),
        "compare": ("compare", run, faster, *results),
        "compare without a run": ("compare", run, "no-such-run", *results),
        "compare nothing": ("compare", "h100-g1-tiny", "h100-g5-faults", *results),
        "better": ("compare", run, faster, "--fail-on-regression", "1%", *results),
        "worse": (
            "compare",
            faster,
            run,
            "--fail-on-regression",
            "1%",
            "--noise",
            "0.1%",
            *results,
        ),
        "report": ("report", run, "--format", "csv", *results),
        "stop without a run": ("stop", "no-such-run", *results),
        "export without a run": (
            "export",
            "-",
            "--to",
            "datasets",
            "--run",
            "no-such-run",
            *results,
        ),
        "describe without a model": ("describe", str(ROOT / "no-such-model")),
        "schema": ("schema", "results"),
    }
    cases: dict[str, Callable[[], Any]] = {
        name: partial(lambda line: command(*line)[0], line) for name, line in lines.items()
    }
    return {"table": exit_code_names} | cases


def plans() -> Cases:
    """The plans of the shipped grids, on assumed servers."""
    return {path.stem: partial(_plan, path) for path in sorted((ROOT / "grids").glob("*.yaml"))}


def _plan(grid: Path) -> dict[str, Any]:
    empty = _results() / "version-0-1-0" / "no-runs"
    code, out, err = command("plan", str(grid), "--json", "--results", str(empty))
    if not out:
        places = [line.split(": ")[0].rpartition("/")[2] for line in err.splitlines()]
        return {
            "exit_code": code,
            "refused_at": [place for place in places if place.count(":") > 1],
        }
    plan = json.loads(out)
    summary = ("jobs", "run", "reuse", "skip", "unsupported")
    job = ("job_id", "experiment", "cards", "precision", "batch_size", "engine", "action")
    job += ("card_sets", "estimate_s", "needs")
    return {
        "exit_code": code,
        "nodes": [[node["accelerator"], node["cards"]] for node in plan["nodes"]],
        "summary": {name: plan["summary"][name] for name in summary},
        "jobs": [{name: one[name] for name in job} for one in plan["jobs"]],
    }


ORACLES: Mapping[str, Callable[[], Cases]] = {
    "ids": frozen_ids,
    "reports": reports,
    "comparisons": comparisons,
    "nights": nights,
    "schema": schema,
    "exit-codes": exit_codes,
    "plans": plans,
}
