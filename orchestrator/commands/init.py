"""``nightgrid init [FILE] --model MODEL``: a commented first grid for one's model and data."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.host import output

if TYPE_CHECKING:
    from orchestrator.core.errors import Problem
    from orchestrator.grid.parser import Grid
    from workloads.devices import DeviceSpec
    from workloads.registry import WorkloadSpec

EPILOG = """\
examples:
  nightgrid init --model tiny-chatglm3                            writes grid.yaml
  nightgrid init tune.yaml --model ./chatglm3-6b --dataset my.jsonl --workload finetuning
"""

#: The work that most first grids ask for, where the model allows it.
_USUAL = "text-generation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid init`."""
    parser.add_argument(
        "file", nargs="?", type=Path, default=Path("grid.yaml"), help="(default: grid.yaml)"
    )
    parser.add_argument(
        "--model", required=True, help="an embedded model, a directory, or a hub id"
    )
    parser.add_argument("--dataset", help="an embedded dataset, a file, a directory, or a hub id")
    parser.add_argument(
        "--workload", help="(default: what runs the model; the file has the others)"
    )
    parser.add_argument("--accelerator", help="(default: what this machine has, else Gaudi)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Write the file, once the grid in it is found sound.

    Raises:
        GridError: the model, the dataset, the workload or the accelerator is none.
        WorkloadError: no workload runs such a model.
        StoreError: the file is there, or cannot be written.
    """
    from orchestrator.core.errors import GridError, StoreError
    from orchestrator.core.settings import FIELDS
    from orchestrator.grid.parser import parse_grid
    from orchestrator.grid.schema import BATCH_SIZES, ONE_BATCH_SIZE, first_grid
    from workloads.precision import PRECISIONS, support
    from workloads.registry import find_workload

    fitting = _fitting(args.model)
    workload = args.workload or (_USUAL if _USUAL in fitting else fitting[0])
    spec = find_workload(workload)
    device = _device(args.accelerator)
    fields = {
        "workload": workload,
        "model": args.model,
        "dataset": args.dataset or str(FIELDS["dataset"].default),
        "accelerator": device.accelerator,
    }
    precisions = [
        each for each in PRECISIONS if support(each, device.name, spec.default_engine).supported
    ]
    batch_sizes = BATCH_SIZES
    while True:
        text = first_grid(
            fields,
            precisions=precisions,
            batch_sizes=batch_sizes,
            others=[each for each in fitting if each != workload],
            settings=spec.declared(spec.default_engine),
            file=str(args.file),
        )
        try:
            grid = parse_grid(text.encode(), str(args.file))
            refused = _refused_precisions(grid, spec, device.name)
            if refused and len(refused) < len(precisions):
                precisions = [each for each in precisions if each not in refused]
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
            precisions = [each for place, each in enumerate(precisions) if place not in places]
    try:
        with args.file.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        already = f"{args.file} exists already; name another file, or give --force"
        raise StoreError(already) from None
    except OSError as error:
        raise StoreError(f"{args.file} cannot be written: {error}") from error
    if args.json:
        output.say_json({"file": str(args.file), **fields, "precisions": precisions})
        return 0
    output.say(f"wrote {args.file}: {workload} of {args.model} on {device.accelerator}")
    output.say(f"next: nightgrid plan {args.file}")
    return 0


def _refused_precisions(grid: Grid, spec: WorkloadSpec, device: str) -> set[str]:
    """Precisions whose jobs would be unsupported, such as integers for training."""
    from orchestrator.planning.rules import Rules
    from workloads.rules import refusals_by

    rules = Rules(refusals_by({spec.name: spec}))
    return {
        job.precision
        for job in grid.jobs()
        if any(each.setting == "precision" for each in rules.answers(job, device))
    }


def _of_a_precision(problem: Problem) -> bool:
    """Tell if a problem is one of a single value of the axis of precisions."""
    return problem.steps[-2:-1] == ("precision",) and isinstance(problem.steps[-1], int)


def _fitting(model: str) -> Sequence[str]:
    """The workloads that run a model, by name.

    Raises:
        WorkloadError: there is no such model, or nothing runs it.
    """
    from workloads.base import BadConfiguration
    from workloads.models.catalog import find_model
    from workloads.registry import WORKLOADS, task_of

    task = task_of(find_model(model).checkpoint)
    own = [spec for spec in WORKLOADS.values() if spec.tasks and not spec.implied]
    fitting = [spec.name for spec in own if task is None or task.name in spec.tasks]
    if not fitting:
        assert task is not None
        raise BadConfiguration(f"{model} is {task.title}, and no workload here runs such a model")
    return fitting


def _device(accelerator: str | None) -> DeviceSpec:
    """The named kind of card; else the one whose tool is on this machine, or the first of all.

    Raises:
        BadConfiguration: there is no such kind.
    """
    from workloads.devices import of_accelerator, own_devices

    if accelerator:
        meant = [spec for spec in own_devices() if spec.answers_to(accelerator)]
        return meant[0] if meant else of_accelerator(accelerator)
    here = [spec for spec in own_devices() if spec.tool and shutil.which(spec.tool)]
    return (here or own_devices())[0]
