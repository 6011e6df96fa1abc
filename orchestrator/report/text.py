"""The summary, and a comparison of two runs, as terminal text or Markdown.

Terminal text is read from its end: the answer is last, and long lists are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.analysis.comparison import JobPair, RunComparison
from orchestrator.analysis.metrics import figure_changes
from orchestrator.analysis.rankings import Ranking
from orchestrator.analysis.selection import Differences, described
from orchestrator.analysis.summary import STATES, Cause, Summary
from orchestrator.analysis.tables import Table as CellTable
from orchestrator.core.job import State
from orchestrator.core.labels import Label, labels_of
from orchestrator.core.measurement import Prediction
from orchestrator.report import wording
from orchestrator.report.blocks import Block, Cell, Facts, Line, Many, Section, Style, Table
from orchestrator.report.sections import cards_table, predicted, questions_section, sections
from orchestrator.util import format as units
from orchestrator.util.format import markdown, one_line, tail, visible

MOST_TABLES = 12
MOST_LINES = 40
MOST_CARDS = 16  # more are summed by node
_LONGEST_NAME = 36

_STYLES: Mapping[Style, str] = {
    "": "",
    "bold": "bold",
    "quiet": "dim",
    "warning": "yellow",
    "bad": "bold red",
    "good": "green",
    "name": "cyan",
    "heading": "bold",
    "log": "",
}


def print_summary(
    summary: Summary, console: Console, *, verbose: bool = False, page: str = ""
) -> None:
    """Print the summary, the answer last; ``verbose`` adds cards and versions."""
    parts = [_headline(summary)]
    questions = _section(questions_section(summary)) if summary.answers else iter(())
    if summary.measured:
        parts += [_tables(summary), *map(_section, sections(summary)), _flagged(summary)]
    parts += [_causes(summary), _retried(summary)]
    if verbose:
        parts += [_cards(summary), _provenance(summary)]
    parts += [_rankings(summary), questions, _answer(summary, page)]
    _print(console, [block for part in parts for block in part])


def to_markdown(summary: Summary) -> str:
    """Return the whole summary as GitHub-flavoured Markdown."""
    questions = _section(questions_section(summary)) if summary.answers else ()
    parts: list[Iterable[Block]] = [_answer(summary, ""), questions, _headline(summary)]
    if summary.measured:
        every = sections(summary)
        sides = len(summary.head_to_head)
        parts += [*map(_section, every[:sides]), _rankings(summary), _tables(summary)]
        parts += [*map(_section, every[sides:]), _flagged(summary)]
    parts += [_causes(summary), _cards(summary), _provenance(summary)]
    texts = [_as_markdown(block) for part in parts for block in part]
    return "\n\n".join([f"# Run {markdown(summary.run)}", *filter(None, texts)]) + "\n"


def print_comparison(comparison: RunComparison, console: Console, *, every: bool = False) -> None:
    """Print significant changes, then broken and refused jobs, then warnings."""
    _print(console, list(_comparison(comparison, every=every)))


# ---------------------------------------------------------------- what is said


def print_predictions(predictions: Sequence[Prediction], console: Console) -> None:
    """Print what unmeasured cells are expected to give."""
    _print(console, _section(predicted(predictions)))


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
    if summary.tables:
        entries = tuple(tuple(_matrix(table)) for table in summary.tables)
        yield Many(entries=entries, most=MOST_TABLES, noun="table")
        yield Line(text=_legend(summary), style="quiet")


def _matrix(table: CellTable) -> Iterator[Block]:
    yield Line(text=table.title, style="heading")
    if table.about:
        yield Line(text=described(table.about), style="quiet")
    unit, span = f"{table.unit}, " if table.unit else "", wording.scopes(table)
    scale = f"{unit}{table.line_name} by {table.column_name}" + (f"; {span}" if span else "")
    yield Line(text=scale, style="quiet")
    rows = (
        (Cell(text=line, style="bold"), *(wording.cell(table, line, c) for c in table.columns))
        for line in table.lines
    )
    numbers = tuple(range(1, len(table.columns) + 1))
    head, most = ("", *table.columns), len(table.lines)
    yield Table(head=head, rows=tuple(rows), numbers=numbers, most=most, matrix=True)


def _legend(summary: Summary) -> str:
    marks = {
        "best": "* best",
        "tied": "~ may be the best",
        "bounds": "≥ at least: others used its processors",
        "flagged": "! flagged, ranks nowhere",
        "predicted": "predicted: from measured cells, 95 % interval; ranks nowhere",
    }
    words = [w for name, w in marks.items() if any(getattr(t, name) for t in summary.tables)]
    rates = [row for row in summary.rows if row.metrics.throughput is not None]
    words += ["( ) no complete repeat"] * any(not row.metrics.repeats for row in rates)
    states = [state for state in STATES if state in summary.counts and state != State.SUCCEEDED]
    words += [f"{STATES[state].short}: {STATES[state].meaning}" for state in states]
    return " · ".join(words)


def _section(section: Section) -> Iterator[Block]:
    yield Line(text=section.title, style="heading")
    if section.table.rows:
        yield section.table
    if section.note:
        yield Line(text=section.note, style="quiet")


def _flagged(summary: Summary) -> Iterator[Block]:
    if summary.raised:
        yield Line(text="Flagged rows", style="heading")
    for flagged in summary.flagged:
        title, about = f"{len(flagged.rows):,} × {flagged.flag.name}", flagged.flag.description
        yield Facts(title=title, about=f"{about} {flagged.says}")
        yield Many(
            entries=tuple(
                (Line(text=f"  {one_line(summary.label(row))}: {one_line(reason, 300)}"),)
                for row, reason in flagged.rows
            ),
            most=16,
            noun="row",
        )


def _causes(summary: Summary) -> Iterator[Block]:
    if summary.causes:
        yield Line(text="What did not run, and why", style="heading")
        entries = tuple(tuple(_cause(cause, summary)) for cause in summary.causes)
        yield Many(entries=entries, noun="cause")


def _cause(cause: Cause, summary: Summary) -> Iterator[Block]:
    of_class = f" ({cause.failure_class})" if cause.failure_class else ""
    reason = one_line(cause.reason, 300) or "no reason was recorded"
    names = one_line(units.listed([summary.label(row) for row in cause.rows], 3))
    yield Facts(title=f"{len(cause.rows):,} × {cause.state}{of_class}: {reason}", about=names)
    if cause.example.failure_tail:
        yield Line(text=cause.example.failure_tail, style="log")
    if cause.example.log:
        yield Line(text=f"  log: {one_line(cause.example.log, 200)}", style="quiet")


def _retried(summary: Summary) -> Iterator[Block]:
    if summary.retried:
        yield Line(text="Jobs that needed more than one attempt", style="heading")
        lines = (
            f"  {summary.label(attempts[0])}: {' → '.join(str(row.state) for row in attempts)}"
            for attempts in summary.retried
        )
        yield Many(entries=tuple((Line(text=line),) for line in lines), noun="job")


def _cards(summary: Summary) -> Iterator[Block]:
    timeline = summary.timeline
    if count := len(timeline.lanes):
        share, wall = units.percent(timeline.assigned, 3), units.seconds(timeline.wall_s)
        yield Line(text=f"Cards: {count}, time assigned {share} of {wall}", style="heading")
        yield cards_table(timeline, by_card=count <= MOST_CARDS)


def _provenance(summary: Summary) -> Iterator[Block]:
    provenance = summary.provenance
    facts = (*provenance.versions, *provenance.facts)
    if not facts:
        return
    pairs = [(fact.name, units.listed([value for value, _ in fact.values], 6)) for fact in facts]
    for one in provenance.invocations:
        if one.started_at is not None:
            span = f"{units.moment(one.started_at)} to {units.moment(one.ended_at)}"
            pairs.append(("measured", f"{span}, {units.plural(one.rows, 'row')}"))
    yield Line(text="Made with", style="heading")
    yield Facts(pairs=tuple(pairs))


def _rankings(summary: Summary) -> Iterator[Block]:
    if not summary.rankings:
        return
    apart = Differences.among([ranking.setting for ranking in summary.rankings])
    entries = []
    for ranking in summary.rankings:
        title = f"{ranking.setting.model} · {ranking.setting.where}"
        about, pairs = described(apart.of(ranking.setting)), tuple(_best(ranking, summary))
        entries.append((Facts(title=title, about=about, pairs=pairs),))
    yield Line(text="Best setting for each model and device", style="heading")
    yield Many(entries=tuple(entries), noun="ranking")


def _best(ranking: Ranking, summary: Summary) -> Iterator[tuple[str, str]]:
    best, chosen = ranking.fastest, summary.chosen
    rate = wording.throughput(best, at_least=ranking.at_least(best))
    yield "highest throughput", f"{chosen(best)}: {rate}"
    yield "verdict", wording.standing(ranking, chosen)
    if loss := wording.losses(best):
        yield "its loss", loss.removeprefix("loss ")
    if best.metrics.tpot_p50_s is not None:
        most = "at most: " * ranking.at_least(best)
        yield "its latency", f"{most}{wording.token_times(best)}"
    contended = wording.provisional(ranking, *ranking.ranked)
    if (row := ranking.lowest_latency) is not None:
        latency = wording.latency(ranking, row)
        yield "lowest latency", f"{chosen(row)}: {latency} a prompt (p50){contended}"
    if (row := ranking.smallest_memory) is not None:
        own = wording.provisional(ranking, row)
        yield "smallest memory", f"{chosen(row)}: {wording.memory(row)}{own}"
    if (row := ranking.most_work_per_joule) is not None:
        yield "most work per joule", f"{chosen(row)}: {wording.energy(row)}{contended}"
    for one in ranking.leaders:
        own = wording.provisional(ranking, one.row)
        yield one.title, f"{wording.leader(one, chosen(one.row))}{own}"


def _answer(summary: Summary, page: str) -> Iterator[Block]:
    sentences = wording.answers(summary)
    if sentences or page:
        yield Line(text="")
    for text in sentences:
        yield Line(text=text, style="bold" if summary.rankings else "bad")
    if page:
        yield Line(text=f"page: {page}", whole=True)


# ---------------------------------------------------------------- a comparison of two runs


def headline(comparison: RunComparison) -> str:
    """Format as ``48 jobs compared, 2 slower, 1 faster, 45 unchanged within noise; …``."""
    slower, faster = len(comparison.slower), len(comparison.faster)
    untested = sum(c.ratio.low is None for c in comparison.changes)
    same = len(comparison.changes) - slower - faster - untested
    words = [f"{units.plural(len(comparison.changes), 'job')} compared", f"{slower:,} slower"]
    words += [f"{faster:,} faster", f"{same:,} unchanged within noise"]
    others = {
        "with too few repeats to say": untested,
        "broken": len(comparison.broken),
        "not comparable": len(comparison.refused),
        "in one run only": comparison.only_before + comparison.only_after,
    }
    words += [f"{count:,} {what}" for what, count in others.items() if count]
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
    rows = tuple(
        _change(change, labels) for change in comparison.changes if change.significant or every
    )
    if rows:
        yield Table(
            head=("job", "before", "after", "change", "interval"),
            rows=rows,
            numbers=(1, 2, 3, 4),
            most=len(rows) if every else MOST_LINES,
            noun="job",
            rest="--all lists all of them",
        )
    figures = []  # reported ones that have got better or worse
    for change in comparison.changes:
        for figure in figure_changes(change.before, change.after):
            if figure.improved is not None:
                text = f"{labels[change.after.job_id]}: {figure}"
                figures.append(Line(text=text, style="good" if figure.improved else "bad"))
    ends = []
    for one in comparison.turned:
        why = f": {one_line(one.after.reason, 120)}" if one.after.reason else ""
        text = f"{one.before.state} → {one.after.state}: {labels[one.after.job_id]}{why}"
        ends.append(Line(text=text, style="bad" if one.broken else ""))
    for lines, noun in ((figures, "figure"), (ends, "job")):
        if lines:
            yield Line(text="")
            entries = tuple((line,) for line in lines)
            yield Many(entries=entries, noun=noun, rest="--json has all of them")
    yield from _refused(comparison)
    for (key, before, after), jobs in comparison.warnings.items():
        values = f"{one_line(before, 200)} → {one_line(after, 200)}"
        text = f"! {key} differs in {units.plural(jobs, 'job')}: {values}"
        yield Line(text=text, style="warning")


def _change(change: JobPair, labels: Mapping[str, Label]) -> tuple[str | Cell, ...]:
    ratio, interval = change.ratio, "too few repeats"
    style: Style = "quiet"
    if change.significant:
        style = "bad" if ratio.value < 1 else "good"
    if ratio.low is not None and ratio.high is not None:
        interval = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
    return (
        f"{labels[change.after.job_id]}{' emulated' if change.after.emulated else ''}",
        units.number(change.before.metrics.throughput),
        units.number(change.after.metrics.throughput),
        Cell(text=f"{ratio.value - 1:+.1%}", style=style),
        interval,
    )


def _refused(comparison: RunComparison) -> Iterator[Block]:
    refused = comparison.refused
    if not refused:
        return
    counted = Counter((d.key, d.before, d.after) for r in refused for d in r.differences)
    yield Line(text="")
    yield Line(text=f"Not comparable: {units.plural(len(refused), 'job')}", style="warning")
    for (key, before, after), count in counted.most_common(MOST_LINES):
        jobs, old, new = units.plural(count, "job"), one_line(before, 120), one_line(after, 120)
        # For keys such as ``flags`` both rows may have the same forbidden value.
        same = f"in {jobs}, before and after: {old}"
        yield Line(
            text=f"  {key} " + (same if before == after else f"differs in {jobs}: {old} → {new}")
        )


# ---------------------------------------------------------------- in a terminal


def _print(console: Console, blocks: Iterable[Block]) -> None:
    # Text objects, not markup: names and reasons may hold square brackets.
    for block in blocks:
        match block:
            case Line(style="log"):
                for line in tail(block.text, 800).splitlines()[-6:]:
                    console.print(Text(visible(f"  | {line}")))
            case Line():
                if block.style == "heading":
                    console.print()
                style = _STYLES[block.style]
                console.print(Text(visible(block.text), style=style), soft_wrap=block.whole)
            case Facts():
                if block.title:
                    console.print()
                    console.print(Text(visible(block.title), style="cyan"))
                if block.about:
                    console.print(Text(visible(f"  {block.about}"), style="dim"))
                for name, value in block.pairs:
                    console.print(Text(visible(f"  {name:<20} {value}")))
            case Table():
                _print_table(console, block)
            case Many():
                _print(console, [one for entry in block.entries[: block.most] for one in entry])
                _print_cut(console, len(block.entries) - block.most, block.noun, block.rest)


def _print_table(console: Console, table: Table) -> None:
    rows = [[_cell(cell, table) for cell in row] for row in table.rows[: table.most]]
    every = range(len(table.head))
    wide = sum(max(len(table.head[c]), *(row[c].cell_len for row in rows)) + 2 for c in every)
    if not table.matrix and wide > console.width:
        # Each row as its first cell, with the others by name below it.
        console.print()
        for first, *others in rows:
            console.print(first)
            pairs = [
                Text.assemble((f"{name} ", "dim"), cell)
                for name, cell in zip(table.head[1:], others, strict=True)
                if cell.plain not in ("", units.MISSING)
            ]
            console.print(Padding(Text(" · ").join(pairs), (0, 0, 0, 2), expand=False))
    else:
        for columns in _columns_that_fit(table, rows, console.width):
            _print_grid(console, table, rows, columns)
    _print_cut(console, len(table.rows) - table.most, table.noun, table.rest)


def _print_grid(
    console: Console, table: Table, rows: Sequence[Sequence[Text]], columns: Sequence[int]
) -> None:
    padding = 0 if table.matrix else (0, 1)
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, collapse_padding=True)
    for column in columns:
        name, right = table.head[column], column in table.numbers
        # Columns of single words stay whole; others wrap.
        words = max((len(row[column].plain.split()) for row in rows), default=0)
        grid.add_column(
            Text(f"{name} " if table.matrix else name),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right and (table.matrix or (words < 2 and " " not in name)),
            max_width=None if right or not table.matrix else _LONGEST_NAME,
        )
    for row in rows:
        grid.add_row(*(row[column] for column in columns))
    console.print(grid)


def _cell(cell: str | Cell, table: Table) -> Text:
    if isinstance(cell, str):
        return Text(one_line(cell))
    # The mark has its own column, so that figures stay aligned.
    mark = (cell.mark or " ") if table.matrix else ""
    text = Text(one_line(cell.text) + mark, style=_STYLES[cell.style])
    if cell.mark:
        text.stylize("yellow" if cell.mark == "!" else "bold green")
    for note in cell.notes if table.matrix else ():
        text.append(f"\n{note} ", style="not bold dim")
    return text


def _columns_that_fit(
    table: Table, rows: Sequence[Sequence[Text]], width: int
) -> Iterator[Sequence[int]]:
    """Yield column blocks of a matrix that fit ``width``; other tables adapt their width."""
    every = range(len(table.head))
    if not table.matrix:
        yield every
        return
    texts = [[line for row in rows for line in row[c].plain.split("\n")] for c in every]
    wide = [max(map(len, (*texts[c], table.head[c] + " "))) + 1 for c in every]
    block, room = [0], width - min(wide[0], _LONGEST_NAME + 1)
    for column in every[1:]:
        if len(block) > 1 and sum(wide[c] for c in block[1:]) + wide[column] > room:
            yield block
            block = [0]
        block.append(column)
    yield block


def _print_cut(console: Console, left_out: int, noun: str, rest: str) -> None:
    if left_out > 0:
        more = units.plural(left_out, f"more {noun}", f"more {noun}s")
        console.print(Text(f"… and {more}; {rest}.", style="dim"))


# ---------------------------------------------------------------- as Markdown


def _as_markdown(block: Block) -> str:
    match block:
        case Line(style="log"):
            # Indented code has no closing mark that hostile text could write.
            return "\n".join(f"      {line}" for line in tail(block.text, 1500).splitlines())
        case Line():
            if block.style == "heading":
                return f"## {markdown(block.text)}"
            if block.text.startswith("! "):
                return f"> {markdown(block.text[2:])}"
            return _bold(markdown(block.text), block.style == "bold")
        case Facts():
            about = markdown(block.about)
            title = [f"**{markdown(block.title)}** {about}".rstrip()] if block.title else []
            pairs = [f"- {markdown(name)}: {markdown(value)}" for name, value in block.pairs]
            return "\n".join([*title, *([""] if title and pairs else []), *pairs])
        case Table():
            rows = [[_markdown_cell(cell, block) for cell in row] for row in block.rows]
            columns = range(len(block.head))
            align = ["--:" if column in block.numbers else "---" for column in columns]
            rows = [[markdown(name) for name in block.head], align, *rows]
            return "\n".join("| " + " | ".join(row) + " |" for row in rows)
        case Many():
            texts = [_as_markdown(one) for entry in block.entries for one in entry]
            if all(isinstance(one, Line) for entry in block.entries for one in entry):
                return "\n".join(f"- {text}" for text in texts)
            return "\n\n".join(filter(None, texts))
    raise AssertionError(block)


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold and text else text


def _markdown_cell(cell: str | Cell, table: Table) -> str:
    if isinstance(cell, str):
        return markdown(one_line(cell))
    text = _bold(markdown(one_line(cell.text)), cell.mark == "*" or cell.style == "bold")
    notes = markdown(" ".join(cell.notes)) if table.matrix else ""
    return f"{text}{markdown(cell.mark)} {notes}".rstrip()
