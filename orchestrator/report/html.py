"""The report as one self-contained HTML file.

Values are escaped, and a content security policy allows only the page's scripts and no requests, so
hostile text stays text. To open ten thousand rows fast, data are stored by column in six digits,
and outputs and log tails have a budget. The page counts omissions; the Parquet tables have all.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from orchestrator.analysis.metrics import figures_of, memory_kind, peak_memory_bytes
from orchestrator.analysis.rankings import interval, throughput
from orchestrator.analysis.selection import (
    Differences,
    described,
    precision_rank,
    stated_parameters,
)
from orchestrator.analysis.summary import SETTLED, STALE_AFTER_S, STATES, Summary
from orchestrator.analysis.timeline import duration_s
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import interactive, wording
from orchestrator.report.charts import clipped, front_figure, heat_map, throughput_curve
from orchestrator.report.sections import cards_table, questions_section, sections
from orchestrator.report.svg import SHAPES, precision_style
from orchestrator.store import files as run_files
from orchestrator.util import format as units
from orchestrator.util.format import finite, one_line, script_json, tail, visible

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("page.js", "prompts_3d.js", "rows.js")
PROMPTS_TITLE = "Total length, output length and latency of prompts, in three dimensions"
#: Limits of the templates.
LIMITS = {
    "MOST_CURVES": 60,  # further tables have none
    "OPEN_TABLES": 6,  # further ones are folded
    "LISTED": 12,  # further winners and causes are folded
    "OPEN_FRONTS": 12,  # further ones are not drawn
    "MOST_FIGURES": 6,  # of a section; `--figures` writes all
    "OPEN_ROWS": 20,  # of a section's table; further ones are folded
    "MOST_LISTED": 300,  # rows of a section's table, and flagged rows of each flag
}
#: Runs of up to this many jobs are shown whole.
ORDINARY_ROWS = 10_000
#: Most tables, winners and causes, each, of larger runs.
MOST_SHOWN = 300


def page_part(summary: Summary) -> tuple[Summary, tuple[Measurement, ...], dict[str, int]]:
    """Return the summary as the page prints it, the rows it lists, and counts of what it omits."""
    limited = ("tables", "rankings", "causes")
    if len(summary.rows) <= ORDINARY_ROWS:
        return summary, summary.rows, dict.fromkeys(("rows", *limited), 0)
    cut = {name: getattr(summary, name)[:MOST_SHOWN] for name in limited}
    shown = replace(summary, **cut)
    first = chain(
        (row.job_id for row in summary.rows if row.state not in SETTLED),
        (row.job_id for table in shown.tables for row in table.cells.values()),
        (row.job_id for row in summary.rows),
    )
    listed = set(islice(dict.fromkeys(first), ORDINARY_ROWS))
    rows = tuple(row for row in summary.rows if row.job_id in listed)
    left_out = {name: len(getattr(summary, name)) - len(part) for name, part in cut.items()}
    return shown, rows, left_out | {"rows": len(summary.rows) - len(rows)}


def render(
    summary: Summary,
    measurements: Sequence[Measurement],
    with_items: Callable[[Sequence[Measurement]], Sequence[Measurement]] = lambda rows: rows,
) -> str:
    """Return the whole page; ``with_items`` adds items and images to rows read without them."""
    jobs = len(summary.rows)
    summary, listed, left_out = page_part(summary)
    if left_out["rows"]:
        listed = tuple(with_items(listed))
    points = interactive.prompt_points(listed)
    every = sections(summary) if summary.measured else ()
    tops: dict[str, float] = {}  # of the bars, by unit
    for ranking in summary.rankings:
        tops[ranking.unit] = max(tops.get(ranking.unit, 0.0), interval(ranking.fastest)[1])
    template = environment().get_template("page.html.jinja")
    return template.render(
        summary=summary,
        style=asset("page.css"),
        script=_script(),
        policy=content_security_policy(),
        data=script_json(payload(summary, measurements, listed, points)),
        jobs=jobs,
        left_out=left_out,
        answers=wording.answers(summary),
        questions=questions_section(summary) if summary.answers else None,
        cards_table=cards_table(summary.timeline),
        head_to_head=[one for one in every if one.id.startswith("head-")],
        sections=[one for one in every if not one.id.startswith("head-")],
        warned=list(_warnings(summary)),
        timed=any(ranking.fastest.metrics.latency_p50_s for ranking in summary.rankings),
        metered=any(ranking.most_work_per_joule for ranking in summary.rankings),
        tops=tops,
        prompts=interactive.prompts_figure(listed, points, PROMPTS_TITLE),
        images=images_of(listed),
        profiles=profiles_of(listed),
        index={row.job_id: number for number, row in enumerate(listed)},
        apart=Differences.among,
        rankings_apart=Differences.among([one.setting for one in summary.rankings]),
        named=lambda row: _named(summary, row),
        listed_labels=lambda rows: units.listed([summary.label(row) for row in rows], 5),
    )


@cache
def content_security_policy() -> str:
    """Return the page's policy: nothing is loaded, and only its own scripts run."""
    script_hash = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _warnings(summary: Summary) -> Iterator[str]:
    for banner in summary.banners:
        part = "" if banner.count == banner.of else f" in {banner.count:,} of {banner.of:,} rows"
        yield f"{banner.name}{part}"
    if summary.raised:
        yield units.plural(len(summary.raised), "flagged row")
    yield from (f"more than one {fact.name}" for fact in summary.provenance.mixed)
    if summary.damaged:
        yield units.plural(len(summary.damaged), "unreadable file")


def _named(summary: Summary, row: Measurement) -> tuple[str, str]:
    """Return the choices of a row: its precision, "" if all have the same, and the rest."""
    label = summary.chosen(row)
    first, _, rest = label.partition(" ")
    return (first, rest) if first == row.precision else ("", label)


def bar(row: Measurement, top: float) -> list[float]:
    """Return value, low and high of a row's throughput as percentages of ``top``."""
    return [round(100 * v / top, 2) if top else 0.0 for v in (throughput(row), *interval(row))]


def _script() -> str:
    """Return all scripts as one in its own scope, free of ``</script``."""
    body = "\n".join(asset(name) for name in SCRIPTS)
    assert "</script" not in body.lower()
    return f'(() => {{\n"use strict";\n{body}\n}})();'


@cache
def asset(name: str) -> str:
    """Return the text of a file of the page, or of the watch page."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Return the template environment, with escaping."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.globals.update(
        wording=wording,
        units=units,
        State=State,
        STATES=STATES,
        SETTLED=SETTLED,
        STALE_AFTER_S=STALE_AFTER_S,
        **LIMITS,
        described=described,
        precision_style=precision_style,
        bar=bar,
        clipped=clipped,
        cards_figure=interactive.cards_figure,
        heat_map=heat_map,
        throughput_curve=throughput_curve,
        front_figure=front_figure,
    )
    environment.filters["one_line"] = one_line
    environment.filters["first_of"] = lambda drawn, most: list(islice(drawn, most))
    environment.filters["tail"] = tail
    environment.filters["state_class"] = lambda state: f"s-{str(state).lower()}"
    return environment


# ---------------------------------------------------------------- data for the scripts

MOST_TEXT = 1_500_000  # characters of outputs, and as many of log tails
LONGEST_OUTPUT = 600
LONGEST_TAIL = 4_000

Json = dict[str, object]
Read = Callable[[Measurement], object]


def payload(
    summary: Summary,
    measurements: Sequence[Measurement],
    rows: Sequence[Measurement],
    points: Json,
) -> Json:
    """Return the scripts' data on the listed rows as a JSON-able object."""
    return {
        "count": len(rows),
        "precisions": {
            name: SHAPES[precision_style(name)]
            for name in sorted({row.precision for row in rows}, key=precision_rank)
        },
        "styles": {row.precision: precision_style(row.precision) for row in rows},
        "labels": {
            "precision": any(label.precision for label in summary.labels.values()),
            "batch": any(label.batch for label in summary.labels.values()),
        },
        "columns": _columns(summary, measurements, rows),
        "scatter": points,
    }


def _columns(
    summary: Summary, measurements: Sequence[Measurement], rows: Sequence[Measurement]
) -> Json:
    """Return columns by name: ``{"v": […]}`` for numbers, ``{"d": […], "c": […]}`` for texts."""
    attempts: dict[str, int] = {}
    for row in measurements:
        if row.started_at is not None:
            attempts[row.job_id] = attempts.get(row.job_id, 0) + 1
    settings, labels = summary.settings, summary.labels

    def commit(row: Measurement) -> str:
        changed = " with uncommitted changes" if row.git_dirty else ""
        return row.git_commit[:12] + changed if row.git_commit else ""

    def details(row: Measurement) -> str:
        figures = {m.title: f"{units.number(v)} {m.unit}".rstrip() for m, v in figures_of(row)}
        return one_line(described({**figures, **row.details}), 900)

    texts: dict[str, Read] = {
        # ``page.js`` joins labels from their parts, of which there are few.
        "before": lambda r: f"{labels[r.job_id].where} {labels[r.job_id].work}".strip(),
        "after": lambda r: labels[r.job_id].rest,
        "device": lambda r: settings[r.job_id].where,
        "parameters": lambda r: described(stated_parameters(settings[r.job_id])),
        "memory_kind": memory_kind,
        "where": wording.where,
        "reason": lambda r: one_line(r.reason, 900),
        "flags": lambda r: one_line("; ".join(map(str, summary.raised.get(r.job_id, ()))), 900),
        "warm_up": wording.warm_up,
        "commit": commit,
        "versions": lambda r: described(r.versions),
        "details": details,
        "log": lambda r: one_line(r.log or "", 300) if r.state is not State.SUCCEEDED else "",
    }
    texts |= {name: attrgetter(path) for name, path in _TEXTS.items()}
    numbers: dict[str, Read] = {
        "repeats": lambda r: r.metrics.repeats or None,
        "at_least": lambda r: int(summary.at_least(r)) or None,
        "memory": peak_memory_bytes,
        "attempts": lambda r: attempts.get(r.job_id, 0),
        "started": lambda r: r.started_at and round(r.started_at, 1),
        "duration": duration_s,
    }
    numbers |= {name: attrgetter(path) for name, path in _NUMBERS.items()}
    columns: Json = {"job_id": {"v": [row.job_id for row in rows]}}
    for name, read in texts.items():
        columns[name] = _coded(visible(str(read(row) or "")) for row in rows)
    for name, read in numbers.items():
        digits = 15 if name == "started" else 6
        known = (value if isinstance(value := read(row), (int, float)) else None for row in rows)
        values = [finite(value, digits) for value in known]
        if any(value is not None for value in values):
            columns[name] = {"v": values}
    tails = (tail(row.failure_tail or "", LONGEST_TAIL) for row in rows)
    columns["tail"] = _coded(_within_budget(tails))
    columns["outputs"] = _coded(_within_budget(map(_outputs, rows)))
    return columns


_SAME = ("state", "experiment", "workload", "model", "dataset", "precision", "engine", "isolation")
#: Columns of texts and of numbers, with their paths in a row.
_TEXTS = {name: name for name in (*_SAME, "failure_class", "stop_reason", "precision_detail")} | {
    "batch": "batch_size_requested",
    "unit": "metrics.throughput_unit",
    "energy_source": "metrics.energy_source",
    "driver": "driver_version",
}
_NUMBERS = {name: name for name in ("cards", "batch_size", "parameter_count")} | {
    "throughput": "metrics.throughput",
    "low": "metrics.throughput_low",
    "high": "metrics.throughput_high",
    "total_rate": "metrics.total_tokens_per_s",
    "ttft": "metrics.ttft_s",
    "tpot50": "metrics.tpot_p50_s",
    "tpot95": "metrics.tpot_p95_s",
    "tpot99": "metrics.tpot_p99_s",
    "latency50": "metrics.latency_p50_s",
    "latency95": "metrics.latency_p95_s",
    "weights": "weight_bytes",
    "load": "load_s",
    "compile": "compile_s",
    "warmup": "warmup_s",
    "measured": "metrics.measure_s",
    "energy": "metrics.energy_j",
    "power": "metrics.power_w",
    "per_joule": "metrics.work_per_joule",
    "jobs_before": "jobs_before",
    "threads": "threads",
    "niceness": "niceness",
    "emulated": "emulated",
    "random": "random_weights",
    "synthetic": "synthetic_data",
    "resident": "model_was_resident",
}


def _coded(texts: Iterable[str]) -> Json:
    codes: dict[str, int] = {}
    return {"c": [codes.setdefault(text, len(codes)) for text in texts], "d": list(codes)}


def _within_budget(texts: Iterable[str]) -> Iterable[str]:
    """Yield the texts; once distinct ones exceed the budget, a note replaces new ones."""
    known: set[str] = set()
    spent = 0
    for text in texts:
        if text and text not in known:
            if spent + len(text) > MOST_TEXT:
                yield "Left out of the page for its size; the Parquet tables have it."
                continue
            known.add(text)
            spent += len(text)
        yield text


def _outputs(row: Measurement) -> str:
    texts = [visible(item.output_text) for _, item in row.items if item.output_text is not None]
    return "\x1e".join(
        text if len(text) <= LONGEST_OUTPUT else text[:LONGEST_OUTPUT] + "…" for text in texts
    )


# ---------------------------------------------------------------- images

_PNG = b"\x89PNG\r\n\x1a\n"
MOST_BYTES = 6_000_000


def images_of(rows: Sequence[Measurement]) -> Json:
    """Return images as pairs of row and data URL up to ``MOST_BYTES``, and the number left out."""
    images = [(row, row.image) for row in rows if row.image and row.image.startswith(_PNG)]
    shown: list[tuple[Measurement, str]] = []
    left = MOST_BYTES
    for row, image in images:
        if len(image) <= left:
            left -= len(image)
            shown.append((row, f"data:image/png;base64,{base64.b64encode(image).decode()}"))
    return {
        "shown": shown,
        "left_out": len(images) - len(shown),
        "random_weights": all(row.random_weights for row, _ in shown),
    }


# ---------------------------------------------------------------- profiles

_ABOUT = (("", "profile"), ("copies: ", "profile_copies"), ("", "profile_launches"))


def profiles_of(rows: Sequence[Measurement]) -> list[Json]:
    """Return the profiles: operators, costliest first, and the name of the trace file or ""."""
    profiles: list[Json] = []
    for row in rows:
        details, name = row.details, run_files.trace_of(row.attempt_id)
        if "profile" in details:
            traced = details.get("profile_trace_bytes", "").isdigit() and run_files.is_trace(name)
            operators = [one for one in details.get("profile_operators", "").split("; ") if one]
            about = [word + details[key] for word, key in _ABOUT if key in details]
            trace = name if traced else ""
            profiles.append({"row": row, "operators": operators, "about": about, "trace": trace})
    return profiles
