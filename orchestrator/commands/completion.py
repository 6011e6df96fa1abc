"""``nightgrid completion SHELL``: a script by which a shell completes what is typed."""

from __future__ import annotations

import argparse

from orchestrator.host import output

EPILOG = """\
examples:
  source <(nightgrid completion bash)        # for this shell
  nightgrid completion bash > ~/.local/share/bash-completion/completions/nightgrid
  nightgrid completion zsh > "${fpath[1]}/_nightgrid"
  nightgrid completion fish > ~/.config/fish/completions/nightgrid.fish

It completes commands, options, their choices, grid files, and names of runs in --results,
$NIGHTGRID_RESULTS or ./results. Make it anew after an update of Nightgrid.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from orchestrator.cli import full_parser
    from orchestrator.commands.completion_scripts import script

    output.emit(script(full_parser(), args.shell))
    return 0
