"""Profiles of jobs that asked for one, for the page: where their time went, and their traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.measurement import Measurement
from orchestrator.results import paths

#: What a line about a profile says, of which detail of the row.
_ABOUT = (("", "profile"), ("copies: ", "profile_copies"), ("", "profile_launches"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The profile of one row."""

    row: Measurement
    operators: tuple[str, ...]  # the dearest first, each with its share and calls
    about: tuple[str, ...]
    trace: str  # name of the file beside the page; "": there is none


def profiles_of(rows: Sequence[Measurement]) -> tuple[Profiled, ...]:
    """The profiles in these rows, in their order."""
    return tuple(_profiled(row) for row in rows if "profile" in row.details)


def _profiled(row: Measurement) -> Profiled:
    told, name = row.details, paths.trace_of(row.attempt_id)
    kept = told.get("profile_trace_bytes", "").isdigit() and paths.is_trace(name)
    return Profiled(
        row=row,
        operators=tuple(filter(None, told.get("profile_operators", "").split("; "))),
        about=tuple(word + told[key] for word, key in _ABOUT if key in told),
        trace=name if kept else "",
    )
