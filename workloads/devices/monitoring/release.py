"""Decide when a card is free to be taken, without asking it. Pure.

A process that was killed is gone before its card's memory is: the driver gives that back a moment
later. And the list of a card's processes is not to be relied upon: in a container it has only the
container's own, in some virtual machines it is always empty. So memory in use speaks as well, in
comparison with what the card had in use when it was idle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workloads.devices.monitoring.telemetry import Holder

_MIB = 2**20
#: A card with more in use is not idle, whoever asks first. Idle cards have: Gaudi 512 MiB, Gaudi2
#: 768, Gaudi3 672, an H100 about 520 as its driver's own. The smallest job on record had 3,219 MiB,
#: a bare CUDA context takes 300 to 600.
IDLE_MEMORY_BYTES = 1536 * _MIB
#: By so much the memory of an idle card may differ from one time to the other.
SLACK_BYTES = 256 * _MIB
#: Memory that falls by less between two looks does not fall.
_FALLS_BY_BYTES = 16 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """Processes and memory on a card, as its vendor's tools tell from outside."""

    holders: tuple[Holder, ...] = ()  # other processes; empty also where nobody can list them
    used_bytes: int | None = None  # memory in use, the driver's own included; None: unknown
    reserved_bytes: int = 0  # of that the driver's own, as far as it is told apart
    display: bool = False  # it draws pictures, too, and nobody knows for how much memory

    @property
    def taken_bytes(self) -> int | None:
        """Memory in use by anything but the driver."""
        return None if self.used_bytes is None else max(0, self.used_bytes - self.reserved_bytes)


def idle_memory_bytes(use: CardUse) -> int | None:
    """Memory that an idle card has in use; None if it is not idle now, or nobody knows."""
    taken = use.taken_bytes
    if use.holders or taken is None or (taken > IDLE_MEMORY_BYTES and not use.display):
        return None
    return taken


def occupation(card_index: int, use: CardUse, idle_bytes: int | None = None) -> str | None:
    """Reason why no process should take a card now; None where it is free or nobody can tell.

    Args:
        card_index: as messages call it.
        use: what the card says now.
        idle_bytes: what ``idle_memory_bytes`` gave when the card was idle; None if it never was.
    """
    if use.holders:
        return f"card {card_index} is held by {', '.join(map(str, use.holders))}"
    taken = use.taken_bytes
    if taken is None or taken <= _limit_bytes(use, idle_bytes):
        return None
    if idle_bytes is None:
        compared = f"an idle one less than {IDLE_MEMORY_BYTES // _MIB}"
    else:
        compared = f"{idle_bytes // _MIB} when it was idle"
    return (
        f"card {card_index} has {taken // _MIB} MiB in use ({compared}) by a process that is not "
        "seen from here"
    )


def _limit_bytes(use: CardUse, idle_bytes: int | None) -> float:
    """The most that a free card has in use."""
    if idle_bytes is not None:
        return idle_bytes + SLACK_BYTES
    return float("inf") if use.display else IDLE_MEMORY_BYTES


@dataclass(slots=True, kw_only=True)
class Waiting:
    """Waiting for a card to be free: how long is enough. Memory that falls is being given back, and
    is waited for; what is held stays held, and is given up after ``patience_s``."""

    card_index: int
    idle_bytes: int | None = None
    patience_s: float = 30.0  # with memory and processes that stay as they are
    longest_s: float = 300.0
    _began: float | None = None
    _deadline: float = 0.0
    _least_bytes: int | None = field(default=None)
    _first_bytes: int | None = field(default=None)

    def reason(self, now: float, use: CardUse | None) -> str | None:
        """Reason to go on waiting; None when the card may be taken. ``now`` is a monotonic time."""
        if use is None or (why := occupation(self.card_index, use, self.idle_bytes)) is None:
            return None
        taken = use.taken_bytes
        if self._began is None:
            self._began, self._deadline = now, now + self.patience_s
            self._first_bytes = self._least_bytes = taken
        elif taken is not None:
            if self._least_bytes is not None and taken <= self._least_bytes - _FALLS_BY_BYTES:
                self._deadline = now + self.patience_s
            if self._least_bytes is None or taken <= self._least_bytes - _FALLS_BY_BYTES:
                self._least_bytes = taken
        return why

    def is_over(self, now: float) -> bool:
        """Tell if the wait has been long enough."""
        if self._began is None:
            return False
        return now >= min(self._deadline, self._began + self.longest_s)

    def told(self, now: float) -> str:
        """Say how long the wait was, and what the memory did."""
        if self._began is None:
            return ""
        text = f"after {now - self._began:.0f} s"
        first, least = self._first_bytes, self._least_bytes
        if first is not None and least is not None and least < first:
            text += f", in which its memory fell from {first // _MIB} to {least // _MIB} MiB"
        return text
