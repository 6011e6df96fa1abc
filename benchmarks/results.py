"""Rows on disk: one row appended durably, 50,000 rows read, beside JSON files and SQLite.

All hold the same measurements. JSON files are what a job script writes: one file a row, synced.
SQLite has one table with the columns that questions are asked of and the whole row as JSON, and
commits each row (synchronous=FULL, journal WAL). Reading means: every row's job, state, settings
and times as columns in memory; ours verifies the checksum of the file first.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from benchmarks.figures import Goal, Line, values
from benchmarks.setting import Setting, Takes

TITLE = "Results: appending and reading rows"
TAKES_S = Takes(whole=20, quick=10)


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    appended, stored = setting.sized((100, 50_000), (20, 20_000), (3, 40))
    with contextlib.ExitStack() as stack:
        started = [
            setting.started(
                stack,
                kind,
                sys.executable,
                "keep_rows.py",
                *(kind, setting.scratch / kind, appended, stored),
            )
            for kind in ("nightgrid", "json", "sqlite")
        ]
        turns = setting.turns_of(started)
    ours = turns["nightgrid"]
    names = {"json": "a JSON file a row, synced", "sqlite": "SQLite, a commit a row"}
    lines = [
        Line(
            what="append one row, durably",
            against="",
            unit="ms",
            ours=values(ours, "append_ms"),
            goal=Goal(kind="at most", value=10.0),
            note=f"{values(ours, 'append_cpu_ms')[0]:.2f} ms of CPU, and "
            f"{values(ours, 'settle_cpu_ms')[0]:.2f} for its part of a Parquet file later",
        )
    ]
    for kind, name in names.items():
        theirs = turns[kind]
        lines += [
            Line(
                what="append one row",
                against=name,
                unit="ms",
                ours=values(ours, "append_ms"),
                theirs=values(theirs, "append_ms"),
                goal=Goal(kind="at most", value=1.2) if kind == "sqlite" else Goal(),
                note=f"{values(theirs, 'append_cpu_ms')[0]:.2f} ms of CPU",
            ),
            Line(
                what=f"read {stored:,} rows",
                against=name,
                unit="s",
                ours=values(ours, "read_s"),
                theirs=values(theirs, "read_s"),
                note=f"{ours[0]['bytes'] / 2**20:,.0f} MiB beside "
                f"{theirs[0]['bytes'] / 2**20:,.0f} MiB",
            ),
        ]
    lines.append(
        Line(
            what=f"CPU per row read, {stored:,} rows",
            against=f"{stored // 10:,} rows, both compacted",
            unit="µs",
            ours=values(ours, "read_cpu_us_per_row"),
            theirs=values(ours, "read_tenth_cpu_us_per_row"),
            note="a ratio of 1 or less: reading grows no faster than the rows",
        )
    )
    return lines, {"rows appended in a turn": appended, "rows read": stored}
