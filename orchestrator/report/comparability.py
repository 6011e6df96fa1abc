"""Keys on which two rows of one job may differ: which differences forbid a comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.analysis.flags import Raised, barred, league_of
from orchestrator.core.job import Scalar
from orchestrator.core.measurement import Measurement
from orchestrator.report.grouping import scalar

#: Text of a row without flags.
NO_FLAGS = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A key on which two rows of one job may differ, and what then follows."""

    key: str
    effect: Literal["blocks", "warns"]
    why: str
    #: The value in a row with these flags; None: the row's field of this name.
    of: Callable[[Measurement, Sequence[Raised]], Scalar] | None = None
    forgivable: bool = True  # whether --allow KEY turns blocking into a warning
    only: str | None = None  # the one value that both rows must have; None: any, if it is one
    goes_with: str = ""  # a key that, where it is allowed, allows this one too

    def value(self, row: Measurement, raised: Sequence[Raised]) -> str:
        """The value of this key in a row with these flags, as text."""
        return _text(getattr(row, self.key) if self.of is None else self.of(row, raised))


def _versions(row: Measurement, _: Sequence[Raised]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(row.versions.items()))


def _text(value: Scalar) -> str:
    return "unknown" if value is None else scalar(value)


def _flags(_: Measurement, raised: Sequence[Raised]) -> str:
    return ", ".join(one.flag.name for one in raised) if barred(raised) else NO_FLAGS


#: With this key allowed, jobs are matched across accelerators, too.
DEVICE = "device"

#: docs/compare.md shows this table; a test holds the two together.
RULES: tuple[Rule, ...] = (
    Rule(
        key="emulated",
        effect="blocks",
        why="a processor's number is never a card's",
        forgivable=False,
    ),
    Rule(
        key="throughput_unit",
        effect="blocks",
        of=lambda row, _: row.metrics.throughput_unit,
        why="tokens and samples are not the same thing",
        forgivable=False,
    ),
    Rule(
        key=DEVICE,
        effect="blocks",
        of=lambda row, _: row.device_name,
        why="another card is another experiment",
    ),
    Rule(
        key="batch_size",
        effect="blocks",
        why="a search for the largest batch may find another one",
    ),
    Rule(
        key="flags",
        effect="blocks",
        of=_flags,
        why="a figure that was disturbed or cannot be true proves nothing",
        only=NO_FLAGS,
    ),
    Rule(
        key="league",
        effect="blocks",
        of=lambda row, raised: league_of(row, raised) or NO_FLAGS,
        why="some flagged rows compare with their like only",
    ),
    Rule(
        key="threads",
        effect="blocks",
        why="host threads set the speed on a processor and of data loading",
        goes_with=DEVICE,
    ),
    Rule(
        key="random_weights",
        effect="blocks",
        why="other weights may end texts at other places",
    ),
    Rule(
        key="synthetic_data",
        effect="blocks",
        why="other data has other lengths",
    ),
    Rule(
        key="precision_detail",
        effect="blocks",
        why="the same name of a precision meant another arithmetic",
        goes_with=DEVICE,
    ),
    Rule(
        key="niceness",
        effect="warns",
        why="a nicer process waits for others",
    ),
    Rule(
        key="driver",
        effect="warns",
        of=lambda row, _: row.driver_version,
        why="may be the very change that is asked about",
    ),
    Rule(
        key="versions",
        effect="warns",
        of=_versions,
        why="may be the very change that is asked about",
    ),
    Rule(
        key="git_commit",
        effect="warns",
        why="may be the very change that is asked about",
    ),
    Rule(
        key="nodes",
        effect="warns",
        of=lambda row, _: ", ".join(row.nodes) or None,
        why="servers of one kind still differ a little",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key on which the two rows differ."""

    key: str
    before: str
    after: str


def differences(
    before: Measurement,
    after: Measurement,
    allow: Collection[str] = frozenset(),
    raised: tuple[Sequence[Raised], Sequence[Raised]] = ((), ()),
) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
    """Differences between two rows of one job: those that forbid a comparison, and those that are
    only worth knowing.

    Args:
        before: the row of the first run.
        after: that of the second.
        allow: keys that warn instead of block.
        raised: the flags of both rows.
    """
    blocking: list[Difference] = []
    warning: list[Difference] = []
    for rule in RULES:
        old, new = rule.value(before, raised[0]), rule.value(after, raised[1])
        if old != new or (rule.only is not None and old != rule.only):
            forgiven = rule.forgivable and (rule.key in allow or rule.goes_with in allow)
            found = Difference(key=rule.key, before=old, after=new)
            (blocking if rule.effect == "blocks" and not forgiven else warning).append(found)
    if before.job_id != after.job_id and set(before.parameters) != set(after.parameters):
        old, new = _unknown_there(before, after), _unknown_there(after, before)
        warning.append(Difference(key="parameters", before=old, after=new))
    return tuple(blocking), tuple(warning)


def _unknown_there(row: Measurement, other: Measurement) -> str:
    """The parameters that only ``row`` knows, with their values."""
    names = sorted(set(row.parameters) - set(other.parameters))
    return ", ".join(f"{name}={row.parameters[name]}" for name in names) or "unknown"
