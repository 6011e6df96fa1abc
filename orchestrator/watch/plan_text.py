"""A plan as text, with shared settings once and uncut reasons, and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.core.job import Accelerator, Job, Scalar
from orchestrator.core.labels import MOST_NAMED
from orchestrator.core.plan import Action, Plan, PlannedJob
from orchestrator.core.topology import Node, legal_card_sets
from orchestrator.planning.forecast import Forecast, cost_of_replicates, most_repeats
from orchestrator.planning.planner import card_seconds
from orchestrator.util import output
from orchestrator.util.format import plural, seconds

if TYPE_CHECKING:
    from orchestrator.core.deadline import Deadline

FOLDED_ROWS = 2000  # laying out a table for a terminal takes about a millisecond a row

_STYLES = {
    Action.RUN: "bold",
    Action.REUSE: "green",
    Action.SKIP: "yellow",
    Action.UNSUPPORTED: "dim",
}
_RIGHT = ("cards", "batch_size", "estimate")


def nodes_text(nodes: Sequence[Node]) -> str:
    """Format as ``2 nodes of 8 HPU (emulated), 1 node of 8 GPU``."""
    kinds = Counter(
        (len(node.card_indices), str(node.accelerator), node.emulated, node.device_name)
        for node in nodes
    )
    parts = []
    for (cards, kind, emulated, device), count in kinds.items():
        note = "emulated" if emulated else device.removesuffix(kind).strip()
        parts.append(f"{plural(count, 'node')} of {cards} {kind}" + (f" ({note})" if note else ""))
    return ", ".join(parts) or "no nodes"


Column = tuple[str, list[str]]

#: Texts of unset settings.
_UNSET = ("null", '""', "")
_FIELDS = (
    *("experiment", "workload", "model", "dataset", "accelerator", "cards", "precision"),
    *("batch_size", "engine", "isolation"),
)


def _settings(jobs: Sequence[Job]) -> Iterator[Column]:
    """Yield each setting with its text for every job; equal values share one text."""
    replicated = any(job.replicate > 1 for job in jobs)
    for name in (*_FIELDS, *(["replicate"] if replicated else [])):
        values = list(map(attrgetter(name), jobs))
        texts = {value: str(value) for value in set(values)}
        yield name, [texts[value] for value in values]
    shared = [id(job.parameters) for job in jobs]  # one tuple serves many jobs
    known = {
        key: {name: _written(value) for name, value in job.parameters}
        for key, job in dict(zip(shared, jobs, strict=True)).items()
    }
    names = list(dict.fromkeys(chain.from_iterable(known.values())))
    varying = [name for name in names if len({texts.get(name) for texts in known.values()}) > 1]
    brief = len(varying) > MOST_NAMED
    for name in names:
        if not brief or name not in varying:
            column = {key: texts.get(name, "") for key, texts in known.items()}
            yield name, [column[key] for key in shared]
    if brief:
        column = _unusual(known, varying, Counter(shared))
        yield "settings", [column[key] for key in shared]


def _unusual(
    known: Mapping[int, Mapping[str, str]], names: Sequence[str], jobs: Counter[int]
) -> dict[int, str]:
    """Return what differs from most jobs in one text; a column per technique would not fit."""
    usual = {}
    for name in names:
        counts: Counter[str] = Counter()
        for key, texts in known.items():
            if name in texts:
                counts[texts[name]] += jobs[key]
        usual[name] = counts.most_common(1)[0][0]
    return {
        key: ", ".join(
            f"{name} {texts[name]}" for name in names if texts.get(name, usual[name]) != usual[name]
        )
        for key, texts in known.items()
    }


def _written(value: Scalar) -> str:
    """Format a value as in a grid, unquoted if possible."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./:@-]*", value)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def _table(items: Sequence[PlannedJob]) -> tuple[dict[str, str], list[Column]]:
    """Split the jobs' settings into shared and varying ones."""
    jobs = [item.job for item in items]
    shared: dict[str, str] = {}
    columns = [("job_id", [job.job_id for job in jobs])]
    for name, texts in _settings(jobs):
        if len(set(texts)) > 1:
            columns.append((name, texts))
        elif texts and texts[0] not in _UNSET:
            shared[name] = texts[0]
    durations = {estimate_s: seconds(estimate_s) for estimate_s in {i.estimate_s for i in items}}
    estimates, actions, reasons = [], [], []
    for item in items:
        runs = item.action is Action.RUN
        estimates.append(durations[item.estimate_s] if runs else "")
        actions.append(str(item.action))
        before = (*item.needs, *item.after)
        waits = f"after {', '.join(before)}" if runs and before else ""
        reasons.append(item.reason or waits)
    columns += [("estimate", estimates), ("action", actions), ("reason", reasons)]
    return shared, columns


def summary_lines(plan: Plan) -> Iterator[str]:
    """Yield counts, card time and duration."""
    counts = Counter(item.action for item in plan.jobs)
    yield ", ".join(f"{counts[action]} {action}" for action in Action)
    busy, span = card_seconds(plan), plan.duration
    takes = f"about {seconds(span.middle_s)}"
    if span.high_s and span.high_s > 1.5 * span.low_s:  # uncertain
        low, high = seconds(span.low_s), seconds(span.high_s)
        takes = f"{low} to {high} (most likely {seconds(span.middle_s)})"
    yield (
        f"{takes} from the command to the last row; "
        f"{busy / 3600:.2f} card-hours ({seconds(busy)} of one card)"
    )
    if (cost := cost_of_replicates(plan)) is not None:
        yield (
            f"of these, replicates from 2 on are {plural(cost.jobs, 'job')} and "
            f"{seconds(cost.card_seconds)} of one card, with about {cost.fresh_processes} "
            "fresh processes"
        )
    if repeats := most_repeats(plan.jobs, plan.nodes):
        yield (
            f"up to {plural(repeats, 'repeat')} beside these, of rows that something disturbs "
            "(measure: repeat_flagged)"
        )
    for number, question in enumerate(plan.questions, 1):
        yield f"question {number}: {question}"
    for note in (*plan.notes, *plan.host_notes):
        yield f"note: {note}"


def deadline_lines(deadline: Deadline, forecast: Forecast | None) -> Iterator[str]:
    """Yield the deadline's moments on this machine's clock, and the forecast."""
    at, until = (datetime.fromtimestamp(t).astimezone() for t in (deadline.at, deadline.work_until))
    yield (
        f"deadline: the report is there by {at:%Y-%m-%d %H:%M %Z}; work ends at {until:%H:%M:%S}, "
        "the first cell of each configuration goes first"
    )
    if forecast is None:
        return
    ends = seconds(forecast.ends_after_s)
    if forecast.ends_after_s > forecast.seconds:
        yield f"likely not all {forecast.jobs} jobs are done by then: they take about {ends}"
    elif forecast.measured == forecast.jobs:
        yield f"all {forecast.jobs} jobs should be done by then, after about {ends}"
    else:
        yield (
            f"about {forecast.measured} of {forecast.jobs} jobs should be measured by then, with "
            f"{forecast.reached} of {forecast.configurations} first cells; the others are left for "
            "another run"
        )


def print_plan(
    plan: Plan, file: TextIO, terminal: Console | None = None, more: Sequence[str] = ()
) -> None:
    """Print the plan to a file or, folded, to a terminal; ``more`` lines follow its sums."""

    def write(text: str) -> None:
        output.say(text, file, end="")

    jobs = plural(len(plan.jobs), "job")
    write(f"Grid {plan.grid_name}: {jobs} on {nodes_text(plan.nodes)}\n")
    groups: dict[str, list[PlannedJob]] = {}
    for item in plan.jobs:
        groups.setdefault(item.job.workload, []).append(item)
    for workload, items in groups.items():
        shared, columns = _table(items)
        if len(groups) > 1:
            write(f"\n{workload}: {plural(len(items), 'job')}\n")
        if shared:
            settings = ", ".join(f"{name} {value}" for name, value in shared.items())
            if terminal is not None:
                terminal.print(
                    f"Every job: {settings}", markup=False, highlight=False, soft_wrap=True
                )
            else:
                write(f"Every job: {settings}\n")
        write("\n")
        if terminal is not None and len(plan.jobs) <= FOLDED_ROWS:
            _print_folded(columns, items, terminal)
        else:
            write("".join(f"{line}\n" for line in aligned(columns)))
    write("\n" + "\n".join([*summary_lines(plan), *more]) + "\n")


def _print_folded(columns: Sequence[Column], jobs: Sequence[PlannedJob], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold underline")
    for heading, _ in columns:
        right = heading in _RIGHT
        fold = heading in ("reason", "model", "dataset")
        table.add_column(
            heading,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=not fold,
            min_width=min(24, console.width // 4) if heading == "reason" else None,
        )
    for item, *texts in zip(jobs, *(texts for _, texts in columns), strict=True):
        table.add_row(*map(Text, texts), style=_STYLES[item.action])
    console.print(table)


def aligned(columns: Sequence[Column]) -> list[str]:
    """Return headings and texts of columns as lines, numbers to the right."""
    padded = []
    for heading, texts in columns:
        cells = [heading, *texts]
        width = max(map(cell_len, cells))
        spaces = [" " * (width - cell_len(cell)) for cell in cells]
        pairs = zip(spaces, cells, strict=True)
        right = heading in _RIGHT
        padded.append([space + cell if right else cell + space for space, cell in pairs])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def plan_json(plan: Plan, forecast: Forecast | None = None) -> str:
    """Return the plan as one JSON object, a line per job."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    sets: dict[tuple[Accelerator, int], int] = {}
    counts = Counter(item.action for item in plan.jobs)
    head = {
        "grid": plan.grid_name,
        "nodes": [
            {
                "name": node.name,
                "accelerator": node.accelerator.value,
                "cards": len(node.card_indices),
                "device_name": node.device_name,
                "emulated": node.emulated,
            }
            for node in plan.nodes
        ],
        "summary": {
            "jobs": len(plan.jobs),
            **{action.value: counts[action] for action in Action},
            "card_hours": card_seconds(plan) / 3600,
            "duration_s": plan.duration.middle_s,
            "duration_low_s": plan.duration.low_s,
            "duration_high_s": plan.duration.high_s,
            "most_repeats": most_repeats(plan.jobs, plan.nodes),
            **({"replicates": asdict(cost)} if (cost := cost_of_replicates(plan)) else {}),
        },
        "notes": list(plan.notes),
        "host_notes": list(plan.host_notes),
        **({"questions": list(plan.questions)} if plan.questions else {}),
    }
    if forecast is not None:
        head["forecast"] = asdict(forecast)
    lines = []
    for item in plan.jobs:
        job = item.job
        key = (job.accelerator, job.cards)
        if key not in sets:
            sets[key] = len(legal_card_sets(plan.nodes, *key))
        line = {
            "job_id": job.job_id,
            "experiment": job.experiment,
            **job.identity(),
            "measure": asdict(job.measure),
            "action": item.action.value,
            "reason": item.reason,
            "estimate_s": item.estimate_s,
            "card_sets": sets[key],
            "needs": list(item.needs),
        }
        lines.append(encode(line))
    return encode(head)[:-1] + ', "jobs": [\n' + ",\n".join(lines) + "\n]}"
