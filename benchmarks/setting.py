"""The conditions of a benchmark: its size, a directory to write in, the Pythons there are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.contender import ROOT, Contender, take_turns

Size = TypeVar("Size")
#: Turns with an interval of their median; for contenders whose turn takes a second or two.
MANY = 6
PROGRAMS = ROOT / "benchmarks" / "contenders"


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """Seconds of a benchmark on two quiet cores, in both sizes; ``quick`` is None where a small
    size says nothing."""

    whole: float
    quick: float | None

    def of(self, *, quick: bool) -> float:
        """Seconds in this size; 0 where it is left out."""
        return (self.quick or 0.0) if quick else self.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run of the benchmarks."""

    scratch: Path  # logs and whatever contenders write
    peers_python: Path | None  # of .venv-bench; None: what peers there are in our own environment
    optimum_python: Path | None = None  # of optimum-benchmark, which has libraries of its own
    smoke: bool = False  # as small as it goes: whether it works, not how fast
    quick: bool = False  # smaller, for a first look: fewer lines with wider spreads
    turns: int = 2
    say: Callable[[str], None] = print

    @property
    def peer(self) -> str:
        """The Python of the peers."""
        return str(self.peers_python or sys.executable)

    def sized(self, whole: Size, quick: Size, smoke: Size) -> Size:
        """The one of three sizes that this run has."""
        return smoke if self.smoke else quick if self.quick else whole

    def started(
        self,
        stack: contextlib.ExitStack,
        name: str,
        python: str,
        program: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> Contender:
        """A contender that starts now, beside others that do, and ends with ``stack``;
        ``environment`` adds to our own."""
        self.say(f"  starting {name}")
        command = [python, str(PROGRAMS / program), *map(str, arguments)]
        log = self.scratch / f"{name.replace('/', '-').replace(' ', '-')}.log"
        return stack.enter_context(Contender(name, command, log, environment))

    def turns_of(
        self,
        contenders: Sequence[Contender],
        *,
        warm_ups: int = 0,
        turns: int | None = None,
        fewer: Mapping[str, int] | None = None,
    ) -> Mapping[str, list[dict[str, Any]]]:
        """All take turns, one after the other; ``fewer`` says who takes fewer, and how many."""
        count = self.sized(turns or self.turns, min(turns or self.turns, 2), 1)
        warm_ups = 0 if self.smoke else warm_ups
        return take_turns(contenders, count, warm_ups=warm_ups, fewer=fewer)
