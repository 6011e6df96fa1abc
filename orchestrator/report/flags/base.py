"""The seam of flags: a declaration, and a declaration that applies to one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.domain.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One reason for which the figure of a succeeded row may not stand beside others."""

    name: str  # as reports and queries write it, e.g. not_steady
    description: str  # one line, for legends
    #: The reason why it applies to a row, naming figure and limit; None: it does not apply, or the
    #: facts that would tell are not known. It sees succeeded rows only, and is asked for every
    #: row of a report, so it must be cheap.
    reason: Callable[[Measurement], str | None]
    #: The rows among which a flagged one ranks all the same, as text: it competes with those of
    #: the same text. None: it ranks nowhere.
    league: Callable[[Measurement], str] | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """A flag that applies to a row, with the reason."""

    flag: Flag
    reason: str

    def __str__(self) -> str:
        return f"{self.flag.name}: {self.reason}"
