"""Sections of the report that are tables with figures, for text and page alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from orchestrator.analysis.effects import Scaling
from orchestrator.analysis.hardware import REFERENCES, Comparison, Line, Share
from orchestrator.analysis.metrics import PARTS
from orchestrator.analysis.rankings import HeadToHead
from orchestrator.analysis.ratio import Ratio
from orchestrator.analysis.selection import Differences, Setting, described
from orchestrator.analysis.serving import Point, Served
from orchestrator.analysis.summary import STATES, Summary
from orchestrator.analysis.timeline import Lane, Timeline
from orchestrator.core.measurement import Measurement, Prediction
from orchestrator.report import charts, wording
from orchestrator.report.blocks import Cell, Figure, Section, Table
from orchestrator.util import format as units
from workloads.quality import METRICS

#: Most effects in a figure, and rows of a table on the page.
MOST_DRAWN, MOST_ROWS = 24, 300
#: Most predicted cells in a terminal.
MOST_PREDICTED = 12

#: Settings of a step that change a model, then figures of quality, and settings of an engine.
_MADE_BY = ("method", "sparsity", "sparsity_share", "numbers", "student_layers", "student_hidden")
_QUALITY = ("quality_top1_agreement", "quality_kl", "answer_loss")
_CHOSEN = ("graph_optimization", "calibration", "fusions")


def sections(summary: Summary) -> tuple[Section, ...]:
    """Return the non-empty sections, in the page's order."""
    every = (
        *(_head_to_head(summary, *one) for one in enumerate(summary.head_to_head, 1)),
        _effects(summary),
        _forms(summary),
        _training(summary),
        predicted(summary.predictions),
        _replicates(summary),
        *(_served(one, place) for place, one in enumerate(summary.served, 1)),
        _scaling(summary),
        _roofline(summary),
        _published(summary),
        _failing_cards(summary),
    )
    return tuple(one for one in every if one.table.rows)


def questions_section(summary: Summary) -> Section:
    """Return the answers to the questions of the grid, with what they rest on."""
    rows = tuple(
        (
            one.question,
            Cell(text=one.job or "none", style="good" if one.reached else ""),
            f"{one.bound} {units.number(one.value)}".lstrip() if one.job else units.MISSING,
            f"{one.chance} of {one.confidence:.2f}",
            f"{one.lead_text} of {one.next}" if one.next else units.MISSING,
            one.basis,
            "; ".join(one.changes) or "nothing that is likely",
            one.file + (f"; as a server: {one.launch}" if one.launch else "") or units.MISSING,
        )
        for one in summary.answers
    )
    head = ("question", "best setting", "its figure", "probability", "ahead", "rests on")
    return Section(
        id="questions",
        title="Answers",
        menu="Answers",
        table=Table(
            head=(*head, "what would change it", "its grid"), rows=rows, numbers=(2,), noun="answer"
        ),
        note="The probability that no other cell is better and keeps the limits: by the intervals "
        "of measured cells, and by predictions of the others. A predicted cell is never the "
        "answer.",
    )


def cards_table(timeline: Timeline, *, by_card: bool = True) -> Table:
    """Return how long each card, or the cards of each node, were assigned to attempts."""
    groups: dict[str, list[Lane]] = {}
    for lane in timeline.lanes:
        groups.setdefault(lane.name if by_card else lane.node, []).append(lane)
    noun, rows = "card" if by_card else "node", []
    for name, lanes in groups.items():
        assigned_s = sum(lane.assigned_s for lane in lanes)
        whole_s = timeline.wall_s * len(lanes)
        rows.append(
            (
                name,
                f"{len(lanes)}",
                f"{sum(len(lane.spans) for lane in lanes):,}",
                units.seconds(assigned_s),
                units.seconds(sum(lane.unassigned_s for lane in lanes)),
                units.percent(assigned_s / whole_s if whole_s else None, 3),
            )
        )
    head = (noun, "cards", "attempts", "time assigned", "unassigned", "share")
    return Table(head=head, rows=tuple(rows), numbers=(1, 2, 3, 4, 5), most=40, noun=noun)


def _failing_cards(summary: Summary) -> Section:
    blamed = summary.timeline.blamed()
    return Section(
        id="failing-cards",
        title="Cards on which jobs failed that worked elsewhere",
        menu="Failing cards",
        table=Table(
            head=("card", "attempts", "failed there alone", "the last one"),
            rows=tuple(
                (lane.name, f"{len(lane.spans)}", f"{len(failed)}", failed[-1].row.reason)
                for lane, failed in blamed
            ),
            numbers=(1, 2),
            most=MOST_ROWS,
            noun="card",
        ),
        lead="Two such failures in a short time take a card out of use for a while; look at it "
        "before the next night.",
    )


def _head_to_head(summary: Summary, place: int, one: HeadToHead) -> Section:
    """Return a comparison of accelerators or engines, a column for each."""

    def cell(row: Measurement | None, ratio: Ratio | None) -> str:
        if row is None:
            return units.MISSING
        figure = wording.figure(row, at_least=summary.at_least(row))
        return figure if ratio is None else f"{figure}, {wording.ratio(ratio, tie=True)}"

    rows = [(line.label, *map(cell, line.rows, line.ratios)) for line in one.lines]
    if len(one.lines) > 1:
        means = ("1×" if mean is None else wording.ratio(mean, tie=True) for mean in one.overall)
        rows.append(("all together", *means))
    note = f"{one.unit}, and times {one.sides[0]}'s with its interval. ~ tied."
    every = [ratio for line in one.lines for ratio in line.ratios if ratio is not None]
    if len(one.lines) > 1 and len({ratio.low is None for ratio in every}) > 1:
        note += " All together: settings with an interval."
    if one.left_out:
        note += f" {units.plural(one.left_out, 'slower setting')} not listed."
    return Section(
        id=f"head-{place}",
        title="Head to head" if not one.workload else f"Head to head: {one.workload}",
        menu="Head to head" if place == 1 else "",
        table=Table(
            head=("setting", *one.sides),
            rows=tuple(rows),
            numbers=tuple(range(1, len(one.sides) + 1)),
        ),
        note=note,
    )


def _effects(summary: Summary) -> Section:
    effects = summary.effects
    apart = Differences.among([effect.label_setting for effect in effects])
    rows = []
    for effect in effects:
        sizes = [pair.row.batch_size_requested for pair in effect.pairs]
        ratios = [units.times(pair.ratio.value) for pair in effect.pairs]
        by_batch = ", ".join(f"{one} at {size}" for one, size in zip(ratios, sizes, strict=True))
        change = f"{effect.before or 'unset'} → {effect.after or 'unset'}"
        about = described(apart.of(effect.label_setting))
        tie = "" if effect.ratio.decided else " ~"
        rows.append(
            (
                f"{effect.name.replace('_', ' ')}: {change}",
                f"{effect.setting.model}, {effect.setting.where}, b={','.join(sizes)}"
                + (f" · {about}" if about else ""),
                Cell(text=wording.ratio(effect.ratio) + tie, notes=(by_batch,) * (len(sizes) > 1)),
                units.times(effect.token_ratio),
                units.times(effect.memory_ratio),
            )
        )
    drawn = effects[:MOST_DRAWN]
    title = "Throughput, times the baseline's. The table below has the values."
    cut = f"The first {len(drawn)} of {len(effects)}." if len(drawn) < len(effects) else ""
    return Section(
        id="techniques",
        title="What each technique buys",
        menu="Techniques",
        table=Table(
            head=("changed", "where", "throughput", "real tokens/s", "memory"),
            rows=tuple(rows),
            numbers=(2, 3, 4),
        ),
        note="The baseline is the value before the arrow, at the same batch size."
        + " ~ undecided." * any(not effect.ratio.decided for effect in effects),
        lead="Pairs of rows that differ in exactly one setting, at the same batch size: the "
        "baseline is what the experiment has by default. Right of the middle is faster; a bar that "
        "crosses the middle is tied with the baseline.",
        figures=lambda: [Figure(drawing=charts.effects_chart(drawn, title), caption=cut)],
    )


def _forms(summary: Summary) -> Section:
    saved = {str(name): row for row in summary.rows if (name := row.parameters.get("save_model"))}
    rows = [row for row in summary.joined.rows if row.parameters.get("quality_of")]
    shown = []
    for row in sorted(rows, key=lambda row: str(row.parameters["quality_of"])):
        step, made = saved.get(row.model), ""
        if step is not None:
            made = f"{step.workload} of {step.model}: {', '.join(_settings(step, _MADE_BY))}"
        if row.metrics.throughput is not None:
            rate = wording.figure(row, at_least=summary.at_least(row))
            form = " ".join([row.precision, row.engine, *_settings(row, _CHOSEN)])
            quality = (units.number(row.reported(name)) for name in _QUALITY)
            size = units.size(row.weight_bytes)
            shown.append(
                (row.model, made, form, size, *quality, f"{rate} {wording.plus_minus(row)}")
            )
    titles = [next(one.title for one in METRICS if one.name == name) for name in _QUALITY]
    models = sorted({str(row.parameters["quality_of"]) for row in rows})
    return Section(
        id="forms",
        title="Forms of one model",
        menu="Forms of one model",
        table=Table(
            head=("model", "made by", "run in", "weights", *titles, "tokens/s"),
            rows=tuple(shown),
            numbers=(3, 4, 5, 6, 7),
        ),
        note=f"Quality: against the texts of {units.listed(models)} in fp32.",
    )


def _settings(row: Measurement, names: Iterable[str]) -> list[str]:
    given = ((name, row.parameters.get(name)) for name in names)
    known = ((name, value) for name, value in given if value not in (None, False, "none"))
    return [f"{name.replace('_', ' ')} {value}" for name, value in known]


def _training(summary: Summary) -> Section:
    """Return rows that trained, fastest first: first and last loss, and shares of a step's time."""
    steps = {one.row.job_id: one for one in summary.steps}
    trained = [row for row in summary.joined.rows if wording.losses(row) or row.job_id in steps]
    known = {row.metrics.throughput_unit for row in trained}
    unit = known.pop() if len(known) == 1 else ""
    rows = []
    for row in sorted(trained, key=lambda row: row.metrics.throughput or 0.0, reverse=True):
        step = steps.get(row.job_id)
        shares = [getattr(step, part, None) for part in PARTS]
        own_unit = "" if unit else f"{row.metrics.throughput_unit} "
        rows.append(
            (
                summary.label(row),
                f"{wording.figure(row, at_least=summary.at_least(row))} "
                f"{own_unit}{wording.plus_minus(row)}".strip(),
                units.number(row.metrics.loss_first),
                units.number(row.metrics.loss_last),
                units.seconds(step.step_s if step else None),
                *(units.percent(share, 2) for share in shares),
                row.details.get("loss_flag", units.MISSING),
            )
        )
    head = (unit or "throughput", "loss first", "loss last", "step", "data", "forward", "backward")
    note = "Loss of the first and of the last timed step. Then shares of a timed step."
    if any(one.communication is not None for one in summary.steps):
        note += " Waiting for other cards is a part of the times beside it."
    names = ("job", *head, "optimizer", "waiting", "what is wrong")
    used = [at for at in range(len(names)) if any(row[at] != units.MISSING for row in rows)]
    return Section(
        id="training",
        title="Training",
        menu="Training",
        table=Table(
            head=tuple(names[at] for at in used),
            rows=tuple(tuple(row[at] for at in used) for row in rows),
            numbers=tuple(place for place, at in enumerate(used) if 1 <= at < len(names) - 1),
        ),
        note=note,
    )


def predicted(predictions: Sequence[Prediction]) -> Section:
    """Return cells that were not measured, with the figures expected of them."""
    figures = dict.fromkeys(one.figure for one in predictions)
    by_cell: dict[str, dict[str, Prediction]] = {}
    for one in predictions:
        by_cell.setdefault(one.job_id, {})[one.figure] = one
    rows = []
    for of_cell in by_cell.values():
        first = next(iter(of_cell.values()))
        shown = [of_cell.get(figure) for figure in figures]
        values = ("" if one is None else _predicted_text(one) for one in shown)
        rows.append((first.label, *values, units.percent(first.runs, 2), first.basis))
    stems = (name.removesuffix("_s").removesuffix("_bytes") for name in figures)
    titles = (stem.replace("_", " ") for stem in stems)
    return Section(
        id="predicted",
        title="Predicted cells",
        menu="Predicted",
        table=Table(
            head=("cell, not measured", *titles, "runs with probability", "rests on"),
            rows=tuple(rows),
            numbers=tuple(range(1, len(figures) + 2)),
            most=MOST_PREDICTED,
            noun="cell",
            rest="predictions.parquet has all of them",
        ),
        note="Not measured: the median and the 95 % interval of what a measurement would give. "
        "They win nothing and are compared with nothing.",
    )


def _predicted_text(one: Prediction) -> str:
    """Format as ``1,234 (1,180 to 1,290)``."""
    in_bytes, in_s = one.figure.endswith("_bytes"), one.figure.endswith("_s")
    form = units.size if in_bytes else units.seconds if in_s else units.number
    return f"{form(one.value)} ({form(one.low)} to {form(one.high)})"


def _replicates(summary: Summary) -> Section:
    """Return cells that ran in several processes: mean, interval and parts of the variance."""
    rows = []
    for cell in summary.joined.cells:
        row, mean = cell.row, cell.row.metrics.throughput
        rate = wording.throughput(row, at_least=summary.at_least(row))
        count, between, within = "1", units.MISSING, units.MISSING
        if mean and cell.spread is not None:
            count = f"{row.metrics.processes} of {len(cell.replicates)}"
            parts = (cell.spread.between, cell.spread.within)
            shares = (None if part is None else part / mean for part in parts)
            between, within = (units.percent(share, 2) for share in shares)
        rate = rate if mean else STATES[row.state].short
        rows.append((summary.label(row), count, rate, between, within))
    return Section(
        id="replicates",
        title="Replicates",
        menu="Replicates",
        table=Table(
            head=("cell", "processes", "throughput", "between processes", "within one"),
            rows=tuple(rows),
            numbers=(1, 3, 4),
        ),
        note="Between processes: standard deviation, above what repeats explain. Within one: "
        "standard error of its mean. The interval holds both (Student's t over the processes' "
        "means).",
    )


#: Columns of points of a served model: title, and the figure.
_SERVED: tuple[tuple[str, Callable[[Point], float | None]], ...] = (
    ("tokens/s per card", lambda point: point.per_card),
    ("tokens/s per user", lambda point: point.per_user),
    ("cost of 1M tokens", lambda point: point.cost),
    ("TTFT p90, s", lambda point: point.figure("ttft_s")),
    ("TPOT p90, s", lambda point: point.figure("tpot_s")),
    ("latency p90, s", lambda point: point.figure("latency_s")),
    ("goodput, req/s", lambda point: point.row.reported("goodput_per_s")),
    ("errors", lambda point: point.row.reported("error_share") or None),
)


def _served(served: Served, place: int) -> Section:
    """Best settings under each limit, with the front, the load's curves and all points."""
    points = [point for curve in served.curves for point in curve.points]
    shown = [pair for pair in _SERVED if any(pair[1](point) is not None for point in points)]
    load = served.curves[0].load_name.replace("_", " ")
    titles = tuple(
        f"{title}, {served.currency}" if served.currency and "cost" in title else title
        for title, _ in shown
    )

    def cells(point: Point) -> tuple[str, ...]:
        values = (figure(point) for _, figure in shown)
        return tuple("" if value is None else units.number(value) for value in values)

    def rows() -> Iterator[tuple[str | Cell, ...]]:
        for best in served.best:
            each = (limit.replace(" ", "\N{NO-BREAK SPACE}") for limit in best.limits.split(", "))
            limits = ", ".join(each) or "no limit"
            if best.curve is None or best.point is None:
                yield (limits, Cell(text="none keeps it", style="quiet"), *[""] * (len(shown) + 1))
            else:
                yield (limits, best.curve.name, f"{best.point.load:g}", *cells(best.point))

    def every() -> Iterator[tuple[str | Cell, ...]]:
        front = {point.row.job_id for point in served.front}
        for curve in served.curves:
            knee = curve.knee.row.job_id if curve.knee else ""
            for point in curve.points:
                job_id = point.row.job_id
                marks = [" *"] * (job_id in front) + [" (knee)"] * (job_id == knee)
                marks += [" (flagged)"] * point.flagged
                yield (curve.name + "".join(marks), f"{point.load:g}", *cells(point))

    def figures() -> Iterator[Figure]:
        of = f"{served.setting.model} on {served.setting.card}, {served.about}"
        cut = _cut(served.curves)
        yield Figure(
            drawing=charts.load_figure(
                served,
                f"Throughput of a card against each user's speed, {of}.",
                "tokens/s per user",
                "tokens/s per card",
                lambda point: (point.per_user, point.per_card) if point.per_user else None,
                front=served.front,
            ),
            caption=f"{of}. The line through the best points is the Pareto front.{cut}",
        )
        yield Figure(
            drawing=charts.load_figure(
                served,
                f"Latency against load, {of}.",
                load,
                "p90 latency of a request, s",
                lambda point: (point.load, point.figure("latency_s") or 0.0),
                over_load=True,
            ),
            caption=f"{of}. A ring marks the knee: the most throughput for its latency.{cut}",
        )

    numbers = tuple(range(2, len(shown) + 3))
    return Section(
        id=f"served-{place}",
        title=f"{served.setting.model} served on {served.setting.card}: {served.about}",
        menu=f"Served {place}" if place > 1 else "Served",
        table=Table(
            head=("limit", "best setting", load, *titles), rows=tuple(rows()), numbers=numbers
        ),
        lead="The setting and load with the most tokens/s per card within each limit of slo. "
        "Latencies are the 90th percentile, or the median where requests were too few for it."
        + " Flagged loads are in the table of all points alone."
        * any(p.flagged for p in points),
        figures=figures,
        others=Table(
            head=("setting", load, *titles),
            rows=tuple(every()),
            numbers=tuple(number - 1 for number in numbers),
            most=MOST_ROWS,
        ),
        others_title="all points; * is on the Pareto front",
    )


def _cut(lines: Sequence[object]) -> str:
    """Return which of a figure's lines are drawn; "" if all are."""
    most = charts.MOST_LINES
    return f" The first {most} settings are drawn." if len(lines) > most else ""


def _scaling(summary: Summary) -> Section:
    rows = []
    for one in summary.scalings:
        base, metrics = one.base, one.base.metrics
        job = f"{base.model} {base.precision} b={base.batch_size_requested} on {base.accelerator}"
        rate = f"{units.number(metrics.throughput)} {metrics.throughput_unit}"
        note = f"{units.plural(base.cards, 'card')}: {rate}"
        rows += [
            (
                Cell(text=job + ", emulated" * base.emulated, notes=(one.setting.device, note)),
                f"{step.row.cards}",
                wording.ratio(step.speedup),
                f"{step.speedup.side} {units.percent(step.efficiency, 3)}".lstrip(),
            )
            for step in one.steps[1:]
        ]
    apart = Differences.among([one.setting for one in summary.scalings])
    groups: dict[Setting, list[Scaling]] = {}
    for one in summary.scalings:
        groups.setdefault(one.setting, []).append(one)

    def figures() -> Iterator[Figure]:
        for setting, group in groups.items():
            name = " · ".join(filter(None, (setting.model, described(apart.of(setting)))))
            title = f"Efficiency against cards, {name}. The table below has the values."
            yield Figure(
                drawing=charts.scaling_figure(group, title),
                caption=f"{name}. Dashed: perfect scaling.{_cut(group)}",
            )

    return Section(
        id="scaling",
        title="Scaling over cards",
        menu="Scaling",
        table=Table(
            head=("job", "cards", "speed-up", "efficiency"), rows=tuple(rows), numbers=(1, 2, 3)
        ),
        lead="Every card has a batch of its own. Efficiency is what N cards give, of N times what "
        "the fewest cards give.",
        figures=figures,
    )


def _roofline(summary: Summary) -> Section:
    roofline = summary.roofline
    # Nearest to one of its card's limits first.
    near = sorted(
        roofline.shares,
        key=lambda share: max(share.bandwidth or 0.0, share.compute or 0.0),
        reverse=True,
    )
    groups: dict[str, list[Share]] = {}
    for share in near:
        groups.setdefault(share.sheet.device, []).append(share)
    emulated = roofline.emulated
    note = f"None for {units.plural(emulated, 'row')} of emulated cards." if emulated else ""
    if roofline.unknown:
        note = f"{note} No data sheet for {units.listed(list(roofline.unknown))}.".strip()

    def figures() -> Iterator[Figure]:
        for device, shares in groups.items():
            title = f"Roofline of {device}. The table below has the shares."
            caption = (
                f"Each mark: the decoding steps of one setting. The line: the limit of {device}."
            )
            yield Figure(drawing=charts.roofline_figure(shares, title), caption=caption)

    return Section(
        id="roofline",
        title="Share of the card's limits",
        menu="Limits",
        table=Table(
            head=("job", "card", "bandwidth, at least", "compute"),
            rows=tuple(_share(summary, share) for share in near),
            numbers=(2, 3),
        ),
        note=note,
        lead="What was reached of the published peaks. A decoding step reads all weights once: "
        "bandwidth is a lower bound from that alone, without the key-value cache. Compute counts "
        "the operations that the real tokens need; in prefill (MFU) those of the prompts, over the "
        "time to the first token.",
        figures=figures,
        remarks=tuple(
            f"Data sheet of {device}: {shares[0].sheet.limits}. {shares[0].sheet.source}"
            for device, shares in groups.items()
        ),
    )


def _share(summary: Summary, share: Share) -> tuple[str | Cell, ...]:
    notes = [share.arithmetic] if share.arithmetic else []
    notes += [f"in prefill {units.percent(share.prefill, 3)}"] if share.prefill else []
    return (
        summary.label(share.row),
        share.sheet.device,
        units.percent(share.bandwidth, 3),
        Cell(text=units.percent(share.compute, 3), notes=tuple(notes)),
    )


def _published(summary: Summary) -> Section:
    measured = [one for one in summary.published if one.measured]
    others = [one for one in summary.published if not one.measured]

    def figures() -> Iterator[Figure]:
        for one in measured:
            title = f"{one.title}. The table below has the values."
            yield Figure(drawing=charts.published_chart(one, title), caption=one.title)

    lines = [line for one in summary.published for line in one.lines]
    sources = dict.fromkeys(line.figure.source for line in lines if line.row is None)
    remarks = [note for one in summary.published for note in one.notes]
    remarks += [
        f"{one.about.task}: {units.plural(one.emulated, 'row')} of emulated cards left out."
        for one in measured
        if one.emulated
    ]
    return Section(
        id="published",
        title="Measured against published",
        menu="Published",
        table=_published_table(measured),
        lead="Rows of this run that did the same as a published figure: task, model, data, "
        "precision, batch size per card, cards and the settings behind the figure agree; the "
        "device may differ.",
        figures=figures,
        others=_published_table(others) if others else None,
        others_title="The other published figures",
        remarks=(
            *dict.fromkeys(remarks),
            f"Published: {'; '.join(sources)}. A speed-up is over the same batch size where the "
            "source has one, else it says best against best. A figure with a question mark is "
            "doubtful, and nothing is compared with it.",
        ),
    )


def _published_table(comparisons: Sequence[Comparison]) -> Table:
    return Table(
        head=("who", "task", "setting", "figure", *(f"over {device}" for device in REFERENCES)),
        rows=tuple(_published_row(one, line) for one in comparisons for line in one.lines),
        numbers=tuple(range(3, 4 + len(REFERENCES))),
    )


def _published_row(one: Comparison, line: Line) -> tuple[str | Cell, ...]:
    figure, row, task = line.figure, line.row, one.about
    task_notes = [*[f"on {task.dataset}"] * bool(task.dataset), *[one.load] * bool(one.load)]
    batch = "" if one.load else f" b={figure.batch_size}"
    notes = ["less is better"] * (task.metric == "latency") + ["?: doubtful"] * figure.doubtful
    notes += [f"trained {line.training}"] if line.training else []
    notes += [f"{line.speedup(one)} {one}" for one in line.speedups if one not in REFERENCES]
    about = [figure.software] * bool(figure.software)
    if row is not None:
        notes += filter(None, [wording.plus_minus(row)])
        about += ["random weights"] * bool(row.random_weights)
        about += ["synthetic data"] * bool(row.synthetic_data)
    return (
        Cell(text="this run" if line.row else "published", style="good" if line.row else ""),
        Cell(
            text=f"{task.task}, {task.model}, {units.plural(task.cards, 'card')}",
            notes=tuple(task_notes),
        ),
        Cell(text=f"{figure.device} {figure.precision}{batch}", notes=tuple(about)),
        Cell(text=f"{units.number(figure.value)} {task.unit}", notes=tuple(notes)),
        *(line.speedup(device) for device in REFERENCES),
    )
