"""Commands before a night: ``init``, ``plan``, ``simulate``, ``schema``; they start nothing."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from rich.table import Table
from rich.text import Text

from orchestrator.cli import options as shared
from orchestrator.core.deadline import Deadline
from orchestrator.core.errors import GridError, Problem, StoreError
from orchestrator.core.measurement import Prediction
from orchestrator.core.plan import Action, Plan
from orchestrator.core.settings import FIELDS
from orchestrator.driver.answers import predictions_of
from orchestrator.driver.options import with_results_of
from orchestrator.driver.plan import forecast_of, grid_of, plan_grid
from orchestrator.grid.diagnostics import Rules
from orchestrator.grid.parser import parse_grid
from orchestrator.grid.schema import BATCH_SIZES, ONE_BATCH_SIZE, first_grid, grid_schema_text
from orchestrator.grid.vocabulary import called_otherwise
from orchestrator.planning.planner import estimator_for
from orchestrator.report.text import print_predictions
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.scheduler.simulator import Faults, SimulationResult, SimulationSettings, simulate
from orchestrator.store import files as run_files
from orchestrator.store.history import table_of
from orchestrator.store.schema import SCHEMA_VERSION, schema
from orchestrator.store.store import Store, existing_runs
from orchestrator.util import output
from orchestrator.watch.plan_text import aligned, deadline_lines, plan_json, print_plan
from workloads import registry
from workloads.base import BadConfiguration
from workloads.devices import DeviceSpec, of_accelerator, own_devices
from workloads.models.catalog import find_model
from workloads.models.precision import PRECISIONS, support, table
from workloads.rules import refusals


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid init --model tiny-chatglm3                            writes grid.yaml
      nightgrid init tune.yaml --model ./chatglm3-6b --dataset my.jsonl --workload finetuning
    """
    parser.add_argument(
        "file", nargs="?", type=Path, default=Path("grid.yaml"), help="(default: grid.yaml)"
    )
    parser.add_argument(
        "--model", required=True, help="an embedded model, a directory, or a hub id"
    )
    parser.add_argument("--dataset", help="an embedded dataset, a file, a directory, or a hub id")
    parser.add_argument(
        "--columns",
        metavar="MAPPING",
        help="the dataset's columns, such as 'prompt=question, completion=reply'",
    )
    parser.add_argument(
        "--workload",
        help="inference, finetuning, … (default: what runs the model; the file has the others)",
    )
    parser.add_argument("--accelerator", help="(default: what this machine has, else Gaudi)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    shared.add(parser, "--json")


def run_init(args: argparse.Namespace) -> int:
    """Write the file, once the grid in it is sound."""
    fitting = _fitting(args.model)
    device = _device(args.accelerator)
    workload = args.workload or _first_choice(fitting, device.name)
    workload = called_otherwise(workload, registry.WORKLOADS) or workload
    spec = registry.find_workload(workload)
    fields = {
        "workload": workload,
        "model": args.model,
        "dataset": args.dataset or spec.dataset or str(FIELDS["dataset"].default),
        "accelerator": device.accelerator,
    }
    if args.columns:
        fields["columns"] = args.columns
    engine = spec.default_engine
    precisions = [name for name in PRECISIONS if support(name, device.name, engine).supported]
    batch_sizes = BATCH_SIZES
    while True:
        text = first_grid(
            fields,
            precisions=precisions,
            axes=spec.first_axes or {"batch_size": batch_sizes},
            others=[name for name in fitting if name != workload],
            settings=spec.declared(spec.default_engine),
            file=str(args.file),
        )
        try:
            # Some precisions would be unsupported, such as integers for training.
            rules = Rules(refusals, {workload: spec})
            refused = {
                job.precision
                for job in parse_grid(text.encode(), str(args.file)).jobs()
                for refusal in rules.answers(job, device.name)
                if refusal.setting == "precision"
            }
            if refused and len(refused) < len(precisions):
                precisions = [name for name in precisions if name not in refused]
                continue
            break
        except GridError as error:  # some precisions or sizes are nothing for this workload
            sized = any("batch_size" in problem.steps for problem in error.problems)
            if sized and batch_sizes != ONE_BATCH_SIZE:
                batch_sizes = ONE_BATCH_SIZE
                continue
            places = {problem.steps[-1] for problem in error.problems if _of_a_precision(problem)}
            if not all(map(_of_a_precision, error.problems)) or len(places) == len(precisions):
                raise
            precisions = [name for place, name in enumerate(precisions) if place not in places]
    try:
        with args.file.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        already = f"{args.file} exists already; name another file, or give --force"
        raise StoreError(already) from None
    except OSError as error:
        raise StoreError(f"{args.file} cannot be written: {error}") from error
    return shared.print_answer(
        args,
        {"file": str(args.file), **fields, "precisions": precisions},
        f"wrote {args.file}: {workload} of {args.model} on {device.accelerator}",
        f"next: nightgrid plan {args.file}",
    )


def _of_a_precision(problem: Problem) -> bool:
    return problem.steps[-2:-1] == ("precision",) and isinstance(problem.steps[-1], int)


#: Workloads that a first grid proposes, the first that runs on the cards there are.
_FIRST = ("text-generation", "text-to-image", "text-encoding")


def _first_choice(fitting: Sequence[str], device: str) -> str:
    """The workload of a first grid: one that measures, with an engine for these cards."""
    order = sorted(fitting, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    for name in order:
        engines = registry.find_workload(name).engines
        if any(registry.ENGINES[engine].runs_on(device) for engine in engines):
            return name
    return order[0]


def _fitting(model: str) -> Sequence[str]:
    task = registry.task_of(find_model(model).checkpoint)
    own = [spec for spec in registry.WORKLOADS.values() if spec.tasks and not spec.implied]
    fitting = [spec.name for spec in own if task is None or task.name in spec.tasks]
    if not fitting:
        assert task is not None
        raise BadConfiguration(f"{model} is {task.title}, and no workload here runs such a model")
    return fitting


def _device(accelerator: str | None) -> DeviceSpec:
    """The named kind of card; else the one whose tool is on this machine, or the first of all."""
    own = own_devices()
    if accelerator:
        meant = (spec for spec in own if spec.answers_to(accelerator))
        return next(meant, None) or of_accelerator(accelerator)
    return next((spec for spec in own if spec.tool and shutil.which(spec.tool)), own[0])


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid plan grids/smoke.yaml --emulate 2x8           every job, and why some will not run
      nightgrid plan grids/smoke.yaml --address http://head:8265    on the cluster that is there
      nightgrid plan grids/smoke.yaml --json | jq .summary    for scripts
      nightgrid run grids/smoke.yaml --emulate 2x8            executes this very plan
    """
    shared.add_grid_arguments(parser)
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="plan for the cards of this cluster: http://HEAD:8265 (the dashboard, from anywhere) "
        "or HOST:6379 (on a machine of it); default: this machine's cards, else a server of each "
        "kind",
    )
    shared.add_deadline_arguments(parser)
    shared.add(parser, "--json")


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan."""
    plan, history = plan_grid(args.grid, shared.run_options(args, name=args.run_name))
    lines: list[str] = []
    forecast = None
    at = shared.ends_at(args)
    if at is not None:  # how far a run would come that starts now
        deadline = Deadline.of(at, now=time.time(), jobs=len(plan.jobs))
        forecast = forecast_of(plan, history, deadline)
        lines += deadline_lines(deadline, forecast)
    if args.json:
        output.emit_json(plan_json(plan, forecast) + "\n")
    else:
        print_plan(plan, sys.stdout, output.console() if sys.stdout.isatty() else None, lines)
    return 0


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      nightgrid predict grids/smoke.yaml                from its run, and all others on its devices
      nightgrid predict grids/smoke.yaml --runs monday  from its run, and one other
      nightgrid predict grids/smoke.yaml --runs         from its own run alone

    Measured cells inform the others of their workload and kind of card. The table goes to
    predictions.parquet in the run's directory, if there is one, and to its report.
    exit codes: 0; 4 rows cannot be read, or none informs this grid
    """
    shared.add_grid_arguments(parser)
    parser.add_argument(
        "--runs",
        metavar="RUN",
        nargs="*",
        help="earlier runs that inform it (default: all of the results directory)",
    )
    shared.add(parser, "--json")


def run_predict(args: argparse.Namespace) -> int:
    """Predict, write the table and print it."""
    options = shared.run_options(args, name=args.run_name)
    grid = grid_of(args.grid, options)
    plan, _ = plan_grid(grid, options)
    results = with_results_of(grid, options).results
    store = Store(results, options.name or grid.name)
    names = args.runs
    if names is None:
        names = existing_runs(results) if results.is_dir() else []
    others = [Store.existing(results, name) for name in names if name != store.run]
    predictions = predictions_of(plan, grid.search, store, others)
    if not predictions:
        raise StoreError(
            f"nothing to predict: no row in {results} informs an unmeasured cell of {grid.name}"
        )
    path = None
    if store.exists:
        path = store.write_file(run_files.PREDICTIONS, table_of(Prediction, predictions))
    if args.json:
        listed = [dataclasses.asdict(one) for one in predictions]
        output.say_json({"file": str(path or ""), "predictions": listed})
        return 0
    print_predictions(predictions, output.console(highlight=False))
    output.say(f"written: {path}" if path else f"not written: there is no run {store.run} yet")
    return 0


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid simulate grids/smoke.yaml --emulate 2x8                  how long the night would be
      nightgrid simulate grids/smoke.yaml --emulate 128x8 --faults 0.02  and with accidents
    """
    shared.add_grid_arguments(parser)
    parser.add_argument(
        "--faults",
        metavar="RATE",
        type=shared.number(float, 0, 1, "a number from 0 to 1"),
        default=0.0,
        help="share of attempts and worker starts that fail, 0 to 1 (default: 0)",
    )
    parser.add_argument(
        "--noise",
        metavar="SIGMA",
        type=shared.number(float, 0, 2, "a number from 0 to 2"),
        default=0.1,
        help="how far durations scatter around their estimates (default: 0.1)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="which history of accidents (default: 0)"
    )
    shared.add_deadline_arguments(parser)
    shared.add(parser, "--json")


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate the plan and print how it went."""
    plan, history = plan_grid(args.grid, shared.run_options(args, name=args.run_name))
    estimates = estimator_for(history, plan.nodes)
    cards = sum(len(node.cards) for node in plan.nodes)
    faults = Faults()
    if args.faults:  # all at this rate, and that share of the nodes lost once at a random time
        random = Random(args.seed)
        lasts = sum(one.estimate_s * one.job.cards for one in plan.jobs) / max(1, cards)
        losses = [random.uniform(0, lasts) for _ in plan.nodes if random.random() < args.faults]
        faults = Faults.at_rate(args.faults, node_losses=tuple(sorted(losses)))
    settings = SimulationSettings(seed=args.seed, noise=args.noise, faults=faults)
    began = time.perf_counter()
    how, at, now = ScheduleSettings(), shared.ends_at(args), time.time()
    if at is not None:
        deadline = Deadline.of(at, now=now, jobs=len(plan.jobs))
        how = replace(how, work_until=deadline.work_until - now, stop_s=deadline.stop_s)
    result = simulate(plan.jobs, plan.nodes, estimates, settings=settings, schedule_settings=how)
    took_s = time.perf_counter() - began
    counts = Counter(str(row.state) for row in result.rows)
    if args.json:
        names = [field.name for field in dataclasses.fields(result) if field.name != "rows"]
        about = {"grid": plan.grid_name, "nodes": len(plan.nodes), "cards": cards}
        fields = {name: getattr(result, name) for name in names}
        last = {"ratio": result.ratio, "simulated_in_s": took_s}
        output.say_json({**about, "counts": dict(counts), **fields, **last})
    else:
        _print_simulation(result, plan, counts, took_s)
    return 0


def _print_simulation(
    result: SimulationResult, plan: Plan, counts: Counter[str], took_s: float
) -> None:
    cards = sum(len(node.cards) for node in plan.nodes)
    console = output.console()
    table = Table(show_header=False, box=None, pad_edge=False)
    states = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
    for name, value in (
        ("jobs", f"{len(result.rows):,}  ({states})"),
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
    console.print(
        Text.assemble((plan.grid_name, "bold"), ", simulated: nothing was run or measured")
    )
    if known := sum(planned.action is Action.REUSE for planned in plan.jobs):
        console.print(
            f"{known:,} of {len(plan.jobs):,} jobs are measured already and left out, as a run "
            "would do; --force simulates them too"
        )
    console.print(table)


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """
    examples:
      nightgrid schema > grid.schema.json      for an editor that completes YAML
      nightgrid schema results                 every column of the result tables
      nightgrid schema precisions --json       what runs where
    """
    parser.add_argument(
        "of",
        metavar="{grid,results,precisions}",
        nargs="?",
        choices=("grid", "results", "precisions"),
        default="grid",
        help="grid: JSON Schema of grid files (default); results: columns of result tables; "
        "precisions: what each means on cpu, cuda and hpu, and what is unsupported",
    )
    shared.add(parser, "--json")


def run_schema(args: argparse.Namespace) -> int:
    """Print the schema."""
    if args.of == "grid":
        output.emit_json(grid_schema_text())
        return 0
    return _print_columns(args) if args.of == "results" else _print_precisions(args)


def _print_precisions(args: argparse.Namespace) -> int:
    lines = []
    for row in table():
        unsupported = "" if row["supported"] else "unsupported: "
        engine = f"engine {row['engine']}: " if row["engine"] else ""
        lines.append(
            f"{row['precision']:<5}  {row['device']:<5} {engine}{unsupported}{row['text']}"
        )
    return shared.print_answer(args, table(), *lines, indent=1)


def _print_columns(args: argparse.Namespace) -> int:
    columns = []
    for column in schema():
        about = {k.decode(): v.decode() for k, v in (column.metadata or {}).items()}
        named = {"column": column.name, "type": str(column.type), "unit": about.get("unit", "")}
        columns.append(named | {"meaning": about.get("description", "")})
    short = [re.sub(r"<.{24,}", "<…>", one["type"]) for one in columns]
    shown = {name: [one[name] for one in columns] for name in columns[0]} | {"type": short}
    lines = aligned([*shown.items()])
    lines += ["", f"Schema version {SCHEMA_VERSION}; docs/schema.md has the nested types."]
    return shared.print_answer(
        args, {"version": SCHEMA_VERSION, "columns": columns}, *lines, indent=1
    )
