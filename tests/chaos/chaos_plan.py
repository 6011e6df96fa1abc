"""The plan of a night's faults: how often each kind, when, in what order. Pure, and by a seed.

Faults that take the whole cluster away ("heavy") cost a minute or two each, so they have slots of
their own, evenly spread, with time between them for what they hit to work again. All others have
slots between those.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault: what it does, and how often it is chosen beyond the least."""

    how: str  # for docs/rehearsal.md
    weight: int = 1
    heavy: bool = False  # the whole cluster is gone for a while
    harmless: bool = False  # no attempt may end because of it


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
    "kill the driver under its supervisor": Kind(
        how="`kill -9` of the process that `nightgrid run` watches: it starts the next one"
    ),
    "kill the driver on a full disk": Kind(
        how="the results' file system is full for 4 s, then `kill -9`; with room again, `nightgrid "
        "run --resume` makes rows of the outcomes that the nodes have kept"
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
NEED_SMALL_DISKS = ("fill the disk", "fill the log's disk", "kill the driver on a full disk")
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
    unknown = set(kinds) - KINDS.keys()
    if unknown or least < 0 or seconds <= 0 or every_s <= 0:
        raise ValueError(f"no such plan: {sorted(unknown)}, {least=}, {seconds=}, {every_s=}")
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


def counts(planned: Sequence[tuple[float, str]]) -> dict[str, int]:
    """Count the faults of each kind in a plan."""
    found: dict[str, int] = {}
    for _, kind in planned:
        found[kind] = found.get(kind, 0) + 1
    return found
