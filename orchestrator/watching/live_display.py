"""The live display in a terminal: how far the run is, what each card does, what went wrong last.

It is drawn anew about once a second beneath the lines that scroll. A night on eight servers has
sixty-four cards and a terminal twenty-four lines, so what does not fit is folded, never cut off.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.core.job import State
from orchestrator.runtime.status import CardStatus, FailedAttempt, RunStatus
from orchestrator.watching.live_text import duration, left_text, printable, rate_texts, shortened

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

SHOWN_FAILURES = 3
#: Lines of the terminal that are left to what scrolls above the display.
SCROLLING_LINES = 5
#: One letter for each phase, where a card has no room for more.
_LETTERS = {
    "free": "·",
    "idle": "-",
    "starting": "s",
    "start": "s",
    "queued": "q",
    "load": "L",
    "compile": "C",
    "warmup": "W",
    "measure": "M",
    "finish": "f",
}
_LEGEND = "M measure, W warmup, L load, C compile, s start, q queued, f finish, - idle, · free"
_GOOD = {State.SUCCEEDED.value, "reused"}
_EXPECTED = {State.UNSUPPORTED.value, State.PRUNED.value, State.OUT_OF_MEMORY.value}


def render(status: RunStatus, *, height: int | None = None) -> RenderableType:
    """The live display: a bar, counts, rates, the cards, the last failures.

    Cards take a line each; where ``height`` lines do not hold them, a line a server, and where
    even these do not fit, the rest is counted.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(status.run, style="bold"),
        ProgressBar(total=max(1, status.total), completed=status.done, width=40),
        Text(_times(status)),
    )
    counts = Text(overflow="ellipsis", no_wrap=True)
    for state, count in sorted(status.counts.items()):
        counts.append(f"{count} {state}  ", style=_style(state))
    if status.emulated:
        counts.append("EMULATED CARDS", style="magenta")
    assigned = f"{status.assigned}/{len(status.cards)} cards assigned"
    rates = Text("   ".join([assigned, *rate_texts(status)]), overflow="ellipsis", no_wrap=True)
    failures = status.failures[:SHOWN_FAILURES]
    after: list[RenderableType] = [_failure_lines(failures, status.at)] if failures else []
    told = (
        ("WAITING", status.waiting),
        ("PAUSED", status.paused),
        ("TROUBLE", status.trouble),
        ("stopping", status.stopping),
    )
    for what, why in told:
        if why:
            text = f"{what}: {shortened(why)}"
            after.append(Text(text, style="yellow", overflow="ellipsis", no_wrap=True))
    room = None
    if height is not None:
        notes = sum(bool(why) for _, why in told)
        room = max(1, height - 3 - len(failures) - notes)
    return Group(bar, counts, rates, _card_lines(status.cards, room), *after)


def _card_lines(cards: Sequence[CardStatus], room: int | None) -> RenderableType:
    """The cards in at most ``room`` lines, heading included."""
    from rich.table import Table

    working = [card for card in cards if card.worker_id]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    if room is None or len(working) < room:
        _add_columns(table, "card", "phase", "for", "job")
        for card in working:
            style = "" if card.job else "dim"
            _add_row(
                table, card.card, card.phase, duration(card.phase_age_s), card.job, style=style
            )
        return table
    _add_columns(table, "server", "cards", "assigned", f"longest in its phase   ({_LEGEND})")
    servers: dict[str, list[CardStatus]] = {}
    for card in cards:
        servers.setdefault(card.card.rpartition("/")[0], []).append(card)
    shown = list(servers.items())
    if len(shown) >= room:
        shown = shown[: max(0, room - 2)]
    for name, group in shown:
        letters = "".join(_LETTERS.get(card.phase, "?") for card in group)
        at_work = [card for card in group if card.job]
        oldest = max(at_work, key=lambda card: card.phase_age_s, default=None)
        about = ""
        if oldest is not None:
            index = oldest.card.rpartition("/")[2]
            about = f"{index} {oldest.phase} {duration(oldest.phase_age_s)}  {oldest.job}"
        _add_row(table, name, letters, f"{len(at_work)}/{len(group)}", about)
    hidden = [card for _, group in list(servers.items())[len(shown) :] for card in group]
    if hidden:
        phases = Counter(card.phase for card in hidden)
        text = ", ".join(f"{count} {phase}" for phase, count in phases.most_common())
        _add_row(table, "…", "", "", f"{len(hidden)} more cards: {text}")
    return table


def _add_columns(table: Table, *headers: str) -> None:
    """Columns of which the last gives way where the terminal is narrow."""
    from rich.text import Text

    for header in headers[:-1]:
        table.add_column(header, no_wrap=True)
    table.add_column(Text(headers[-1], no_wrap=True, overflow="ellipsis"))


def _add_row(table: Table, *words: str, style: str = "") -> None:
    """A row of one line. A plain string would have its [brackets] taken for markup."""
    from rich.text import Text

    table.add_row(*(Text(word, no_wrap=True, overflow="ellipsis") for word in words), style=style)


def _failure_lines(failures: Sequence[FailedAttempt], now: float) -> RenderableType:
    """``FAILED 3m05s ago  LABEL  crash: why``, a line each; yellow: the job is tried again."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (None, 2, 3):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for failure in failures:
        again = "" if failure.final else ", tried again"
        table.add_row(
            Text(
                f"{failure.state} {duration(now - failure.at)} ago{again}",
                style=_style(failure.state) if failure.final else "yellow",
            ),
            Text(failure.job),
            Text(f"{failure.failure_class or 'failed'}: {shortened(failure.reason)}", style="dim"),
        )
    return table


def _times(status: RunStatus) -> str:
    left = ""
    if status.eta_s:
        left = f", {left_text(status.eta_s, status.eta_low_s, status.eta_high_s)} left"
    return f"{status.done}/{status.total}  {duration(status.elapsed_s)}{left}"


def _style(state: str) -> str:
    if state in _GOOD:
        return "green"
    return "yellow" if state in _EXPECTED else "red"


class TerminalView:
    """Lines scroll above a display that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        # Cropped, since a display that is higher than the terminal cannot be removed again.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="crop"
        )
        self._live.start()

    def line(self, text: str) -> None:
        """Print one event above the display."""
        from rich.text import Text

        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {printable(text)}"))

    def show(self, status: RunStatus) -> None:
        """Redraw."""
        height = max(SCROLLING_LINES, self._console.height - SCROLLING_LINES)
        self._live.update(render(status, height=height), refresh=True)

    def close(self) -> None:
        """Remove the display."""
        self._live.stop()
