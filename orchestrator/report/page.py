"""The report as one HTML file that needs nothing else: no network, no server, no other file.

A template escapes every value; style, scripts and data are put inline; a content security policy
allows exactly these scripts, by their hash, and no request at all. So a model's output that looks
like a script stays text, and what the page shows is what the rows said.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from orchestrator.analysis.effects import Scaling
from orchestrator.analysis.hardware import REFERENCES, DeviceSheet, Share
from orchestrator.analysis.rankings import interval
from orchestrator.analysis.selection import Differences, Setting, described
from orchestrator.analysis.summary import SETTLED, SHORT_STATE, STATE_MEANING, STATE_ORDER, Summary
from orchestrator.analysis.tables import BATCH
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.report.answers import answers
from orchestrator.report.charts import (
    MOST_LINES,
    clipped,
    effects_chart,
    front_figure,
    heat_map,
    published_chart,
    roofline_figure,
    scaling_figure,
    throughput_curve,
)
from orchestrator.report.findings import head_to_head, replicates, training
from orchestrator.report.forms import forms
from orchestrator.report.images import images_of
from orchestrator.report.interactive import cards_figure, prompts_figure
from orchestrator.report.payload import payload, prompt_points
from orchestrator.report.profiles import profiles_of
from orchestrator.report.run_report import shown_of
from orchestrator.report.svg import precision_style
from orchestrator.util import format as units
from orchestrator.util.format import one_line, script_json, tail, visible

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("data.js", "tips.js", "tables.js", "scatter.js", "timeline.js", "rows.js")
PROMPTS_TITLE = "Total length, output length and latency of prompts, in three dimensions"
MOST_CURVES = 60  # further tables have none
OPEN_TABLES = 6  # further ones are folded
LISTED = 12  # further winners and causes are folded
OPEN_FRONTS = 12  # further ones are not drawn
OPEN_EFFECTS = 16  # further ones are folded
MOST_EFFECTS = 300
MOST_FLAGGED = 300  # of each flag


def render(
    summary: Summary,
    measurements: Sequence[Measurement],
    with_items: Callable[[Sequence[Measurement]], Sequence[Measurement]] = lambda rows: rows,
) -> str:
    """The whole page.

    Args:
        summary: what the page says.
        measurements: all rows that ``summary`` was made from.
        with_items: brings the items and images of rows that were read without them.
    """
    jobs = len(summary.rows)
    summary, listed, left_out = shown_of(summary)
    if left_out.rows:
        listed = tuple(with_items(listed))
    points = prompt_points(listed)
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            summary=summary,
            style=asset("page.css"),
            script=_script(),
            policy=content_security_policy(),
            data=script_json(payload(summary, measurements, listed, points)),
            jobs=jobs,
            left_out=left_out,
            answers=answers(summary),
            head_to_head=head_to_head(summary),
            forms=forms(summary),
            training=training(summary),
            replicates=replicates(summary),
            published=[one for one in summary.published if one.measured],
            warned=_warnings(summary),
            timed=any(contest.fastest.metrics.latency_p50_s for contest in summary.contests),
            metered=any(contest.thriftiest for contest in summary.contests),
            prompts=prompts_figure(listed, points, PROMPTS_TITLE),
            cells=cells,
            units=units,
            State=State,
            SHORT_STATE=SHORT_STATE,
            STATE_MEANING=STATE_MEANING,
            STATE_ORDER=STATE_ORDER,
            OPEN_TABLES=OPEN_TABLES,
            LISTED=LISTED,
            described=described,
            apart=Differences.among,
            contests_apart=Differences.among([one.setting for one in summary.contests]),
            images=images_of(listed),
            profiles=profiles_of(listed),
            index={row.job_id: number for number, row in enumerate(listed)},
            OPEN_FRONTS=OPEN_FRONTS,
            OPEN_EFFECTS=OPEN_EFFECTS,
            MOST_EFFECTS=MOST_EFFECTS,
            MOST_FLAGGED=MOST_FLAGGED,
            MOST_LINES=MOST_LINES,
            REFERENCES=REFERENCES,
            cards_figure=cards_figure,
            effects_chart=effects_chart,
            published_chart=published_chart,
            heat_map=heat_map,
            curve=throughput_curve,
            MOST_CURVES=MOST_CURVES,
            clipped=clipped,
            front_figure=front_figure,
            scaling_figure=scaling_figure,
            roofline_figure=roofline_figure,
            scaling_groups=scaling_groups(summary.scalings),
            scaling_apart=Differences.among([one.setting for one in summary.scalings]),
            roofline_groups=roofline_groups(summary.roofline.shares),
            named=lambda row: _named(summary, row),
            listed_labels=lambda rows: units.listed([summary.label(row) for row in rows], 5),
            bar=bar,
            tops=_tops(summary),
            SETTLED=SETTLED,
            BATCH=BATCH,
            precision_style=precision_style,
        )
    )


@cache
def content_security_policy() -> str:
    """The policy of the page, in itself and where it is served: nothing is loaded from anywhere,
    and of scripts only our own run."""
    script_hash = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _warnings(summary: Summary) -> list[str]:
    """In a few words each: what may make a figure less than it seems."""
    told = []
    for banner in summary.banners:
        part = "" if banner.count == banner.of else f" in {banner.count:,} of {banner.of:,} rows"
        told.append(f"{banner.name}{part}")
    if summary.raised:
        told.append(units.plural(len(summary.raised), "flagged row"))
    told += [f"more than one {fact.name}" for fact in summary.provenance.mixed]
    if summary.damaged:
        told.append(units.plural(len(summary.damaged), "unreadable file"))
    return told


def _named(summary: Summary, row: Measurement) -> tuple[str, str]:
    """The choices of a row: its precision, "" where all have the same, and the rest."""
    told = summary.chosen(row)
    first, _, rest = told.partition(" ")
    return (first, rest) if first == row.precision else ("", told)


def bar(row: Measurement, top: float) -> tuple[float, float, float]:
    """Value, low and high of a row's throughput as percentages of ``top``."""
    low, high = interval(row)
    value = row.metrics.throughput or 0.0
    shares = [100 * v / top if top else 0.0 for v in (value, low, high)]
    return round(shares[0], 2), round(shares[1], 2), round(shares[2], 2)


def scaling_groups(scalings: Sequence[Scaling]) -> list[list[Scaling]]:
    """The entries of one piece of work each, which share a figure."""
    groups: dict[Setting, list[Scaling]] = {}
    for one in scalings:
        groups.setdefault(one.setting, []).append(one)
    return list(groups.values())


def roofline_groups(shares: Sequence[Share]) -> list[tuple[DeviceSheet, list[Share]]]:
    """The rows of each card, nearest to one of its limits first."""
    groups: dict[str, list[Share]] = {}
    for share in shares:
        groups.setdefault(share.sheet.device, []).append(share)
    return [
        (group[0].sheet, sorted(group, key=_nearness, reverse=True)) for group in groups.values()
    ]


def _nearness(share: Share) -> float:
    return max(share.bandwidth or 0.0, share.compute or 0.0)


def _tops(summary: Summary) -> dict[str, float]:
    """Upper end of the best interval, by unit: bars of one unit share one scale."""
    tops: dict[str, float] = {}
    for contest in summary.contests:
        tops[contest.unit] = max(tops.get(contest.unit, 0.0), interval(contest.fastest)[1])
    return tops


def _script() -> str:
    """All scripts as one, in a scope of its own. Nothing in it may end the element early."""
    body = "\n".join(asset(name) for name in SCRIPTS)
    assert "</script" not in body.lower()
    return f'(() => {{\n"use strict";\n{body}\n}})();'


@cache
def asset(name: str) -> str:
    """Return the text of one of the page's parts."""
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """The templates, each value escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["one_line"] = one_line
    environment.filters["tail"] = tail
    environment.filters["state_class"] = lambda state: f"s-{str(state).lower()}"
    return environment
