"""``nightgrid completion SHELL``: a script for completion in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from orchestrator.util import output


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """examples:
      source <(nightgrid completion bash)        # for this shell
      nightgrid completion bash > ~/.local/share/bash-completion/completions/nightgrid
      nightgrid completion zsh > "${fpath[1]}/_nightgrid"
      nightgrid completion fish > ~/.config/fish/completions/nightgrid.fish

    It completes commands, options, their choices, grid files, and names of runs in --results,
    $NIGHTGRID_RESULTS or ./results. Make it anew after an update of Nightgrid.
    """
    parser.add_argument("shell", choices=SHELLS, help="which shell")


def run_completion(args: argparse.Namespace) -> int:
    """Print the script."""
    from orchestrator.cli.main import full_parser

    output.emit(script(full_parser(), args.shell))
    return 0


# Scripts are made once from the parsers, so a TAB starts no Python; a shell function reads names of
# runs from the results directory (--results, NIGHTGRID_RESULTS or ``./results``).

SHELLS = ("bash", "zsh", "fish")

#: Arguments that name a run, wherever they stand.
_RUN_DESTINATIONS = frozenset({"run_name", "run_names", "before", "after"})

_RUNS = {"bash": "_nightgrid_runs", "zsh": "_nightgrid_runs", "fish": "(_nightgrid_runs)"}

_PREAMBLES = {
    "bash": """\
_nightgrid_runs() {
  local directory="${NIGHTGRID_RESULTS:-results}" index path
  for ((index = 1; index < COMP_CWORD; index++)); do
    [[ ${COMP_WORDS[index]} == --results ]] && directory="${COMP_WORDS[index + 1]}"
  done
  for path in "$directory"/*/rows/; do
    [[ -d $path ]] || continue
    path="${path%/rows/}"
    path="${path##*/}"
    [[ $path == "$1"* ]] && printf '%s\\n' "$path"
  done
}
""",
    "zsh": """\
_nightgrid_runs() {
  local directory="${NIGHTGRID_RESULTS:-results}" index
  index=${words[(I)--results]}
  ((index)) && directory="${words[index + 1]}"
  local -a names
  names=("$directory"/*/rows(N/:h:t))
  compadd -a names
}
""",
    "fish": """\
function _nightgrid_runs
  set -l directory results
  set -q NIGHTGRID_RESULTS; and set directory $NIGHTGRID_RESULTS
  set -l words (commandline -opc)
  if set -l index (contains -i -- --results $words)
    set directory $words[(math $index + 1)]
  end
  for path in $directory/*/rows
    string replace -r '.*/([^/]+)/rows$' '$1' -- $path
  end
end
""",
}


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Completion script of a full parser for one of ``SHELLS``."""
    for action in _actions(parser):
        what = _completes_to(action)
        if what is not None:
            action.complete = what  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell, preamble=_PREAMBLES[shell]))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _completes_to(action: argparse.Action) -> object | None:
    if action.choices is not None or action.nargs == 0:
        return None
    if action.dest in _RUN_DESTINATIONS:
        return _RUNS
    if action.dest == "grid":
        return shtab.glob("*.yaml", "*.yml")
    if action.metavar == "DIR":
        return shtab.DIRECTORY
    return shtab.FILE if action.metavar in ("FILE", "OUT") or action.dest == "source" else None
