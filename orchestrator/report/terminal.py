"""The summary as tables in a terminal. Reads at 80 columns, and without colour when piped.

A terminal is read from its end, so the winners come last.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.analysis.selection import Differences, described
from orchestrator.analysis.summary import SHORT_STATE, STATE_MEANING, Summary
from orchestrator.analysis.tables import Table
from orchestrator.analysis.timeline import Lane
from orchestrator.core.job import State
from orchestrator.report import cells
from orchestrator.report.answers import answers
from orchestrator.report.findings import findings
from orchestrator.util import format as units
from orchestrator.util.format import one_line, tail, visible

MOST_TABLES = 12
MOST_LINES = 40
MOST_FINDINGS = 16
_LONGEST_NAME = 36
MOST_CARDS = 16  # more are summed up by node

STYLES = {
    State.SUCCEEDED: "",
    State.OUT_OF_MEMORY: "yellow",
    State.PRUNED: "dim",
    State.UNSUPPORTED: "dim",
    State.FAILED: "bold red",
    State.TIMED_OUT: "red",
    State.LOST: "magenta",
    State.NOT_STARTED: "cyan",
}


def print_summary(
    summary: Summary, console: Console, *, verbose: bool = False, page: str = ""
) -> None:
    """Print the whole summary, the answer last; long lists are cut, and what was cut is said.

    Args:
        summary: what is printed.
        console: where to.
        verbose: with what each card did, and the versions that it was made with.
        page: path of the HTML page, for the last line.
    """
    _headline(summary, console)
    if summary.measured:
        _tables(summary, console)
        _findings(summary, console)
        _flagged(summary, console)
    _causes(summary, console)
    _retried(summary, console)
    if verbose:
        _cards(summary, console)
        _provenance(summary, console)
    _contests(summary, console)
    _answer(summary, console, page)


def _answer(summary: Summary, console: Console, page: str) -> None:
    """The last lines: the winner, and where the page lies."""
    told = answers(summary)
    if told or page:
        console.print()
    for text in told:
        _say(console, text, "bold" if summary.contests else "bold red")
    if page:
        console.print(Text(visible(f"page: {page}")), soft_wrap=True)  # to be copied whole


def _say(console: Console, text: str, style: str = "") -> None:
    # Text objects, not markup: names and reasons may hold square brackets.
    console.print(Text(visible(text), style=style), soft_wrap=False)


def _heading(console: Console, text: str) -> None:
    console.print()
    _say(console, text, "bold")


def _headline(summary: Summary, console: Console) -> None:
    _say(
        console,
        f"Run {summary.run}: {summary.verdict}" if summary.run else summary.verdict,
        "bold red" if summary.unsettled else "bold",
    )
    if len(summary.counts) > 1:
        _say(console, " · ".join(f"{n:,} {state}" for state, n in summary.counts.items()))
    for workload, facts in summary.shared.items():
        _say(console, f"{workload}: {described(facts)}", "dim")
    for banner in summary.banners:
        _say(
            console,
            f"! {banner.name} in {banner.count:,} of {units.plural(banner.of, 'row')} "
            f"({units.listed(list(banner.details), 3)}). {banner.meaning}",
            "yellow",
        )
    if summary.damaged:
        files = units.plural(len(summary.damaged), "file")
        _say(
            console,
            f"! {files} of this run could not be read: "
            f"{one_line(units.listed(list(summary.damaged), 3))}",
            "bold red",
        )
    for fact in summary.provenance.mixed:
        values = units.listed([value for value, _ in fact.values])
        _say(console, f"! Rows were made with more than one {fact.name}: {values}.", "yellow")


def _contests(summary: Summary, console: Console) -> None:
    if not summary.contests:
        return
    _heading(console, "Best setting for each model and device")
    apart = Differences.among([contest.setting for contest in summary.contests])
    for contest in summary.contests[:MOST_LINES]:
        console.print()
        _say(console, f"{contest.setting.model} · {contest.setting.where}", "cyan")
        about = described(apart.of(contest.setting))
        if about:
            _say(console, f"  {about}", "dim")
        best = contest.fastest
        _say(
            console,
            f"  highest throughput   {summary.chosen(best)}: {cells.throughput(best)}",
        )
        _say(console, f"  verdict              {cells.standing(contest, summary.chosen)}")
        if loss := cells.losses(best):
            _say(console, f"  {'its loss':<20} {loss.removeprefix('loss ')}")
        if best.metrics.tpot_p50_s is not None:
            _say(console, f"  {'its latency':<20} {cells.token_times(best)}")
        if contest.quickest is not None:
            row = contest.quickest
            latency = units.seconds(row.metrics.latency_p50_s)
            _say(
                console,
                f"  lowest latency       {summary.chosen(row)}: {latency} a prompt (p50)",
            )
        if contest.leanest is not None:
            row = contest.leanest
            _say(console, f"  smallest memory      {summary.chosen(row)}: {cells.memory(row)}")
        if (thrifty := contest.thriftiest) is not None:
            told = f"{summary.chosen(thrifty)}: {cells.energy(thrifty)}"
            _say(console, f"  most work per joule  {told}")
        for one in contest.leaders:
            _say(console, f"  {one.title:<20} {cells.leader(one, summary.chosen(one.row))}")
    _cut(console, len(summary.contests), MOST_LINES, "contest")


def _tables(summary: Summary, console: Console) -> None:
    states: set[State] = set()
    marks: set[str] = set()  # and "(" for a figure without a complete repeat
    for table in summary.tables[:MOST_TABLES]:
        console.print()
        _say(console, table.title, "bold")
        if table.about:
            _say(console, described(table.about), "dim")
        unit = f"{table.unit}, " if table.unit else ""
        span = cells.scopes(table)
        more = f"; {span}" if span else ""
        scale = f"{table.line_name} by {table.column_name}"
        _say(console, f"{unit}{scale}{more}", "dim")
        for columns in _blocks(table, console.width):
            console.print(_grid(table, columns, states, marks))
    if not summary.tables:
        return
    legend = ["* best"] if "*" in marks else []
    legend += ["~ tied for the best"] if "~" in marks else []
    legend += ["! flagged, ranks nowhere"] if "!" in marks else []
    legend += ["( ) no complete repeat"] if "(" in marks else []
    legend += [
        f"{SHORT_STATE[state]}: {STATE_MEANING[state]}"
        for state in STATE_MEANING
        if state in states and state is not State.SUCCEEDED
    ]
    if legend:
        _say(console, " · ".join(legend), "dim")
    _cut(console, len(summary.tables), MOST_TABLES, "table")


def _blocks(table: Table, width: int) -> list[tuple[str, ...]]:
    """The batch sizes split so that each block of columns fits into ``width``."""
    room = width - max(len(one_line(p, _LONGEST_NAME)) for p in table.lines) - 4
    blocks: list[list[str]] = [[]]
    used = 0
    for column in table.columns:
        texts = [cells.cell_text(table, p, column) for p in table.lines]
        wide = max(max(len(text.value) + 1, len(text.note) + 1) for text in texts)
        wide = max(wide, len(column) + 1) + 1  # the box puts one blank between columns
        if blocks[-1] and used + wide > room:
            blocks.append([])
            used = 0
        blocks[-1].append(column)
        used += wide
    return [tuple(block) for block in blocks]


def _grid(table: Table, columns: Sequence[str], states: set[State], marks: set[str]) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    grid.add_column("", no_wrap=True)
    for column in columns:
        grid.add_column(Text(column + " "), justify="right", no_wrap=True)
    for name in table.lines:
        line: list[Text] = [Text(one_line(name, _LONGEST_NAME), style="bold")]
        for column in columns:
            cell = cells.cell_text(table, name, column)
            if cell.state is None:
                line.append(Text(""))
                continue
            states.add(cell.state)
            marks |= {cell.mark, cell.value[:1]}
            # The mark has a place of its own, so that figures stay aligned.
            text = Text(cell.value + (cell.mark or " "), style=STYLES.get(cell.state, ""))
            if cell.mark:
                text.stylize("yellow" if cell.mark == "!" else "bold green")
            if cell.note:
                text.append(f"\n{cell.note} ", style="not bold dim")
            line.append(text)
        grid.add_row(*line)
    return grid


def _findings(summary: Summary, console: Console) -> None:
    for finding in findings(summary):
        _heading(console, finding.title)
        if finding.rows:
            grid = RichTable(
                box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True
            )
            for index, name in enumerate(finding.head):
                justify: JustifyMethod = "right" if index in finding.numbers else "left"
                # One word stays whole; what has several gives way.
                words = {len(row[index].split()) for row in finding.rows[:MOST_FINDINGS]}
                short = index in finding.numbers and max(words) < 2 and " " not in name
                grid.add_column(name, justify=justify, overflow="fold", no_wrap=short)
            for row in finding.rows[:MOST_FINDINGS]:
                grid.add_row(*(Text(one_line(text)) for text in row))
            console.print(grid)
            _cut(console, len(finding.rows), MOST_FINDINGS, "line")
        if finding.note:
            _say(console, finding.note, "dim")


def _flagged(summary: Summary, console: Console) -> None:
    if not summary.raised:
        return
    _heading(console, "Flagged rows")
    for flagged in summary.flagged:
        console.print()
        _say(console, f"{len(flagged.rows):,} × {flagged.flag.name}", "yellow")
        _say(console, f"  {flagged.flag.description} {flagged.says}", "dim")
        for row, reason in flagged.rows[:MOST_FINDINGS]:
            _say(console, f"  {one_line(summary.label(row))}: {one_line(reason, 300)}")
        _cut(console, len(flagged.rows), MOST_FINDINGS, "row")


def _causes(summary: Summary, console: Console) -> None:
    if not summary.causes:
        return
    _heading(console, "What did not run, and why")
    for cause in summary.causes[:MOST_LINES]:
        console.print()
        of_class = f" ({cause.failure_class})" if cause.failure_class else ""
        reason = one_line(cause.reason, 300) or "no reason was recorded"
        _say(
            console,
            f"{len(cause.rows):,} × {cause.state}{of_class}: {reason}",
            STYLES.get(cause.state, ""),
        )
        names = [summary.label(row) for row in cause.rows]
        _say(console, f"  {one_line(units.listed(names, 3))}", "dim")
        if cause.example.failure_tail:
            for line in tail(cause.example.failure_tail, 800).splitlines()[-6:]:
                _say(console, f"  | {line}")
        if cause.example.log:
            _say(console, f"  log: {one_line(cause.example.log, 200)}", "dim")
    _cut(console, len(summary.causes), MOST_LINES, "cause")


def _retried(summary: Summary, console: Console) -> None:
    if not summary.retried:
        return
    _heading(console, "Jobs that needed more than one attempt")
    for item in summary.retried[:MOST_LINES]:
        ended = " → ".join(str(row.state) for row in item.attempts)
        _say(console, f"  {summary.label(item.row)}: {ended}")
    _cut(console, len(summary.retried), MOST_LINES, "job")


def _cards(summary: Summary, console: Console) -> None:
    timeline = summary.timeline
    if not timeline.lanes:
        return
    _heading(
        console,
        f"Cards: {len(timeline.lanes)}, time assigned {units.percent(timeline.assigned, 3)} "
        f"of {units.seconds(timeline.wall_s)}",
    )
    by_card = len(timeline.lanes) <= MOST_CARDS
    groups: dict[str, list[Lane]] = {}
    for lane in timeline.lanes:
        groups.setdefault(lane.name if by_card else lane.node, []).append(lane)
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    grid.add_column("card" if by_card else "node")
    for name in ("cards", "attempts", "time assigned", "unassigned", "share"):
        grid.add_column(name, justify="right")
    for name, lanes in list(groups.items())[:MOST_LINES]:
        assigned = sum(lane.assigned_s for lane in lanes)
        grid.add_row(
            Text(one_line(name)),
            f"{len(lanes)}",
            f"{sum(len(lane.spans) for lane in lanes):,}",
            units.seconds(assigned),
            units.seconds(sum(lane.unassigned_s for lane in lanes)),
            units.percent(
                assigned / (timeline.wall_s * len(lanes)) if timeline.wall_s else None, 3
            ),
        )
    console.print(grid)
    _cut(console, len(groups), MOST_LINES, "card" if by_card else "node")


def _provenance(summary: Summary, console: Console) -> None:
    facts = (*summary.provenance.versions, *summary.provenance.facts)
    if not facts:
        return
    _heading(console, "Made with")
    for fact in facts:
        values = units.listed([value for value, _ in fact.values], 6)
        _say(console, f"  {fact.name:<20} {values}")
    times = [i for i in summary.provenance.invocations if i.started_at is not None]
    for one in times:
        _say(
            console,
            f"  {'measured':<20} {units.moment(one.started_at)} to "
            f"{units.moment(one.ended_at)}, {units.plural(one.rows, 'row')}",
        )


def _cut(console: Console, have: int, shown: int, noun: str) -> None:
    if have > shown:
        _say(
            console,
            f"… and {units.plural(have - shown, f'more {noun}', f'more {noun}s')}; "
            "the page has all of them.",
            "dim",
        )
