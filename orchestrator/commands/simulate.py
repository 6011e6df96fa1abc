"""``nightgrid simulate FILE``: the night in a second, with or without accidents.

The grid's own plan is given to the schedule that would run it, on virtual nodes whose attempts
last as long as earlier rows (or a prior) suggest, scattered at random. No time passes, no row is
written. What it prints is how good the schedule is: the makespan beside a bound that none can beat.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_deadline_arguments, ends_at
from orchestrator.commands.plan import add_grid_arguments, plan_of
from orchestrator.host import output

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.core.plan import Plan
    from orchestrator.scheduler.simulator import Faults, SimulationResult

EPILOG = """\
examples:
  nightgrid simulate grids/smoke.yaml --emulate 2x8                   how long the night would be
  nightgrid simulate grids/smoke.yaml --emulate 128x8 --faults 0.02   and with accidents
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid simulate`."""
    add_grid_arguments(parser)
    parser.add_argument(
        "--faults",
        metavar="RATE",
        type=_rate,
        default=0.0,
        help="share of attempts and worker starts that fail, 0 to 1 (default: 0)",
    )
    parser.add_argument(
        "--noise",
        metavar="SIGMA",
        type=_sigma,
        default=0.1,
        help="how far durations scatter around their estimates (default: 0.1)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="which history of accidents (default: 0)"
    )
    add_deadline_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Simulate the plan and print how it went."""
    from orchestrator.core.deadline import Deadline
    from orchestrator.planning.planner import estimator_for
    from orchestrator.scheduler.scheduler import ScheduleSettings
    from orchestrator.scheduler.simulator import SimulationSettings, simulate

    plan, history = plan_of(args)
    estimates = estimator_for(history, plan.nodes)
    settings = SimulationSettings(
        seed=args.seed, noise=args.noise, faults=_faults(args.faults, args.seed, plan)
    )
    began = time.perf_counter()
    how, at, now = ScheduleSettings(), ends_at(args), time.time()
    if at is not None:
        deadline = Deadline.of(at, now=now, jobs=len(plan.jobs))
        how = replace(how, work_until=deadline.work_until - now, stop_s=deadline.stop_s)
    result = simulate(plan.jobs, plan.nodes, estimates, settings=settings, schedule_settings=how)
    took_s = time.perf_counter() - began
    if args.json:
        output.say_json(_told(result, plan, took_s))
    else:
        _print(result, plan, took_s, output.console())
    return 0


def _faults(rate: float, seed: int, plan: Plan) -> Faults:
    """Everything at this rate, and that share of the nodes lost once, at some time of the run."""
    from orchestrator.scheduler.simulator import Faults

    if not rate:
        return Faults()
    random = Random(seed)
    cards = sum(len(node.cards) for node in plan.nodes)
    lasts = sum(planned.estimate_s * planned.job.cards for planned in plan.jobs) / max(1, cards)
    losses = sorted(random.uniform(0, lasts) for _ in plan.nodes if random.random() < rate)
    return Faults.at_rate(rate, node_losses=tuple(losses))


def _told(result: SimulationResult, plan: Plan, took_s: float) -> dict[str, object]:
    """The result's own fields, with rows counted instead of listed."""
    return {
        "grid": plan.grid_name,
        "nodes": len(plan.nodes),
        "cards": sum(len(node.cards) for node in plan.nodes),
        "counts": dict(Counter(str(row.state) for row in result.rows)),
        **{
            field.name: getattr(result, field.name)
            for field in dataclasses.fields(result)
            if field.name != "rows"
        },
        "ratio": result.ratio,
        "simulated_in_s": took_s,
    }


def _print(result: SimulationResult, plan: Plan, took_s: float, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from orchestrator.core.plan import Action

    cards = sum(len(node.cards) for node in plan.nodes)
    table = Table(show_header=False, box=None, pad_edge=False)
    states = Counter(str(row.state) for row in result.rows)
    for name, value in (
        ("jobs", f"{len(result.rows):,}  ({_counted(states)})"),
        ("nodes, cards", f"{len(plan.nodes):,}, {cards:,}"),
        ("makespan", f"{result.makespan_s:,.1f} s"),
        ("lower bound", f"{result.bound_s:,.1f} s  (work over cards, or the longest job)"),
        ("makespan / bound", f"{result.ratio:.3f}"),
        ("cards busy", f"{result.busy_fraction:.1%}"),
        ("cards starting", f"{result.start_fraction:.1%}"),
        ("attempts, workers", f"{result.attempts:,}, {result.workers:,}"),
        ("faults", f"{result.faults:,}"),
        ("events, commands", f"{result.events:,}, {result.commands:,}, all checked"),
        ("simulated in", f"{took_s:.2f} s  ({result.events / max(took_s, 1e-9):,.0f} events/s)"),
    ):
        table.add_row(f"{name}  ", value)
    title = Text.assemble((plan.grid_name, "bold"), ", simulated: nothing was run or measured")
    console.print(title)
    known = sum(planned.action is Action.REUSE for planned in plan.jobs)
    if known:
        console.print(
            f"{known:,} of {len(plan.jobs):,} jobs are measured already and left out, as a run "
            "would do; --force simulates them too"
        )
    console.print(table)


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in states.most_common())


def _rate(text: str) -> float:
    return _between(text, 0.0, 1.0)


def _sigma(text: str) -> float:
    return _between(text, 0.0, 2.0)


def _between(text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
    return value
