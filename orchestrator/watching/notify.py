"""Notification that a run has ended: an address gets the notice by POST, a command on stdin.

A hook that fails never fails the run: by then the rows are safe, and the failure is said. The
address of a hook is often a secret in itself, so only its host is ever shown, and ``@FILE`` keeps
it off the command line, which others of the same machine and of the cluster's job list can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from orchestrator.core.errors import INTERRUPTED, NightgridError
from orchestrator.core.job import State
from orchestrator.watching.notice import Ending, Notice
from workloads import files

if TYPE_CHECKING:
    from orchestrator.driver.options import RunOptions
    from orchestrator.driver.run import RunOutcome
    from orchestrator.results.store import Store

#: Variable with the hooks that are used when no --notify is given.
VARIABLE = "NIGHTGRID_NOTIFY"
WEB_TIMEOUT_S = 10.0
WEB_TRIES = 3
WEB_PAUSE_S = 2.0
COMMAND_TIMEOUT_S = 60.0
_SHOWN_OUTPUT = 300
_HOOK_FILE_BYTES = 2**16
_ADDRESS = re.compile(r"(https?://)(?:[^\s/?#'\"@]*@)?([^\s/?#'\"]+)[/?#][^\s'\"]*")


class HookFailed(Exception):
    """A hook did not get its notice; the message names no secret."""


class Hook(Protocol):
    """A receiver of notices. ``shown`` names it without its secrets."""

    @property
    def shown(self) -> str:
        """The receiver, as the log names it."""

    def tell(self, notice: Notice) -> None:
        """Tell.

        Raises:
            HookFailed: it did not work.
        """


@dataclass(frozen=True, slots=True)
class WebHook:
    """An http(s) address that takes the notice as JSON."""

    url: str
    sleep: Callable[[float], None] = time.sleep

    @property
    def shown(self) -> str:
        """Scheme and host; the rest of such an address is often the secret."""
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}/…"

    def tell(self, notice: Notice) -> None:
        """POST it; once more where the other side is busy or cannot be reached."""
        body = json.dumps(notice.values()).encode()
        for number in range(1, WEB_TRIES + 1):
            try:
                self._post(body)
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

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(
            self.url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=WEB_TIMEOUT_S):
            pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Following one would turn the POST into a GET, and send it who knows where."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Leave it as the error that it is here."""


@dataclass(frozen=True, slots=True)
class CommandHook:
    """A command that gets the notice as JSON on its standard input. No shell is involved."""

    words: tuple[str, ...]
    timeout_s: float = COMMAND_TIMEOUT_S

    @property
    def shown(self) -> str:
        """The command's name; its arguments may hold a secret."""
        return f"the command {Path(self.words[0]).name}"

    def tell(self, notice: Notice) -> None:
        """Run it, and end it and its children when it takes too long."""
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            said = _clean(output.decode("utf-8", "replace"))[-_SHOWN_OUTPUT:]
            raise HookFailed(f"it ended with {process.returncode}" + (f": {said}" if said else ""))


def hooks_of(texts: Sequence[str]) -> list[Hook]:
    """The hooks of ``--notify``, else that of ``NIGHTGRID_NOTIFY``, if it is set.

    Raises:
        NightgridError: one is neither an address nor a command, or its file cannot be read.
    """
    given = list(texts) or ([os.environ[VARIABLE]] if os.environ.get(VARIABLE) else [])
    return [hook_of(text) for text in given]


def hook_of(text: str) -> Hook:
    """The hook that a text names: ``https://…``, ``@FILE`` with either in it, or a command.

    Raises:
        NightgridError: see ``hooks_of``.
    """
    if text.startswith("@"):
        try:
            path = Path(text[1:]).expanduser()
            text = files.read_text(path, limit_bytes=_HOOK_FILE_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NightgridError(f"--notify {text}: the file cannot be read: {error}") from error
    if is_address(text):
        return _web_hook(text)
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
    """A command line in which addresses show their host alone."""
    return _ADDRESS.sub(r"\1\2/…", command)


def _web_hook(url: str) -> WebHook:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii()
        sound = sound and parts.port != 0 and url.isprintable() and " " not in url
    except ValueError:
        sound = False
    if not sound:
        # Not the address itself: what is wrong with it may stand beside a secret.
        raise NightgridError(
            "--notify: that is not an address; an address has the form https://HOST/PATH"
        )
    return WebHook(url)


def _clean(said: object) -> str:
    """Put the message of an error or the output of a command on one line, without secrets."""
    from orchestrator.worker.redaction import redact

    return " ".join(redact(str(said), os.environ).split())


def tell_all(hooks: Sequence[Hook], notice: Notice, say: Callable[[str], None]) -> None:
    """Tell everybody, and say how that went. Raises nothing."""
    for hook in hooks:
        try:
            hook.tell(notice)
            say(f"notified {hook.shown}")
        except HookFailed as error:
            say(f"could not notify {hook.shown}: {error}")
        except Exception as error:  # a hook is no reason to lose a run's exit code
            say(f"could not notify {hook.shown}: {type(error).__name__}")


# ---------------------------------------------------------------- what there is to tell


def notice_of_run(outcome: RunOutcome, page: Path | None, exit_code: int) -> Notice:
    """Notice of a run that ended by itself or was stopped."""
    ending = Ending.FINISHED if outcome.answered else Ending.UNANSWERED
    if not outcome.result.finished or State.NOT_STARTED in outcome.states.values():
        ending = Ending.STOPPED
    return _notice(outcome.store, ending, outcome.result.reason, exit_code, page)


def notice_of_failure(run: str, options: RunOptions, error: BaseException) -> Notice:
    """Notice of a run that could not go on, with its rows if they can be read."""
    from orchestrator.results.store import Store

    exit_code = error.exit_code if isinstance(error, NightgridError) else 1
    if isinstance(error, KeyboardInterrupt):
        exit_code = INTERRUPTED
    reason = f"{type(error).__name__}: {_clean(error)}".rstrip(": ")
    return _notice(Store.open(options.results, run), Ending.FAILED, reason, exit_code, None)


def notice_of_death(
    store: Store, ending: Ending, reason: str, exit_code: int, page: Path | None
) -> Notice:
    """Notice of a run whose driver died without a message, sent by its supervisor."""
    return _notice(store, ending, reason, exit_code, page)


def _notice(store: Store, ending: Ending, reason: str, exit_code: int, page: Path | None) -> Notice:
    from orchestrator.report.all_runs import since_last
    from orchestrator.report.run_report import read_summary

    summary = None
    with contextlib.suppress(Exception):  # the rows may be what the run failed of
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
