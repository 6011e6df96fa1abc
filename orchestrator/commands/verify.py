"""``nightgrid verify GRID``: do a grid's engines compute what stock transformers computes?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from orchestrator.commands.options import add_results_argument, add_set_argument
from orchestrator.core import errors
from orchestrator.grid.yaml import found
from orchestrator.host import output

if TYPE_CHECKING:
    from orchestrator.planning.verification import Verified

EPILOG = """\
The same prompts go through each engine on its card and through stock transformers on the CPU of
the same node. Tokens and logits are compared; the largest logit difference is in the row. In 16
bits texts may part at a near tie, where the reference hardly preferred its own token; that is
agreement. A quantised model is another one: its difference is shown, not judged.

examples:
  nightgrid verify grids/gaudi.yaml                      on the Ray cluster, before the first night
  nightgrid verify grids/smoke.yaml --emulate 1x1:HPU    the way, on an emulated card

exit codes:
  0    all that ran agrees;  14  some numbers do not, or a job gave none
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid verify`."""
    parser.add_argument("grid", metavar="FILE", type=found, help="the grid whose jobs are verified")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--emulate", metavar="SPEC", help="emulated cards, such as 1x1:HPU")
    where.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster to run on")
    where.add_argument("--in-process", action="store_true", help="without Ray: for debuggers")
    add_set_argument(parser)
    parser.add_argument("--prompts", type=int, default=4, help="of the dataset (default: 4)")
    parser.add_argument("--tokens", type=int, default=16, help="after each prompt (default: 16)")
    parser.add_argument(
        "--batch-size", type=int, default=4, help="in which the engine gets them (default: 4)"
    )
    parser.add_argument("--json", action="store_true", help="the answers as JSON")
    add_results_argument(parser, of_a_grid=True)
    parser.add_argument(
        "--run",
        metavar="NAME",
        dest="run_name",  # `args.run` is the command itself
        help="the run that is verified, with its commits of the hub (default: the grid's name)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the questions as jobs like any others, and print the answers."""
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.run import run_grid
    from orchestrator.grid.parser import grid_of_values
    from orchestrator.planning.verification import verified
    from orchestrator.report.run_report import read_summary

    asked = questions(args)
    options = RunOptions(
        results=args.results,
        results_address=args.results_address,
        results_named=args.results_named,
        emulate=args.emulate,
        address=args.address,
        in_process=args.in_process,
        force=True,  # a driver or a library may have changed, which no row knows
        quiet=args.json,
    )
    outcome = run_grid(grid_of_values(asked), options, output.say_aside)
    _, measurements = read_summary(outcome.store)
    newest = {row.job_id: row for row in measurements if row.final}
    answers = verified(list(newest.values()))
    if args.json:
        output.say_json([asdict(answer) for answer in answers], indent=2, ensure_ascii=False)
    else:
        output.say(_as_text(answers))
    wrong = not outcome.result.finished or any(answer.wrong for answer in answers)
    return errors.DISAGREEMENT if wrong else errors.OK


def questions(args: argparse.Namespace) -> dict[str, Any]:
    """The grid of the questions, as its file would say it. Names of the hub are at the commits
    which the grid's run was begun with: its rows are what is verified. Those that no run knows are
    said aside.

    Raises:
        GridError: the grid is refused, or has no job that generates text.
    """
    from orchestrator.core.errors import GridError, Problem
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.plan import commits_before, grid_of
    from orchestrator.planning.verification import verification_grid

    begun = RunOptions(
        results=args.results,
        results_named=args.results_named,
        name=args.run_name,
        overrides=tuple(args.overrides),
        resume=True,
    )
    source = grid_of(args.grid, begun)
    if unknown := source.commits.keys() - commits_before(args.grid, begun).keys():
        named = ", ".join(sorted(key.partition("/")[2] for key in unknown))
        output.say_aside(
            f"nightgrid verify: no run {begun.name or source.name!r} was begun with {named}, so "
            "what is verified is the commit of today; --run and --results name another run"
        )
    asked = verification_grid(
        begun.name or source.name,
        source.jobs(),
        open_engines=source.open_engines,
        prompts=args.prompts,
        output_tokens=args.tokens,
        batch_size=args.batch_size,
    )
    if asked is None:
        message = "no job of this grid generates text, so there is nothing to verify"
        problem = Problem(file=str(args.grid), line=None, column=None, path="", message=message)
        raise GridError([problem])
    if source.results:
        asked["results"] = source.results
    return asked


def _as_text(answers: list[Verified]) -> str:
    blocks = []
    for answer in answers:
        emulated = " (emulated)" if answer.emulated else ""
        settings = f", {answer.settings}" if answer.settings else ""
        lines = [
            f"{answer.model} {answer.precision} on {answer.accelerator}{emulated}, "
            f"engine {answer.engine}{settings}",
            f"  agrees: {answer.agrees}",
        ]
        if answer.largest_difference is not None:
            lines.append(
                f"  largest logit difference {answer.largest_difference:.3g}, where logits spread "
                f"by {answer.spread:.3g}; tokens compared: {answer.compared}"
            )
        if answer.note:
            lines.append(f"  {answer.note}")
        blocks.append("\n".join(lines))
    return "\n".join(blocks)
