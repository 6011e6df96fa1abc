"""The web server of ``nightgrid watch``: five read-only addresses, and the page of a run's state.

Paths are looked up in a table, never turned into file names. Security headers keep foreign text in
a page from running or sending anything. The page is whole without its script, which fetches it
again and again and changes what has changed.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from orchestrator.analysis.summary import STATES
from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.report.html import asset, content_security_policy, environment
from orchestrator.store import files as run_files
from orchestrator.store.store import Store
from orchestrator.util.format import duration, number, plural, size
from orchestrator.watch.live import flags_text, left_text, shortened
from orchestrator.watch.state import RunFeed
from workloads.util import files

# On loopback, all users of this machine may read, but foreign web pages may not (DNS rebinding):
# only loopback names are accepted as ``Host``. Beyond, a token is required, then a cookie.

TOKEN = "token"


class Verdict(Enum):
    """Decision on a request: the status and the text of its answer."""

    ALLOWED = 200, ""
    SIGNED_IN = 303, ""  # the token was in the address: move it to a cookie
    NO_TOKEN = (
        401,
        "This page is protected. Open it with the address that `nightgrid watch` has printed, "
        "which ends in ?token=...\n",
    )
    WRONG_HOST = 421, "This server answers only to localhost, 127.0.0.1 and [::1].\n"


@dataclass(frozen=True, slots=True)
class Access:
    """The rule of one server; ``token`` is None on loopback."""

    port: int
    token: str | None

    @property
    def cookie_name(self) -> str:
        """Name per server, as all ports of a host share cookies."""
        return f"nightgrid-watch-{self.port}"

    def verdict(self, headers: Mapping[str, str], query: str) -> Verdict:
        """Decide on a request by its headers and query."""
        if self.token is None:
            host = is_loopback(host_of(headers.get("Host", "")))
            return Verdict.ALLOWED if host else Verdict.WRONG_HOST
        given = parse_qs(query).get(TOKEN, [])
        if given:
            return Verdict.SIGNED_IN if self._is_token(given[-1]) else Verdict.NO_TOKEN
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return Verdict.ALLOWED
        return Verdict.ALLOWED if self._is_token(self._in_cookie(headers)) else Verdict.NO_TOKEN

    def _is_token(self, given: str) -> bool:
        """Compare in constant time."""
        assert self.token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _in_cookie(self, headers: Mapping[str, str]) -> str:
        try:
            cookie = SimpleCookie(headers.get("Cookie", "")).get(self.cookie_name)
        except CookieError:
            return ""
        return cookie.value if cookie else ""


def host_of(header: str) -> str:
    """Return the name in a ``Host`` header without its port, which a tunnel may change."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def is_loopback(host: str) -> bool:
    """Return whether a name or address is loopback, without asking DNS."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address may hold the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: What a report is also held to: it may not be framed nor share this origin.
_FRAMED = "connect-src 'none'; frame-ancestors 'none'; sandbox allow-scripts allow-downloads"
_REPORT_BYTES = 256 * files.MIB


class WatchServer(ThreadingHTTPServer):
    """Server of one run, until ``shutdown``; raises OSError if the address is unavailable."""

    daemon_threads = True

    def __init__(
        self, host: str, port: int, *, store: Store, feed: RunFeed, token: str | None
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.access = Access(port=self.server_address[1], token=token)
        self.store = store
        self._feed = feed
        self._reading = threading.Lock()  # many viewers, one reader of files

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the host's name, which can take seconds and is not used."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def snapshot(self) -> bytes:
        """Return the state of the run as JSON."""
        with self._reading:
            return json.dumps(self._feed.snapshot(), allow_nan=False).encode()

    def page(self) -> bytes:
        """Return the page of the run's state."""
        with self._reading:
            return page(self._feed.snapshot(), self._feed.status)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore viewers that disconnect during an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "nightgrid"
    sys_version = ""
    timeout = 10  # for a viewer that sends nothing

    def do_GET(self) -> None:
        """Answer the request, if access is allowed."""
        address = urlsplit(self.path)
        # ``Message.get`` ignores case, unlike a plain mapping of headers.
        verdict = self.server.access.verdict(self.headers, address.query)  # type: ignore[arg-type]
        if verdict is Verdict.ALLOWED:
            self._page(address.path)
            return
        headers = {}
        if verdict is Verdict.NO_TOKEN:
            headers = {"WWW-Authenticate": "Bearer"}
        if verdict is Verdict.SIGNED_IN:
            access = self.server.access
            cookie = f"{access.cookie_name}={access.token}; HttpOnly; SameSite=Strict; Path=/"
            headers = {"Set-Cookie": cookie, "Location": "/"}
        status, text = verdict.value
        self._answer(status, "text/plain", text.encode(), headers)

    do_HEAD = do_GET

    def _page(self, path: str) -> None:
        server = self.server
        pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html", server.page),
            "/watch.css": ("text/css", lambda: (asset("page.css") + asset("watch.css")).encode()),
            "/watch.js": ("text/javascript", lambda: asset("watch.js").encode()),
            "/state": ("application/json", server.snapshot),
        }
        if path == "/report":
            self._report()
        elif path in pages:
            kind, body = pages[path]
            self._answer(200, kind, body())
        else:
            self._answer(404, "text/plain", b"There is nothing here.\n")

    def _report(self) -> None:
        """Send the run's page as last written.

        Its writer is untrusted: links are not followed, pipes not waited for, and only this
        version's scripts run, in a separate origin without the cookie.
        """
        path = self.server.store.path / run_files.REPORT
        try:
            body = files.read_bytes(path, limit_bytes=_REPORT_BYTES, follow=False)
        except FileNotFoundError:
            self._answer(404, "text/plain", b"This run has no report yet.\n")
            return
        except OSError as error:
            why = f"This run's {run_files.REPORT} cannot be shown: {error.strerror}.\n"
            self._answer(404, "text/plain", why.encode())
            return
        policy = f"{content_security_policy()}; {_FRAMED}"
        self._answer(200, "text/html", body, {"Content-Security-Policy": policy})

    def _answer(
        self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (_SECURITY | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: viewers poll every two seconds, and addresses may hold the token."""


# ---------------------------------------------------------------- the page

#: A live driver writes its status every second.
QUIET_AFTER_S = 10.0


def page(state: Mapping[str, Any], status: RunStatus | None) -> bytes:
    """Return the page of ``RunFeed.snapshot`` and ``RunFeed.status``."""
    servers: dict[str, list[CardStatus]] = {}
    for card in status.cards if status and not status.finished else ():
        servers.setdefault(card.card.rpartition("/")[0], []).append(card)
    names = dict.fromkeys([*map(str, reversed(STATES)), *state["states"]])
    counts = {name: count for name in names if (count := state["states"].get(name))}
    template = environment().get_template("watch.html.jinja")
    starts = accumulate(counts.values(), initial=0)
    text = template.render(
        state=state,
        status=status,
        heard=_heard(state, status),
        facts=list(_facts(status)) if status else [],
        bars=[(name, start, counts[name]) for name, start in zip(counts, starts, strict=False)],
        notes=list(_notes(state, status)),
        flags=flags_text(status) if status else "",
        servers=servers,
        sensors=_sensors,
        duration=duration,
        shortened=shortened,
    )
    return text.encode()


def _heard(state: Mapping[str, Any], status: RunStatus | None) -> tuple[str, str]:
    """Return the style and the text of what is known of the driver."""
    if status is None or status.finished:
        return "", ""
    if state["stale"]:
        return " lost", (
            "Its driver may be dead, or cannot reach this storage. The same nightgrid run command "
            "resumes the run."
        )
    if state["silent_s"] > QUIET_AFTER_S:
        return " old", f"No word from the driver for {duration(state['silent_s'])}."
    return "", "The driver is there."


def _facts(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    """Yield names, figures and notes of how far a run is."""
    yield "Jobs done", f"{status.done:,} of {status.total:,}", ""
    yield "Cards assigned", f"{status.assigned} of {len(status.cards)}", ""
    yield "Duration", duration(status.elapsed_s), ""
    if not status.finished and status.eta_s:
        left = left_text(status.eta_s, status.eta_low_s, status.eta_high_s)
        yield "Time left, estimated", left, ""
    for rate in status.rates:
        figure = f"{number(rate.per_s, 3)} {rate.unit}"
        yield "Of finished jobs", figure, f"while timed, {plural(rate.jobs, 'job')}"
    if status.jobs_per_h:
        yield "Pace", f"{number(status.jobs_per_h, 3)} jobs/h", ""
    if power := [card.power_w for card in status.cards if card.power_w is not None]:
        yield "Power", f"{number(sum(power), 3)} W", f"of {plural(len(power), 'card')}"


def _notes(state: Mapping[str, Any], status: RunStatus | None) -> Iterator[tuple[str, str]]:
    """Yield what to know before believing a number."""
    if status is not None and status.waiting:
        yield "Waiting for cards", status.waiting
    if status is not None and status.paused:
        yield "Paused: nothing new is started", status.paused
    if status is not None and status.trouble:
        yield "Trouble; what runs goes on", status.trouble
    if state["emulated"]:
        yield "Emulated cards", "No number here is one of a real card."
    if state["damaged"]:
        of_run = f"{plural(state['damaged'], 'file')} of this run could not be read"
        yield of_run, "Their rows are missing here."
    if state["reading"]:
        yield "The rows of this run are still being read", "Those shown are not all."
    for text in state["trouble"]:
        yield "Not all of the run could be read", text


def _sensors(card: CardStatus) -> str:
    readings = (
        (card.power_w, lambda watts: f"{number(watts, 3)} W"),
        (card.temperature_c, "{:.0f} °C".format),
        (card.utilization_percent, "{:.0f}% utilization".format),
        (card.memory_used_bytes, size),
    )
    return " · ".join(write(value) for value, write in readings if value is not None)
