"""Options of a run, and those stored in its directory for resuming it."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import GridError
from orchestrator.store import files as run_files
from orchestrator.store.files import default_results_dir, directory_of, is_address
from workloads.models.hub import COMMIT
from workloads.util import files

if TYPE_CHECKING:
    from orchestrator.driver.supervisor import SupervisorLink
    from orchestrator.grid.parser import Grid

#: Longest start of a driver; if longer, a clock was set meanwhile.
MOST_BEFORE_S = 600.0
#: Options that select cards, stored for ``with_cards_of``.
_PLACE = ("emulate", "address", "in_process", "card_memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run: its cluster, its directory, and the jobs that are measured again."""

    results: Path = field(default_factory=default_results_dir)
    results_address: str = ""  # of an object store, to which a copy goes
    results_named: bool = False  # by the user; else a grid may name others
    log_to: tuple[str, ...] = ()  # trackers that get every row: NAME or NAME=DESTINATION
    name: str | None = None  # of the run; None: the grid's
    overrides: tuple[str, ...] = ()  # PATH=VALUE each, set in the grid's file
    emulate: str | None = None  # e.g. "2x8"; None: the Ray cluster, unless ``in_process``
    address: str | None = None  # of the Ray cluster; None: RAY_ADDRESS
    in_process: bool = False
    card_memory_bytes: int | None = None  # of an emulated card; None: its share of this machine
    retry_failed: bool = False
    retry_flagged: bool = False  # rows that something disturbed, at the end of the run
    keep_changed: bool = False  # rows whose model or dataset has other content now
    force: bool = False
    quiet: bool = False  # show no progress
    resume: bool = False  # go on with a run that exists, although its driver may only seem dead
    key_file: Path | None = None  # of the key to protected models, on every node
    remote_code: tuple[str, ...] = ()  # models that may run the Python code they come with
    ends_at: float | None = None  # when the report must be there, seconds since the epoch
    passports: bool = True  # whether each card's speed is taken before its first job
    priority: int = 0  # among the runs that wait for cards of one cluster; higher goes first
    wait_for_cards: float = 0.0  # seconds, for nodes that join the cluster late
    budget: bool = False  # ``ends_at`` was counted from the start: no clock that is set moves it
    supervisor: SupervisorLink | None = None  # of a driver that has a supervisor

    @property
    def restarted(self) -> bool:
        """Return whether this driver was started because the one before it died."""
        return self.supervisor is not None and self.supervisor.restarted

    def under_way_s(self) -> float:
        """Seconds since the command was typed, at most ``MOST_BEFORE_S``; 0 if unknown."""
        if self.supervisor is None or self.restarted:
            return 0.0
        return min(max(0.0, time.time() - self.supervisor.began), MOST_BEFORE_S)

    def report(self, **facts: object) -> None:
        """Report to the supervisor, if there is one."""
        if self.supervisor is not None:
            self.supervisor.report(**facts)


def with_results_of(grid: Grid, options: RunOptions) -> RunOptions:
    """``options`` with the grid's results unless they name some (relative to the working
    directory); raises GridError for the home directory of an unknown user."""
    if options.results_named or not grid.results:
        return options
    if is_address(grid.results):
        return replace(options, results_address=grid.results)
    try:
        results = directory_of(grid.results)
    except ValueError as error:
        hint = "write an absolute path, or ~/ for your own home directory"
        problem = grid.document.problem(("results",), str(error), hint)
        raise GridError([problem]) from None
    return replace(options, results=results, results_address="")


def kept_options(options: RunOptions, seed: int, cards: Mapping[str, int]) -> str:
    """Content of ``options.json``; ``seed`` orders replicates, ``cards`` counts cards by kind."""
    place = {name: getattr(options, name) for name in _PLACE}
    known = {"seed": seed, "cards": dict(cards), "submitter": run_files.submitter()}
    return json.dumps(place | known)


def submitter_of(run: Path) -> str:
    """The person to whom a run belongs; empty if unknown."""
    submitter = _content_of(run).get("submitter")
    return submitter if isinstance(submitter, str) else ""


def kinds_of(run: Path) -> tuple[str, ...]:
    """Kinds of card that a run had; empty if unknown."""
    cards = _content_of(run).get("cards")
    return tuple(map(str, cards)) if isinstance(cards, dict) else ()


def seed_of(run: Path) -> int:
    """Seed of a run, so that it resumes in the same order; a new one if it has none."""
    seed = _content_of(run).get("seed")
    return seed % 2**32 if type(seed) is int else secrets.randbits(32)


def commits_of(run: Path) -> dict[str, str]:
    """Commits of the hub's names when a run began (``Revisions``)."""
    commits = _content_of(run, run_files.REVISIONS).items()
    return {key: commit for key, commit in commits if COMMIT.fullmatch(str(commit))}


def _content_of(run: Path, name: str = run_files.OPTIONS) -> Mapping[str, Any]:
    """Content of a run's JSON file; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(files.read_text(run / name))
        if isinstance(content, dict):
            return content
    return {}


def with_cards_of(run: Path, options: RunOptions) -> RunOptions:
    """``options`` with the cards that the run had, unless they name some."""
    if any(getattr(options, name) for name in _PLACE):
        return options
    content = _content_of(run)
    size = content.get("card_memory_bytes")
    places = {name: content[name] for name in _PLACE[:2] if isinstance(content.get(name), str)}
    places |= {"card_memory_bytes": size} if type(size) is int and 0 < size < 2**50 else {}
    return replace(options, in_process=content.get("in_process") is True, **places)
