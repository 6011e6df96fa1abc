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

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement
from orchestrator.report import cells, units
from orchestrator.report.cards_figure import cards_figure
from orchestrator.report.causes import SETTLED, STATE_ORDER
from orchestrator.report.contests import interval, work_of
from orchestrator.report.drawing import precision_style
from orchestrator.report.figures import clipped, throughput_curve
from orchestrator.report.findings import replicates
from orchestrator.report.grouping import Differences, Setting, described, unusual
from orchestrator.report.images import images_of
from orchestrator.report.labels import label
from orchestrator.report.payload import payload
from orchestrator.report.plots import (
    MOST_LINES,
    front_figure,
    ratio_bars,
    roofline_figure,
    scaling_figure,
)
from orchestrator.report.published import REFERENCES
from orchestrator.report.reference_data import DeviceSheet
from orchestrator.report.roofline import Share
from orchestrator.report.safe import one_line, script_json, tail, visible
from orchestrator.report.scaling import Scaling
from orchestrator.report.shown import shown_of
from orchestrator.report.summary import SHORT_STATE, STATE_MEANING, Summary, Table

if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPTS = ("data.js", "tips.js", "tables.js", "scatter.js", "timeline.js", "rows.js")
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
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            summary=summary,
            style=asset("page.css"),
            script=_script(),
            policy=content_security_policy(),
            data=script_json(payload(summary, measurements, listed)),
            jobs=jobs,
            left_out=left_out,
            replicates=replicates(summary),
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
            index={row.job_id: number for number, row in enumerate(listed)},
            OPEN_FRONTS=OPEN_FRONTS,
            OPEN_EFFECTS=OPEN_EFFECTS,
            MOST_EFFECTS=MOST_EFFECTS,
            MOST_FLAGGED=MOST_FLAGGED,
            MOST_LINES=MOST_LINES,
            REFERENCES=REFERENCES,
            cards_figure=cards_figure,
            curve=throughput_curve,
            clipped=clipped,
            front_figure=front_figure,
            scaling_figure=scaling_figure,
            roofline_figure=roofline_figure,
            ratio_bars=ratio_bars,
            scaling_groups=scaling_groups(summary.scalings),
            scaling_apart=Differences.among([one.setting for one in summary.scalings]),
            work_of=work_of,
            unusual=unusual(work_of(summary.settings[one.row.job_id]) for one in summary.steps),
            roofline_groups=roofline_groups(summary.roofline.shares),
            heat=heat,
            without_precision=lambda row: summary.chosen(row).partition(" ")[2],
            bar=bar,
            tops=_tops(summary),
            SETTLED=SETTLED,
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


def heat(table: Table, row: Measurement) -> float:
    """Darkness of a cell, 0 to 1: its throughput as a share of the table's highest."""
    top = 0.0 if row.job_id in table.flagged else table.top
    return round((row.metrics.throughput or 0.0) / top, 3) if top else 0.0


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
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["chosen"] = lambda row, summary: summary.chosen(row)
    environment.filters["label"] = label
    environment.filters["one_line"] = one_line
    environment.filters["tail"] = tail
    environment.filters["state_class"] = lambda state: f"s-{str(state).lower()}"
    return environment
