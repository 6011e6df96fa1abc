"""The summary as Markdown, for an issue, a wiki page or a commit message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.analysis.rankings import Contest
from orchestrator.analysis.selection import Differences, described
from orchestrator.analysis.summary import SHORT_STATE, STATE_MEANING, Summary
from orchestrator.analysis.tables import Table
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.report.answers import answers
from orchestrator.report.findings import Finding, findings
from orchestrator.util import format as units
from orchestrator.util.format import markdown, tail


def to_markdown(summary: Summary) -> str:
    """The whole summary as GitHub-flavoured Markdown."""
    sides = len(summary.head_to_head)
    found = findings(summary)
    measured = [
        *(_finding(finding) for finding in found[:sides]),
        _contests(summary),
        *(_table(table) for table in summary.tables),
        _legend(summary),
        *(_finding(finding) for finding in found[sides:]),
        _flagged(summary),
    ]
    parts = [
        _headline(summary),
        *(measured if summary.measured else ()),
        _causes(summary),
        _cards(summary),
        _provenance(summary),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(summary: Summary) -> str:
    lines = [f"# Run {markdown(summary.run)}", ""]
    for text in answers(summary):
        lines += [f"**{markdown(text)}**", ""]
    lines.append(summary.verdict)
    if summary.counts:
        lines += ["", ", ".join(f"{n:,} {markdown(str(s))}" for s, n in summary.counts.items())]
    for workload, facts in summary.shared.items():
        lines += ["", markdown(f"{workload}: {described(facts)}")]
    for banner in summary.banners:
        names = markdown(units.listed(list(banner.details)))
        lines += [
            "",
            f"> **{banner.name}** in {banner.count:,} of {units.plural(banner.of, 'row')} "
            f"({names}). {banner.meaning}",
        ]
    if summary.damaged:
        files = units.plural(len(summary.damaged), "file")
        lines += [
            "",
            f"> **{files} could not be read**: {markdown(units.listed(list(summary.damaged), 3))}",
        ]
    for fact in summary.provenance.mixed:
        values = markdown(units.listed([value for value, _ in fact.values]))
        lines += ["", f"> **Mixed {markdown(fact.name)}**: {values}."]
    return "\n".join(lines)


def _contests(summary: Summary) -> str:
    if not summary.contests:
        return ""
    apart = Differences.among([contest.setting for contest in summary.contests])
    figures = any(contest.leaders for contest in summary.contests)
    metered = any(contest.thriftiest for contest in summary.contests)
    lines = []
    for contest in summary.contests:
        about = described(apart.of(contest.setting))
        lines.append(
            [
                markdown(contest.setting.model),
                markdown(contest.setting.where + (f" · {about}" if about else "")),
                markdown(summary.chosen(contest.fastest)),
                markdown(cells.throughput(contest.fastest)),
                markdown(cells.standing(contest, summary.chosen)),
                markdown(_latency(summary, contest.quickest)),
                markdown(_memory(summary, contest.leanest)),
                *([markdown(_energy(summary, contest.thriftiest))] if metered else []),
                *([markdown(_leaders(summary, contest))] if figures else []),
            ]
        )
    head = (
        "model",
        "device",
        "fastest setting",
        "throughput",
        "verdict",
        "lowest latency of a prompt (p50)",
        "smallest peak memory",
        *(["most work per joule"] if metered else []),
        *(["best by other figures"] if figures else []),
    )
    return "## Best setting for each model and device\n\n" + _grid(head, lines, right=(3,))


def _latency(summary: Summary, row: Measurement | None) -> str:
    if row is None:
        return units.MISSING
    return f"{units.seconds(row.metrics.latency_p50_s)} ({summary.chosen(row)})"


def _energy(summary: Summary, row: Measurement | None) -> str:
    return cells.energy(row) + (f" ({summary.chosen(row)})" if row is not None else "")


def _leaders(summary: Summary, contest: Contest) -> str:
    told = [f"{one.title} {cells.leader(one, summary.chosen(one.row))}" for one in contest.leaders]
    return "; ".join(told) or units.MISSING


def _memory(summary: Summary, row: Measurement | None) -> str:
    return units.MISSING if row is None else f"{cells.memory(row)} ({summary.chosen(row)})"


def _table(table: Table) -> str:
    lines = []
    for name in table.lines:
        line = [f"**{markdown(name)}**"]
        for column in table.columns:
            cell = cells.cell_text(table, name, column)
            value = f"**{cell.value}**" if cell.mark == "*" else cell.value
            tied = {"~": " \\~", "!": " !"}.get(cell.mark, "")
            line.append(f"{value}{tied} {markdown(cell.note)}".strip())
        lines.append(line)
    columns = (cells.column_title(table, column) for column in table.columns)
    head = tuple(map(markdown, (table.unit or "state", *columns)))
    told = " · ".join(filter(None, (described(table.about), cells.scopes(table))))
    about = f"\n\n{markdown(told)}" if told else ""
    right = range(1, len(table.columns) + 1)
    return f"## {markdown(table.title)}{about}\n\n{_grid(head, lines, right)}"


def _legend(summary: Summary) -> str:
    told = [
        f"{SHORT_STATE[state]}: {STATE_MEANING[state]}"
        for state in summary.counts
        if str(state) != "SUCCEEDED"
    ]
    flagged = ["!: flagged, ranks nowhere"] if summary.raised else []
    words = ["**bold**: best", "\\~: tied for the best", "( ): no complete repeat", *flagged, *told]
    return "; ".join(words) + "." if summary.tables else ""


def _finding(finding: Finding) -> str:
    lines = [[markdown(text) for text in row] for row in finding.rows]
    parts = [f"## {finding.title}"]
    parts += [_grid(finding.head, lines, finding.numbers)] if lines else []
    parts += [markdown(finding.note)] if finding.note else []
    return "\n\n".join(parts)


def _flagged(summary: Summary) -> str:
    parts = []
    for flagged in summary.flagged:
        flag = flagged.flag
        lines = [[markdown(summary.label(row)), markdown(reason)] for row, reason in flagged.rows]
        parts.append(f"**{markdown(flag.name)}**: {markdown(flag.description)} {flagged.says}")
        parts.append(_grid(("job", "reason"), lines))
    return "\n\n".join(["## Flagged rows", *parts]) if parts else ""


def _causes(summary: Summary) -> str:
    if not summary.causes:
        return ""
    parts = ["## What did not run, and why"]
    for cause in summary.causes:
        names = markdown(units.listed([summary.label(row) for row in cause.rows]))
        reason = markdown(cause.reason) or "no reason was recorded"
        parts.append(
            f"- **{len(cause.rows):,} × {markdown(str(cause.state))}** {reason}  \n  {names}"
        )
        if cause.example.failure_tail:
            block = tail(cause.example.failure_tail, 1500)
            # Indented code has no closing mark that hostile text could write.
            parts.append("\n".join(f"      {line}" for line in block.splitlines()))
    return "\n\n".join(parts)


def _cards(summary: Summary) -> str:
    lanes = summary.timeline.lanes
    if not lanes:
        return ""
    lines = [
        [
            markdown(lane.name),
            str(len(lane.spans)),
            units.seconds(lane.assigned_s),
            units.seconds(lane.unassigned_s),
            units.percent(lane.assigned, 3),
        ]
        for lane in lanes
    ]
    return "## Cards\n\n" + _grid(
        ("card", "attempts", "time assigned", "unassigned", "share"), lines, range(1, 5)
    )


def _provenance(summary: Summary) -> str:
    facts = (*summary.provenance.versions, *summary.provenance.facts)
    if not facts:
        return ""
    lines = [
        [markdown(fact.name), markdown(units.listed([v for v, _ in fact.values], 8))]
        for fact in facts
    ]
    return "## Made with\n\n" + _grid(("what", "value"), lines)


def _grid(head: Sequence[str], lines: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    align = ["--:" if i in set(right) else "---" for i in range(len(head))]
    rows = [head, align, *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
