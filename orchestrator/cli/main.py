"""The command line: ``nightgrid COMMAND`` or ``python -m orchestrator COMMAND``.

``COMMANDS`` names the module of each command; only that of the chosen one is imported. Of the
command NAME it has ``add_NAME_arguments``, whose docstring ends its help, and ``run_NAME``, which
returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from typing import Any

from orchestrator import __version__
from orchestrator.core import errors
from orchestrator.core.errors import NightgridError, StoreError
from orchestrator.util import output
from orchestrator.util.host import complete_environment
from workloads.base import WorkloadError

#: For each command its module in this package, and its line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("plan", "write a commented first grid for a model and data of one's own"),
    "plan": ("plan", "print every job of a grid, and why some will not run; starts nothing"),
    "simulate": ("plan", "play a grid on virtual cards, with faults if asked; runs nothing"),
    "predict": ("plan", "predict a grid's unmeasured cells from what is known, with intervals"),
    "run": ("run", "measure a grid on a Ray cluster, on this machine's cards, or on emulated ones"),
    "doctor": ("doctor", "examine a cluster or this machine: what a run would stumble over"),
    "submit": ("remote", "send a grid to a cluster as a Ray job and return at once"),
    "status": ("runs", "show a submitted job, or a run in a results directory"),
    "runs": ("runs", "list all runs, here or on a cluster: state, progress, time left"),
    "stop": ("remote", "end a run in an orderly way, here or on a cluster"),
    "fetch": ("remote", "bring a run's rows and report from a cluster to this machine"),
    "watch": ("runs", "show a run as a web page that updates itself, on this machine's loopback"),
    "logs": ("remote", "print or follow the log of a submitted job"),
    "report": ("results", "print a run's tables and write its HTML page"),
    "compare": ("results", "say what became slower or faster between two runs; fails CI if asked"),
    "query": ("results", "ask SQL over the rows, samples and prompts of all runs"),
    "repro": ("software", "write a folder that runs one job again: a script, versions, prompts"),
    "bisect": ("software", "find the version of a package in which a job became slower"),
    "export": ("results", "write results for Hugging Face datasets, MLflow, Weights & Biases"),
    "verify": ("models", "check that engines compute what stock transformers computes"),
    "describe": ("models", "print the parameters, layers and memory of a model"),
    "convert": ("models", "turn a ChatGLM3 checkpoint into one that transformers loads natively"),
    "protect": ("models", "encrypt a model's weight files, which a run opens with --key-file"),
    "dataset": ("models", "print the lengths of a dataset, and write a small sample of it"),
    "schema": (
        "plan",
        "print the JSON Schema of grid files, the result columns, or the precisions",
    ),
    "completion": ("completion", "print a script that completes commands in bash, zsh or fish"),
}

_EXAMPLES = """\
a first evening:
  nightgrid init --model DIRECTORY                  a commented grid for a model of one's own
  nightgrid plan grids/smoke.yaml                   what would be measured, and why some is not
  nightgrid run grids/smoke.yaml --emulate 2x8      measure it on emulated cards of this machine
  nightgrid report smoke                            tables, and results/smoke/report.html
on a cluster:
  nightgrid run GRID                                on a machine of it (RAY_ADDRESS)
  nightgrid submit GRID --address http://HEAD:8265  from elsewhere; then status, logs, stop, fetch
the morning after:
  nightgrid compare last-night smoke                what became slower or faster
  nightgrid query "select * from jobs"              SQL over all runs
"""

#: What the command prints by itself: a screen.
WELCOME = f"""\
Nightgrid {__version__} measures a grid of model settings on every card that is there, overnight.

{_EXAMPLES}
`nightgrid --help` lists all commands, `nightgrid COMMAND --help` the options of one."""

EPILOG = f"""\
{_EXAMPLES}
`nightgrid COMMAND --help` has each command's options and examples. docs/ is the guide:
docs/first-grid.md to begin with, docs/grids.md for every key of a grid file.

exit codes:
{errors.table()}
"""


#: Commands that go on if their output cannot be written.
WORKING = ("run", "watch")

#: Commands that hand on what follows `--` to another.
HANDING_ON = ("submit",)

#: Libraries that log, when imported, what no user can act on.
CHATTERERS = ("torchao", "torch.utils._pytree")


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Parser with only the command that the arguments begin with; else with all commands' names."""
    if arguments and arguments[0] in COMMANDS:
        return _parser(arguments[:1], filled_in=arguments[:1])
    return _parser(COMMANDS, filled_in=[word for word in arguments if word in COMMANDS])


def full_parser() -> argparse.ArgumentParser:
    """Parser with the options of every command."""
    return _parser(COMMANDS, filled_in=COMMANDS)


def _parser(names: Iterable[str], filled_in: Collection[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nightgrid",
        description="Benchmark a grid of model settings on every card of a Ray cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nightgrid {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        module, summary = COMMANDS[name]
        command = commands.add_parser(name, help=summary, description=summary)
        if name in filled_in:
            functions = importlib.import_module(f"orchestrator.cli.{module}")
            add_arguments = getattr(functions, f"add_{name}_arguments")
            add_arguments(command)
            command.epilog = inspect.getdoc(add_arguments)
            command.formatter_class = parser.formatter_class
            command.set_defaults(run=getattr(functions, f"run_{name}"), refuse=command.error)
    return parser


class _Parser(argparse.ArgumentParser):
    """Escapes unprintable characters when it quotes arguments."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            output.say(message, file or sys.stderr, end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors meant for the user are printed without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    working = bool(arguments) and arguments[0] in WORKING
    try:
        with output.standard_streams(working=working):
            return _main(arguments)
    except output.OutputFailed as error:
        if error.errno == errno.EPIPE:  # `nightgrid plan … | head` is fine
            return errors.OK
        output.say_aside(f"nightgrid: standard output cannot be written: {error.strerror}")
        return StoreError.exit_code


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line; ``handed_on`` has what follows the `--` of `nightgrid submit`. Raises
    SystemExit with the usage printed."""
    parser = build_parser(arguments)
    name = arguments[0]
    if not name.startswith("-") and name not in COMMANDS:
        close = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "`nightgrid --help` lists them"
        parser.error(f"there is no command {name!r}; {hint}")
    if any("\0" in word for word in arguments):  # from Python alone: no system passes one on
        parser.error("an argument has a null character")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, handed_on = arguments[:end], arguments[end + 1 :]
    for word in own:
        if word.startswith("--") and word.endswith("=--"):  # argparse makes a list of it
            parser.error(f"argument {word[:-3]}: expected one argument, not --")
    args, unknown = parser.parse_known_args(own if name in HANDING_ON else arguments)
    if unknown:  # with the usage of the command, not that of the program
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    args.typed, args.handed_on = arguments, tuple(handed_on)
    return args


def installed_by(distribution: str) -> set[str]:
    """Names of the packages that a distribution requires."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        requirements = metadata.requires(distribution) or []
        return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}
    return set()


def missing_package(error: ModuleNotFoundError) -> str:
    """The package that a failed import needs; "" if Nightgrid does not require it."""
    package = (error.name or "").partition(".")[0]
    return package if package in installed_by("nightgrid") else ""


def _main(arguments: list[str]) -> int:
    for name in CHATTERERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not arguments:
        output.say(WELCOME)
        return errors.OK
    complete_environment()
    try:
        args = parsed(arguments)
        return int(args.run(args))
    except NightgridError as error:
        text, code = str(error), error.exit_code
    except WorkloadError as error:
        text, code = str(error), 1
    except output.OutputFailed:
        raise
    except ModuleNotFoundError as error:  # of a workstation that has requirements-client.txt alone
        package = missing_package(error)
        if not package:
            raise
        text, code = f"this needs the package {package}: pip install {package}", 7
    except OSError as error:  # what no command expects: a directory without permission, say
        where = f"{error.filename}: " if error.filename else ""
        text, code = f"{where}{error.strerror or error}", StoreError.exit_code
    except KeyboardInterrupt:
        return errors.INTERRUPTED
    from orchestrator.util.redaction import redact

    # An error may quote an address with a password.
    output.say_aside(redact(f"nightgrid {arguments[0]}: {text}", os.environ))
    return code


if __name__ == "__main__":
    sys.exit(main())
