"""The summary, and a comparison of two runs, as text: in a terminal, or as Markdown.

A terminal reads at 80 columns, and without colour when piped. It is read from its end, so the
winners come last, and long lists are cut there. Markdown, for an issue or a wiki page, begins with
the answer and has everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.analysis.comparison import RunComparison
from orchestrator.analysis.metrics import figure_changes
from orchestrator.analysis.rankings import Ranking
from orchestrator.analysis.selection import Differences, described
from orchestrator.analysis.summary import STATES, Cause, Summary
from orchestrator.analysis.tables import Table as CellTable
from orchestrator.analysis.timeline import Lane
from orchestrator.core.job import State
from orchestrator.core.labels import Label, labels_of
from orchestrator.report import wording
from orchestrator.report.blocks import (
    Block,
    Cell,
    Facts,
    Heading,
    Line,
    Log,
    Many,
    Matrix,
    Section,
    Style,
    Table,
)
from orchestrator.report.sections import sections
from orchestrator.util import format as units
from orchestrator.util.format import markdown, one_line, tail, visible

MOST_TABLES = 12
MOST_LINES = 40
MOST_CARDS = 16  # more are summed up by node
_LONGEST_NAME = 36

_STYLES: Mapping[Style, str] = {
    "": "",
    "bold": "bold",
    "quiet": "dim",
    "warning": "yellow",
    "bad": "bold red",
    "good": "green",
    "name": "cyan",
}
STATE_STYLES = {
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
    """Print the whole summary, the answer last; what was cut from long lists is counted.

    Args:
        summary: what is printed.
        console: where to.
        verbose: with what each card did, and the versions that it was made with.
        page: path of the HTML page, for the last line.
    """
    parts = [_headline(summary)]
    if summary.measured:
        parts += [_tables(summary), *map(_section, sections(summary)), _flagged(summary)]
    parts += [_causes(summary), _retried(summary)]
    if verbose:
        parts += [_cards(summary), _provenance(summary)]
    parts += [_rankings(summary), _answer(summary, page)]
    _print(console, [block for part in parts for block in part])


def to_markdown(summary: Summary) -> str:
    """The whole summary as GitHub-flavoured Markdown."""
    parts: list[Iterable[Block]] = [_answer(summary, ""), _headline(summary)]
    if summary.measured:
        every = sections(summary)
        sides = len(summary.head_to_head)
        parts += [*map(_section, every[:sides]), _rankings(summary), _tables(summary)]
        parts += [*map(_section, every[sides:]), _flagged(summary)]
    parts += [_causes(summary), _cards(summary), _provenance(summary)]
    texts = [_as_markdown(block) for part in parts for block in part]
    return "\n\n".join([f"# Run {markdown(summary.run)}", *filter(None, texts)]) + "\n"


def print_comparison(comparison: RunComparison, console: Console, *, every: bool = False) -> None:
    """Significant changes first; then what broke, what is refused, and what to know."""
    _print(console, list(_comparison(comparison, every=every)))


# ---------------------------------------------------------------- what is said


def _headline(summary: Summary) -> Iterator[Block]:
    verdict = f"Run {summary.run}: {summary.verdict}" if summary.run else summary.verdict
    yield Line(text=verdict, style="bad" if summary.unsettled else "bold")
    if len(summary.counts) > 1:
        yield Line(text=" · ".join(f"{n:,} {state}" for state, n in summary.counts.items()))
    for workload, facts in summary.shared.items():
        yield Line(text=f"{workload}: {described(facts)}", style="quiet")
    for banner in summary.banners:
        details = units.listed(list(banner.details), 3)
        rows = f"{banner.count:,} of {units.plural(banner.of, 'row')}"
        text = f"! {banner.name} in {rows} ({details}). {banner.meaning}"
        yield Line(text=text, style="warning")
    if summary.damaged:
        files = units.plural(len(summary.damaged), "file")
        names = one_line(units.listed(list(summary.damaged), 3))
        yield Line(text=f"! {files} of this run could not be read: {names}", style="bad")
    for fact in summary.provenance.mixed:
        values = units.listed([value for value, _ in fact.values])
        text = f"! Rows were made with more than one {fact.name}: {values}."
        yield Line(text=text, style="warning")


def _tables(summary: Summary) -> Iterator[Block]:
    entries = []
    for table in summary.tables:
        about = [Line(text=described(table.about), style="quiet")] if table.about else []
        unit = f"{table.unit}, " if table.unit else ""
        span = wording.scopes(table)
        scale = f"{unit}{table.line_name} by {table.column_name}" + (f"; {span}" if span else "")
        scales = Line(text=scale, style="quiet")
        entry: tuple[Block, ...] = (Heading(text=table.title), *about, scales, Matrix(table=table))
        entries.append(entry)
    if entries:
        yield Many(entries=tuple(entries), most=MOST_TABLES, noun="table")


def _section(section: Section) -> Iterator[Block]:
    yield Heading(text=section.title)
    if section.table.rows:
        yield section.table
    if section.note:
        yield Line(text=section.note, style="quiet")


def _flagged(summary: Summary) -> Iterator[Block]:
    if summary.raised:
        yield Heading(text="Flagged rows")
    for flagged in summary.flagged:
        title, about = f"{len(flagged.rows):,} × {flagged.flag.name}", flagged.flag.description
        yield Facts(title=title, about=f"{about} {flagged.says}", pairs=())
        reasons = (
            (Line(text=f"  {one_line(summary.label(row))}: {one_line(reason, 300)}"),)
            for row, reason in flagged.rows
        )
        yield Many(entries=tuple(reasons), most=16, noun="row")


def _causes(summary: Summary) -> Iterator[Block]:
    if summary.causes:
        entries = tuple(tuple(_cause(cause, summary)) for cause in summary.causes)
        yield Heading(text="What did not run, and why")
        yield Many(entries=entries, most=MOST_LINES, noun="cause")


def _cause(cause: Cause, summary: Summary) -> Iterator[Block]:
    of_class = f" ({cause.failure_class})" if cause.failure_class else ""
    reason = one_line(cause.reason, 300) or "no reason was recorded"
    names = one_line(units.listed([summary.label(row) for row in cause.rows], 3))
    yield Facts(
        title=f"{len(cause.rows):,} × {cause.state}{of_class}: {reason}", about=names, pairs=()
    )
    if cause.example.failure_tail:
        yield Log(text=cause.example.failure_tail)
    if cause.example.log:
        yield Line(text=f"  log: {one_line(cause.example.log, 200)}", style="quiet")


def _retried(summary: Summary) -> Iterator[Block]:
    if summary.retried:
        yield Heading(text="Jobs that needed more than one attempt")
        lines = []
        for one in summary.retried:
            states = " → ".join(str(row.state) for row in one.attempts)
            lines.append((Line(text=f"  {summary.label(one.row)}: {states}"),))
        yield Many(entries=tuple(lines), most=MOST_LINES, noun="job")


def _cards(summary: Summary) -> Iterator[Block]:
    timeline = summary.timeline
    if not timeline.lanes:
        return
    assigned = units.percent(timeline.assigned, 3)
    wall = units.seconds(timeline.wall_s)
    yield Heading(text=f"Cards: {len(timeline.lanes)}, time assigned {assigned} of {wall}")
    by_card = len(timeline.lanes) <= MOST_CARDS
    groups: dict[str, list[Lane]] = {}
    for lane in timeline.lanes:
        groups.setdefault(lane.name if by_card else lane.node, []).append(lane)
    noun = "card" if by_card else "node"
    yield Table(
        head=(noun, "cards", "attempts", "time assigned", "unassigned", "share"),
        rows=tuple(_card(name, lanes, timeline.wall_s) for name, lanes in groups.items()),
        numbers=(1, 2, 3, 4, 5),
        most=MOST_LINES,
        noun=noun,
    )


def _card(name: str, lanes: Sequence[Lane], wall_s: float) -> tuple[str, ...]:
    assigned_s = sum(lane.assigned_s for lane in lanes)
    return (
        name,
        f"{len(lanes)}",
        f"{sum(len(lane.spans) for lane in lanes):,}",
        units.seconds(assigned_s),
        units.seconds(sum(lane.unassigned_s for lane in lanes)),
        units.percent(assigned_s / (wall_s * len(lanes)) if wall_s else None, 3),
    )


def _provenance(summary: Summary) -> Iterator[Block]:
    provenance = summary.provenance
    facts = (*provenance.versions, *provenance.facts)
    if not facts:
        return
    pairs = [(fact.name, units.listed([value for value, _ in fact.values], 6)) for fact in facts]
    pairs += [
        (
            "measured",
            f"{units.moment(one.started_at)} to {units.moment(one.ended_at)}, "
            f"{units.plural(one.rows, 'row')}",
        )
        for one in provenance.invocations
        if one.started_at is not None
    ]
    yield Heading(text="Made with")
    yield Facts(pairs=tuple(pairs))


def _rankings(summary: Summary) -> Iterator[Block]:
    if not summary.rankings:
        return
    apart = Differences.among([ranking.setting for ranking in summary.rankings])
    entries = tuple(
        (
            Facts(
                title=f"{ranking.setting.model} · {ranking.setting.where}",
                about=described(apart.of(ranking.setting)),
                pairs=tuple(_best(ranking, summary)),
            ),
        )
        for ranking in summary.rankings
    )
    yield Heading(text="Best setting for each model and device")
    yield Many(entries=entries, most=MOST_LINES, noun="ranking")


def _best(ranking: Ranking, summary: Summary) -> Iterator[tuple[str, str]]:
    best, chosen = ranking.fastest, summary.chosen
    yield "highest throughput", f"{chosen(best)}: {wording.throughput(best)}"
    yield "verdict", wording.standing(ranking, chosen)
    if loss := wording.losses(best):
        yield "its loss", loss.removeprefix("loss ")
    if best.metrics.tpot_p50_s is not None:
        yield "its latency", wording.token_times(best)
    if (row := ranking.lowest_latency) is not None:
        latency = units.seconds(row.metrics.latency_p50_s)
        yield "lowest latency", f"{chosen(row)}: {latency} a prompt (p50)"
    if (row := ranking.smallest_memory) is not None:
        yield "smallest memory", f"{chosen(row)}: {wording.memory(row)}"
    if (row := ranking.most_work_per_joule) is not None:
        yield "most work per joule", f"{chosen(row)}: {wording.energy(row)}"
    for one in ranking.leaders:
        yield one.title, wording.leader(one, chosen(one.row))


def _answer(summary: Summary, page: str) -> Iterator[Block]:
    """The winner, and where the page lies."""
    sentences = wording.answers(summary)
    if sentences or page:
        yield Line(text="")
    for text in sentences:
        yield Line(text=text, style="bold" if summary.rankings else "bad")
    if page:
        yield Line(text=f"page: {page}", whole=True)


# ---------------------------------------------------------------- a comparison of two runs


def headline(comparison: RunComparison) -> str:
    """``48 jobs compared, 2 slower, 1 faster, 45 unchanged within noise; 0.998× overall``."""
    slower = sum(c.significant and c.ratio.value < 1 for c in comparison.changes)
    faster = sum(c.significant and c.ratio.value > 1 for c in comparison.changes)
    untested = sum(c.ratio.low is None for c in comparison.changes)
    same = len(comparison.changes) - slower - faster - untested
    words = [
        f"{units.plural(len(comparison.changes), 'job')} compared",
        f"{slower:,} slower",
        f"{faster:,} faster",
        f"{same:,} unchanged within noise",
    ]
    words += [f"{untested:,} with too few repeats to say"] if untested else []
    words += [f"{len(comparison.broken):,} broken"] if comparison.broken else []
    words += [f"{len(comparison.refused):,} not comparable"] if comparison.refused else []
    alone = comparison.only_before + comparison.only_after
    words += [f"{alone:,} in one run only"] if alone else []
    overall = comparison.overall
    end = f"; {overall:.3f}× overall" if overall is not None else ""
    return ", ".join(words) + end


def _comparison(comparison: RunComparison, *, every: bool) -> Iterator[Block]:
    labels = labels_of([one.after for one in comparison.every])
    names = f"{comparison.before} → {comparison.after}"
    yield Line(text=f"{names}: {headline(comparison)}", style="bold")
    if comparison.changes:
        source = "estimated from these jobs" if comparison.noise_estimated else "assumed"
        level, noise = units.percent(comparison.confidence), units.percent(comparison.noise)
        text = f"intervals: {level} · noise between runs {noise}, {source}"
        yield Line(text=text, style="quiet")
    yield from _changes(comparison, labels, every=every)
    yield from _figure_changes(comparison, labels)
    yield from _other_ends(comparison, labels)
    yield from _refused(comparison)
    for (key, before, after), jobs in comparison.warnings.items():
        values = f"{one_line(before, 200)} → {one_line(after, 200)}"
        text = f"! {key} differs in {units.plural(jobs, 'job')}: {values}"
        yield Line(text=text, style="warning")


def _changes(
    comparison: RunComparison, labels: Mapping[str, Label], *, every: bool
) -> Iterator[Block]:
    rows = []
    for change in comparison.changes:
        if not (change.significant or every):
            continue
        ratio, interval = change.ratio, "too few repeats"
        style: Style = "quiet"
        if change.significant:
            style = "bad" if ratio.value < 1 else "good"
        if ratio.low is not None and ratio.high is not None:
            interval = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        rows.append(
            (
                f"{labels[change.after.job_id]}{' emulated' if change.after.emulated else ''}",
                units.number(change.before.metrics.throughput),
                units.number(change.after.metrics.throughput),
                Cell(text=f"{ratio.value - 1:+.1%}", style=style),
                interval,
            )
        )
    if rows:
        yield Table(
            head=("job", "before", "after", "change", "interval"),
            rows=tuple(rows),
            numbers=(1, 2, 3, 4),
            most=len(rows) if every else MOST_LINES,
            noun="job",
            rest="--all lists all of them",
        )


def _figure_changes(comparison: RunComparison, labels: Mapping[str, Label]) -> Iterator[Block]:
    """Reported figures that have got better or worse, by the direction declared for each."""
    lines = tuple(
        (
            Line(
                text=f"{labels[change.after.job_id]}: {figure}",
                style="good" if figure.improved else "bad",
            ),
        )
        for change in comparison.changes
        for figure in figure_changes(change.before, change.after)
        if figure.improved is not None
    )
    if lines:
        yield Line(text="")
        yield Many(entries=lines, most=MOST_LINES, noun="figure", rest="--json has all of them")


def _other_ends(comparison: RunComparison, labels: Mapping[str, Label]) -> Iterator[Block]:
    """Jobs that ended otherwise than before."""
    lines = []
    for one in comparison.turned:
        reason = f": {one_line(one.after.reason, 120)}" if one.after.reason else ""
        text = f"{one.before.state} → {one.after.state}: {labels[one.after.job_id]}{reason}"
        lines.append((Line(text=text, style="bad" if one.broken else ""),))
    if lines:
        yield Line(text="")
        rest = "--json has all of them"
        yield Many(entries=tuple(lines), most=MOST_LINES, noun="job", rest=rest)


def _refused(comparison: RunComparison) -> Iterator[Block]:
    refused = comparison.refused
    if not refused:
        return
    counted = Counter((d.key, d.before, d.after) for r in refused for d in r.differences)
    yield Line(text="")
    yield Line(text=f"Not comparable: {units.plural(len(refused), 'job')}", style="warning")
    for (key, before, after), count in counted.most_common(MOST_LINES):
        jobs = units.plural(count, "job")
        # Of a key such as ``flags`` both rows of a pair may have the same forbidden value.
        if before == after:
            yield Line(text=f"  {key} in {jobs}, before and after: {one_line(before, 120)}")
        else:
            values = f"{one_line(before, 120)} → {one_line(after, 120)}"
            yield Line(text=f"  {key} differs in {jobs}: {values}")


# ---------------------------------------------------------------- in a terminal


def _print(console: Console, blocks: Iterable[Block]) -> None:
    # Text objects, not markup: names and reasons may hold square brackets.
    for block in blocks:
        match block:
            case Line():
                style = _STYLES[block.style]
                console.print(Text(visible(block.text), style=style), soft_wrap=block.whole)
            case Heading():
                console.print()
                console.print(Text(visible(block.text), style="bold"))
            case Facts():
                _print_facts(console, block)
            case Log():
                for line in tail(block.text, 800).splitlines()[-6:]:
                    console.print(Text(visible(f"  | {line}")))
            case Table():
                _print_table(console, block)
            case Matrix():
                for columns in _column_blocks(block.table, console.width):
                    console.print(_grid(block.table, columns))
            case Many():
                shown = [one for entry in block.entries[: block.most] for one in entry]
                _print(console, shown)
                if isinstance(shown[-1] if shown else None, Matrix):
                    _print_legend(console, [one.table for one in shown if isinstance(one, Matrix)])
                _print_cut(console, len(block.entries) - block.most, block.noun, block.rest)


def _print_facts(console: Console, facts: Facts) -> None:
    if facts.title:
        console.print()
        console.print(Text(visible(facts.title), style="cyan"))
    if facts.about:
        console.print(Text(visible(f"  {facts.about}"), style="dim"))
    for name, value in facts.pairs:
        console.print(Text(visible(f"  {name:<20} {value}")))


def _print_table(console: Console, table: Table) -> None:
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    shown = [[_cell(cell) for cell in row] for row in table.rows[: table.most]]
    for column, name in enumerate(table.head):
        right = column in table.numbers
        # One word stays whole; what has several gives way.
        words = max((len(row[column].plain.split()) for row in shown), default=0)
        short = right and words < 2 and " " not in name
        justify: JustifyMethod = "right" if right else "left"
        grid.add_column(name, justify=justify, overflow="fold", no_wrap=short)
    for row in shown:
        grid.add_row(*row)
    console.print(grid)
    _print_cut(console, len(table.rows) - table.most, table.noun, table.rest)


def _cell(cell: str | Cell) -> Text:
    if isinstance(cell, str):
        return Text(one_line(cell))
    return Text(one_line(cell.text), style=_STYLES[cell.style])


def _print_cut(console: Console, left_out: int, noun: str, rest: str) -> None:
    if left_out > 0:
        more = units.plural(left_out, f"more {noun}", f"more {noun}s")
        console.print(Text(f"… and {more}; {rest}.", style="dim"))


def _column_blocks(table: CellTable, width: int) -> list[tuple[str, ...]]:
    """The columns split so that each block of them fits into ``width``."""
    room = width - max(len(one_line(p, _LONGEST_NAME)) for p in table.lines) - 4
    blocks: list[list[str]] = [[]]
    used = 0
    for column in table.columns:
        texts = [wording.cell_text(table, line, column) for line in table.lines]
        wide = max(max(len(text.value) + 1, len(text.note) + 1) for text in texts)
        wide = max(wide, len(column) + 1) + 1  # the box puts one blank between columns
        if blocks[-1] and used + wide > room:
            blocks.append([])
            used = 0
        blocks[-1].append(column)
        used += wide
    return [tuple(block) for block in blocks]


def _grid(table: CellTable, columns: Sequence[str]) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    grid.add_column("", no_wrap=True)
    for column in columns:
        grid.add_column(Text(column + " "), justify="right", no_wrap=True)
    for name in table.lines:
        line: list[Text] = [Text(one_line(name, _LONGEST_NAME), style="bold")]
        for column in columns:
            cell = wording.cell_text(table, name, column)
            if cell.state is None:
                line.append(Text(""))
                continue
            # The mark has a place of its own, so that figures stay aligned.
            text = Text(cell.value + (cell.mark or " "), style=STATE_STYLES.get(cell.state, ""))
            if cell.mark:
                text.stylize("yellow" if cell.mark == "!" else "bold green")
            if cell.note:
                text.append(f"\n{cell.note} ", style="not bold dim")
            line.append(text)
        grid.add_row(*line)
    return grid


def _print_legend(console: Console, shown: Sequence[CellTable]) -> None:
    if legend := _legend(shown):
        console.print(Text(legend, style="dim"))


def _legend(shown: Sequence[CellTable]) -> str:
    """The meaning of the marks and states in these tables."""
    cells = [wording.cell_text(table, *place) for table in shown for place in table.cells]
    marks = {cell.mark for cell in cells} | {cell.value[:1] for cell in cells}
    states = {cell.state for cell in cells} - {State.SUCCEEDED}
    words = ["* best"] if "*" in marks else []
    words += ["~ tied for the best"] if "~" in marks else []
    words += ["! flagged, ranks nowhere"] if "!" in marks else []
    words += ["( ) no complete repeat"] if "(" in marks else []
    words += [
        f"{state_words.short}: {state_words.meaning}"
        for state, state_words in STATES.items()
        if state in states
    ]
    return " · ".join(words)


# ---------------------------------------------------------------- as Markdown


def _as_markdown(block: Block) -> str:
    match block:
        case Line():
            if block.text.startswith("! "):
                return f"> {markdown(block.text[2:])}"
            return _bold(markdown(block.text), block.style == "bold")
        case Heading():
            return f"## {markdown(block.text)}"
        case Facts():
            about = markdown(block.about)
            title = [f"**{markdown(block.title)}** {about}".rstrip()] if block.title else []
            pairs = [f"- {markdown(name)}: {markdown(value)}" for name, value in block.pairs]
            return "\n".join([*title, *([""] if title and pairs else []), *pairs])
        case Log():
            # Indented code has no closing mark that hostile text could write.
            return "\n".join(f"      {line}" for line in tail(block.text, 1500).splitlines())
        case Table():
            rows = [[markdown(_cell(cell).plain) for cell in row] for row in block.rows]
            return _pipes(block.head, rows, block.numbers)
        case Matrix():
            return _matrix(block.table)
        case Many():
            texts = [_as_markdown(one) for entry in block.entries for one in entry]
            if all(isinstance(one, Line) for entry in block.entries for one in entry):
                return "\n".join(f"- {text}" for text in texts)
            tables = [one.table for entry in block.entries for one in entry if type(one) is Matrix]
            return "\n\n".join(filter(None, [*texts, markdown(_legend(tables))]))
    raise AssertionError(block)


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold and text else text


def _matrix(table: CellTable) -> str:
    rows = []
    for name in table.lines:
        row = [f"**{markdown(name)}**"]
        for column in table.columns:
            cell = wording.cell_text(table, name, column)
            value = _bold(markdown(cell.value), cell.mark == "*")
            row.append(f"{value}{markdown(cell.mark)} {markdown(cell.note)}".strip())
        rows.append(row)
    columns = (markdown(wording.column_title(table, column)) for column in table.columns)
    numbers = range(1, len(table.columns) + 1)
    return _pipes((markdown(table.unit or "state"), *columns), rows, numbers)


def _pipes(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> str:
    right = set(numbers)
    align = ["--:" if column in right else "---" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])
