"""Notification that a run has ended, by POST to an address or on a command's stdin.

A failing hook is reported and never fails the run. Addresses are often secret: only their host is
shown, and ``@FILE`` keeps them off the command line, which other users can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from orchestrator.analysis.comparison import RunComparison
from orchestrator.analysis.rankings import Ranking
from orchestrator.analysis.summary import Summary
from orchestrator.core.errors import INTERRUPTED, NightgridError
from orchestrator.core.job import State
from orchestrator.report.all_runs import since_last, since_text
from orchestrator.report.run_report import read_summary
from orchestrator.report.wording import answers
from orchestrator.store.store import Store
from orchestrator.util.format import finite, one_line
from orchestrator.util.redaction import redact
from workloads.util import files
from workloads.util.processes import end_group

if TYPE_CHECKING:
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.run import RunOutcome
# Slack and Mattermost show the field ``text``; the others are for scripts (``docs/live.md``).

NOTICE_VERSION = 1
REASON_LENGTH = 500


class Ending(str, Enum):
    """End of `nightgrid run`."""

    FINISHED = "finished"  # every job has an answer
    UNANSWERED = "unanswered"  # every job was tried, and some failed, were lost or timed out
    STOPPED = "stopped"  # by a signal, a deadline or the circuit breaker; some jobs never ran
    FAILED = "failed"  # the run itself could not go on
    INTERRUPTED = "interrupted"  # its driver died, and another one goes on: it has not ended

    __str__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A run that has ended; ``summary`` is None if its rows cannot be read."""

    run: str
    ending: Ending
    reason: str
    exit_code: int
    host: str
    rows: str = ""  # directory of the rows
    report: str = ""  # path of the page, "" if there is none
    summary: Summary | None = None
    since: RunComparison | None = None  # against the last run that measured the same jobs

    def values(self) -> dict[str, Any]:
        """Return the JSON object."""
        summary, since = self.summary, self.since
        counts = {} if summary is None else {str(s): n for s, n in summary.counts.items()}
        return {
            "version": NOTICE_VERSION,
            "text": self.text(),
            "run": self.run,
            "state": str(self.ending),
            "reason": self.reason,
            "exit_code": self.exit_code,
            "jobs": sum(counts.values()),
            "counts": counts,
            "emulated": summary is not None and any(row.emulated for row in summary.rows),
            "wall_s": finite(summary.timeline.wall_s) if summary is not None else None,
            "best": [_best(ranking) for ranking in (summary.rankings if summary else ())],
            "since": since
            and {
                "run": since.before,
                "slower": len(since.slower),
                "faster": len(since.faster),
                "unchanged": sum(not change.significant for change in since.changes),
                "broken": len(since.broken),
                "overall_ratio": finite(since.overall),
            },
            "host": self.host,
            "rows": self.rows,
            "report": self.report,
        }

    def text(self) -> str:
        """Return a few lines for people, escaped for chat programs."""
        lines = [f"Nightgrid run {self.run} {_WORDS[self.ending]} on {self.host}."]
        if self.ending in (Ending.STOPPED, Ending.FAILED, Ending.INTERRUPTED):
            lines.append(one_line(self.reason, REASON_LENGTH))
        summary = self.summary
        if summary is not None:
            lines.append(", ".join(f"{count} {state}" for state, count in summary.counts.items()))
            lines += answers(summary)
            if self.since is not None:
                lines.append(since_text(self.since))
            if any(row.emulated for row in summary.rows):
                lines.append("Emulated cards: no figure is one of a real card.")
        if self.report:
            lines.append(f"Report: {self.report}")
        text = "\n".join(line for line in lines if line)
        # The three characters of Slack's links and mentions.
        return escape(text, quote=False)


_WORDS = {
    Ending.FINISHED: "has finished",
    Ending.UNANSWERED: "has finished; some jobs have no answer",
    Ending.STOPPED: "was stopped",
    Ending.FAILED: "has failed",
    Ending.INTERRUPTED: "was interrupted",
}


def _best(ranking: Ranking) -> dict[str, Any]:
    row, metrics = ranking.fastest, ranking.fastest.metrics
    return {
        "model": row.model,
        "workload": row.workload,
        "where": ranking.setting.where,
        "precision": row.precision,
        "batch_size": row.batch_size,
        "engine": row.engine,
        "throughput": finite(metrics.throughput),
        "throughput_unit": ranking.unit,
        "throughput_low": finite(metrics.throughput_low),
        "throughput_high": finite(metrics.throughput_high),
        "not_told_apart_from": len(ranking.tied),
        "verdict": ranking.verdict.value,
        "emulated": row.emulated,
        "job_id": row.job_id,
    }


#: Variable with the hook used when no --notify is given.
VARIABLE = "NIGHTGRID_NOTIFY"
WEB_TIMEOUT_S = 10.0
WEB_TRIES = 3
WEB_PAUSE_S = 2.0
COMMAND_TIMEOUT_S = 60.0
_SHOWN_OUTPUT = 300
_HOOK_FILE_BYTES = 2**16
_ADDRESS = re.compile(r"(https?://)(?:[^\s/?#'\"@]*@)?([^\s/?#'\"]+)[/?#][^\s'\"]*")


class HookFailed(Exception):
    """A hook could not be notified; the message names no secret."""


@dataclass(frozen=True, slots=True)
class WebHook:
    """An http(s) address that takes the notice as JSON."""

    url: str
    sleep: Callable[[float], None] = time.sleep

    @property
    def shown(self) -> str:
        """Scheme and host; the rest is often secret."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}/…"

    def tell(self, notice: Notice) -> None:
        """POST the notice, with retries if the server is busy or unreachable."""
        body, headers = json.dumps(notice.values()).encode(), {"Content-Type": "application/json"}
        opener = urllib.request.build_opener(_NoRedirect)
        for number in range(1, WEB_TRIES + 1):
            # A new one each time: a proxy changes the scheme of a request that it has had before.
            request = urllib.request.Request(self.url, body, headers, method="POST")
            try:
                opener.open(request, timeout=WEB_TIMEOUT_S).close()
                return
            except urllib.error.HTTPError as error:
                error.close()
                if number == WEB_TRIES or not (error.code == 429 or error.code >= 500):
                    raise HookFailed(f"it answers {error.code} {error.reason}") from None
            except (OSError, HTTPException) as error:
                if number == WEB_TRIES:
                    reason = getattr(error, "reason", None) or error
                    raise HookFailed(f"it cannot be reached: {_clean(reason)}") from None
            self.sleep(WEB_PAUSE_S * number)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: they would turn the POST into a GET to an unknown place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, which makes the redirect an error."""


@dataclass(frozen=True, slots=True)
class CommandHook:
    """A command that gets the notice as JSON on stdin, without a shell."""

    words: tuple[str, ...]
    timeout_s: float = COMMAND_TIMEOUT_S

    @property
    def shown(self) -> str:
        """The command's name; arguments may be secret."""
        return f"the command {Path(self.words[0]).name}"

    def tell(self, notice: Notice) -> None:
        """Run the command; kill it and its children after the timeout."""
        variables = {
            "NIGHTGRID_RUN": notice.run,
            "NIGHTGRID_STATE": str(notice.ending),
            "NIGHTGRID_EXIT_CODE": str(notice.exit_code),
            "NIGHTGRID_REPORT": notice.report,
        }
        try:
            process = subprocess.Popen(
                self.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                start_new_session=True,
            )
        except OSError as error:
            raise HookFailed(f"it cannot be started: {error.strerror or error}") from None
        try:
            output, _ = process.communicate(json.dumps(notice.values()).encode(), self.timeout_s)
        except subprocess.TimeoutExpired:
            raise HookFailed(f"it took longer than {self.timeout_s:g} s and was ended") from None
        finally:
            end_group(process)
        if process.returncode:
            end = _clean(output.decode("utf-8", "replace"))[-_SHOWN_OUTPUT:]
            raise HookFailed(f"it ended with {process.returncode}" + (f": {end}" if end else ""))


#: A receiver of notices; ``tell`` raises HookFailed if one was not delivered.
Hook: TypeAlias = WebHook | CommandHook


def hooks_of(texts: Sequence[str]) -> list[Hook]:
    """Return the hooks of ``--notify``, else of ``NIGHTGRID_NOTIFY``; see ``hook_of``."""
    given = list(texts) or ([os.environ[VARIABLE]] if os.environ.get(VARIABLE) else [])
    return [hook_of(text) for text in given]


def hook_of(text: str) -> Hook:
    """Parse a hook: ``https://…``, ``@FILE`` with either in it, or a command.

    Raises:
        NightgridError: it is neither an address nor a command, or its file cannot be read.
    """
    if text.startswith("@"):
        try:
            path = Path(text[1:]).expanduser()
            text = files.read_text(path, limit_bytes=_HOOK_FILE_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NightgridError(f"--notify {text}: the file cannot be read: {error}") from error
    if is_address(text):
        try:
            parts = urlsplit(text)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            sound = False
        if sound and text.isascii() and text.isprintable() and " " not in text:
            return WebHook(text)
        # Do not quote the address, which may hold a secret.
        raise NightgridError(
            "--notify: that is not an address; an address has the form https://HOST/PATH"
        )
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise NightgridError(f"--notify: the command is not understood: {error}") from error
    if not words:
        raise NightgridError("--notify: nothing is named; give https://… or a command")
    return CommandHook(words)


def is_address(text: str) -> bool:
    """Return whether a hook is an address, rather than a command or ``@FILE``."""
    return "://" in text.split(" ", 1)[0] and not text.startswith("@")


def concealed(command: str) -> str:
    """Return a command line with addresses cut to their host."""
    return _ADDRESS.sub(r"\1\2/…", command)


def _clean(message: object) -> str:
    """Return a message or output on one line, without secrets."""
    return " ".join(redact(str(message), os.environ).split())


def tell_all(hooks: Sequence[Hook], notice: Notice, say: Callable[[str], None]) -> None:
    """Notify all hooks and report each result. Raises nothing."""
    for hook in hooks:
        try:
            hook.tell(notice)
            say(f"notified {hook.shown}")
        except HookFailed as error:
            say(f"could not notify {hook.shown}: {error}")
        except Exception as error:  # a hook must not change a run's exit code
            say(f"could not notify {hook.shown}: {type(error).__name__}")


# ---------------------------------------------------------------- notices of runs


def notice_of_run(outcome: RunOutcome, page: Path | None, exit_code: int) -> Notice:
    """Return the notice of a run that ended or was stopped."""
    ending = Ending.FINISHED if outcome.answered else Ending.UNANSWERED
    if not outcome.result.finished or State.NOT_STARTED in outcome.states.values():
        ending = Ending.STOPPED
    return notice_of(outcome.store, ending, outcome.result.reason, exit_code, page)


def notice_of_failure(run: str, options: RunOptions, error: BaseException) -> Notice:
    """Return the notice of a run that failed, with its rows if they can be read."""
    exit_code = error.exit_code if isinstance(error, NightgridError) else 1
    if isinstance(error, KeyboardInterrupt):
        exit_code = INTERRUPTED
    reason = f"{type(error).__name__}: {_clean(error)}".rstrip(": ")
    return notice_of(Store(options.results, run), Ending.FAILED, reason, exit_code, None)


def notice_of(
    store: Store, ending: Ending, reason: str, exit_code: int, page: Path | None
) -> Notice:
    """Return the notice of an ended run, with its rows if they can be read."""
    summary = None
    with contextlib.suppress(Exception):  # unreadable rows may be why the run failed
        summary = read_summary(store, lean=True)[0]
    since = None
    with contextlib.suppress(Exception):  # a notice is sent whatever the other runs hold
        since = since_last(store)
    return Notice(
        run=store.run,
        since=since,
        ending=ending,
        reason=reason,
        exit_code=exit_code,
        host=socket.gethostname(),
        rows=str(store.tables_path.resolve()),
        report=str(page.resolve()) if page is not None else "",
        summary=summary,
    )
