"""The plan of a night: its grid and its faults, of each kind how often and when, by a seed. Pure.

Faults that take the whole cluster away ("heavy") cost a minute or two each, so they have slots of
their own, evenly spread, with time between them for what they hit to work again. All others have
slots between those.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault (docs/rehearsal.md has how), and how often it is chosen beyond the
    least."""

    weight: int = 1
    heavy: bool = False  # the whole cluster is gone for a while
    harmless: bool = False  # no attempt may end because of it


ON_A_FULL_DISK = "kill the driver on a full disk"
ALL_AT_ONCE = "kill all of a run at once"
KINDS: Mapping[str, Kind] = {
    "kill a worker": Kind(weight=8),
    "segfault a worker": Kind(weight=4),
    "freeze a worker": Kind(weight=2),
    "kill a node's agent": Kind(weight=2),
    "freeze a node's agent": Kind(harmless=True),
    "kill a spawner": Kind(),
    "kill a raylet": Kind(),
    "freeze a raylet": Kind(),
    "fill the disk": Kind(harmless=True),
    "fill the log's disk": Kind(harmless=True),
    "start a second driver": Kind(harmless=True),
    "open a copied run": Kind(harmless=True),
    "plant symlinks": Kind(harmless=True),
    "corrupt the lock": Kind(harmless=True),
    "corrupt the status": Kind(harmless=True),
    "step the clock": Kind(harmless=True),
    "freeze the driver": Kind(harmless=True),
    "kill the driver": Kind(),
    ON_A_FULL_DISK: Kind(),
    ALL_AT_ONCE: Kind(),
    "kill the driver under its supervisor": Kind(),
    "kill the control store": Kind(heavy=True),
    "freeze the control store": Kind(heavy=True, harmless=True),
    "restart the head": Kind(heavy=True),
    "restart the cluster": Kind(heavy=True),
}
#: Kinds for which the results, or the logs, lie on a small file system of their own.
NEED_SMALL_DISKS = ("fill the disk", "fill the log's disk", ON_A_FULL_DISK)
#: What happens while a driver is dead, and therefore as often as that does.
ROT = "let a row's file rot"


def plan(
    seed: int,
    seconds: float,
    every_s: float,
    *,
    least: int = 0,
    kinds: Collection[str] = tuple(KINDS),
) -> list[tuple[float, str]]:
    """The faults of a night with their times: one fault about every ``every_s`` seconds for so many
    seconds, and ``least`` of each of ``kinds`` at the least. Heavy kinds come exactly ``least``
    times."""
    random_ = random.Random(seed)
    ordered = [kind for kind in KINDS if kind in kinds]  # a set has no order of its own
    heavy = [kind for kind in ordered if KINDS[kind].heavy] * least
    light = [kind for kind in ordered if not KINDS[kind].heavy]
    chosen = light * least
    more = round(seconds / every_s) - len(heavy) - len(chosen)
    if light and more > 0:
        chosen += random_.choices(light, [KINDS[kind].weight for kind in light], k=more)
    random_.shuffle(heavy)
    random_.shuffle(chosen)
    return sorted(
        [*_spread(heavy, seconds, 0.1, random_), *_spread(chosen, seconds, 0.4, random_)],
        key=lambda each: each[0],
    )


def _spread(
    kinds: Sequence[str], seconds: float, jitter: float, random_: random.Random
) -> list[tuple[float, str]]:
    """Each kind in the middle of a slot of its own, give or take ``jitter`` of the slot."""
    slot = seconds / max(1, len(kinds))
    return [
        (slot * (number + 0.5 + random_.uniform(-jitter, jitter)), kind)
        for number, kind in enumerate(kinds)
    ]


def counts(kinds: Iterable[str]) -> dict[str, int]:
    """Count each kind, the most frequent first."""
    return dict(sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0])))


# ---------------------------------------------------------------- a fault as it was injected

#: All workers of the node die of these.
_OF_NODES = ("kill a raylet", "kill a spawner", "kill a node's agent", "freeze a raylet")


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault: its kind, its time and its target."""

    kind: str
    at: float  # seconds since the epoch
    until: float | None = None  # when its effect ended, if it lasted
    node: str = ""
    card: int | None = None
    pid: int | None = None  # of the worker process, or of the driver, that it hit
    offset_s: int = 0  # by which the driver's clock was wrong until then
    note: str = ""

    @property
    def hits_node(self) -> bool:
        """Return whether all workers of the node die of it."""
        return self.kind in _OF_NODES

    @property
    def ended_at(self) -> float:
        return self.at if self.until is None else self.until


def injected(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """The faults as plain values, for a file."""
    return [asdict(fault) for fault in faults]


# ---------------------------------------------------------------- the grid


def chaos_grid(*, seed: int, single: int, pairs: int, nodes: int, seconds: tuple[int, int]) -> str:
    """A grid file with ``single`` jobs of one card, ``pairs`` of two cards, ``nodes`` of eight,
    each working for some seconds in the given range; and 13 that do not work, of each kind. Those
    that hang come first: each takes two patient waits, in which the others are done."""
    random_ = random.Random(seed)

    def lengths(count: int) -> str:
        return f"[{', '.join(str(random_.randint(*seconds)) for _ in range(count))}]"

    def numbers(count: int, first: int) -> str:
        return f"[{', '.join(str(first + number) for number in range(count))}]"

    def working(name: str, count: int, cards: int, first: int) -> str:
        return f"""\
  - name: {name}
    cards: {cards}
    zip: {{seconds: {lengths(count)}, number: {numbers(count, first)}}}
"""

    return f"""\
name: night
defaults:
  workload: chaos
  model: tiny-chatglm3
  accelerator: HPU
  precision: fp32
  batch_size: 1
measure: {{repeat_flagged: 0, warmup: 0, min_repeats: 1, max_repeats: 1, time_limit_s: 3600}}
experiments:
  - name: poison
    axes:
      behaviour: [segfault, abort, allocate, hold-gil, hang, stubborn, raise]
{working("single", single, 1, 0)}\
{working("pairs", pairs, 2, 1000)}\
{working("whole nodes", nodes, 8, 2000)}\
  - name: too large at last
    behaviour: grow
    seconds: 2.0
    axes: {{batch_size: [1, 2, 4, 8, 16, 32]}}
"""


def jobs_of(*, single: int, pairs: int, nodes: int) -> int:
    return single + pairs + nodes + 7 + 6
