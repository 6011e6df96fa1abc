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
    """One kind of fault: what it does, and how often it is chosen beyond the least."""

    how: str  # for docs/rehearsal.md
    weight: int = 1
    heavy: bool = False  # the whole cluster is gone for a while
    harmless: bool = False  # no attempt may end because of it


ON_A_FULL_DISK = "kill the driver on a full disk"
ALL_AT_ONCE = "kill all of a run at once"
KINDS: Mapping[str, Kind] = {
    "kill a worker": Kind(how="`kill -9` while its job runs", weight=8),
    "segfault a worker": Kind(how="SIGSEGV while its job runs", weight=4),
    "freeze a worker": Kind(
        how="SIGSTOP: it says nothing more and ignores everything but `kill -9`", weight=2
    ),
    "kill a node's agent": Kind(how="`kill -9` of the Ray actor above a node's workers", weight=2),
    "freeze a node's agent": Kind(how="SIGSTOP for 8 s", harmless=True),
    "kill a spawner": Kind(how="`kill -9` of the parent of a node's workers", weight=1),
    "kill a raylet": Kind(how="`kill -9`; the server is back 6 s later", weight=1),
    "freeze a raylet": Kind(how="SIGSTOP for 6 s, harmless, or for 30 s, when Ray gives it up"),
    "fill the disk": Kind(how="the results' small file system is full for 8 s", harmless=True),
    "fill the log's disk": Kind(
        how="the file system of the driver's output and the workers' logs is full for 8 s, "
        "while jobs print",
        harmless=True,
    ),
    "start a second driver": Kind(how="the same command again: it is refused", harmless=True),
    "open a copied run": Kind(
        how="a copy of the run's directory is run by another driver on the same cluster",
        harmless=True,
    ),
    "plant symlinks": Kind(
        how="links at the names that logs and temporary files get next lead to files outside",
        harmless=True,
    ),
    "corrupt the lock": Kind(
        how="`driver.lock` holds garbage while another driver comes: it is refused", harmless=True
    ),
    "corrupt the status": Kind(
        how="`status.json` holds garbage; `nightgrid status` is asked", harmless=True
    ),
    "step the clock": Kind(
        how="the driver's wall clock jumps by 2 h forth or back, and returns 20 s later "
        "(`clock_step.c`)",
        harmless=True,
    ),
    "freeze the driver": Kind(how="SIGSTOP for 20 s", harmless=True),
    "kill the driver": Kind(
        how="`kill -9`; one bit of one row's file flips; `nightgrid run --resume`"
    ),
    ON_A_FULL_DISK: Kind(
        how="the same when the results' file system has been full for 4 s; with room again, rows "
        "are made of the outcomes that the nodes have kept"
    ),
    ALL_AT_ONCE: Kind(
        how="`kill -9` of the driver, and within a second of the next one's start of that one, its "
        "supervisor and all agents, spawners and workers at once"
    ),
    "kill the driver under its supervisor": Kind(
        how="`kill -9` of the process that `nightgrid run` watches: it starts the next one"
    ),
    "kill the control store": Kind(
        how="`kill -9` of gcs_server; the head is started on the same port 6 s later", heavy=True
    ),
    "freeze the control store": Kind(
        how="SIGSTOP of gcs_server for 45 s", heavy=True, harmless=True
    ),
    "restart the head": Kind(how="SIGTERM to its `ray start`, and the same again", heavy=True),
    "restart the cluster": Kind(
        how="all of Ray is killed on all servers and started again", heavy=True
    ),
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
