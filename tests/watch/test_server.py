"""The watch server over real HTTP, and `nightgrid watch` as a user types it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Nightgrid
from measurement_factory import every_state
from odd_files import a_device, a_directory, a_pipe, a_sparse_file
from patience import patience
from run_directory import RunDirectory

from orchestrator.analysis.summary import summarize
from orchestrator.report.html import render
from orchestrator.watch.server import Access, Verdict, WatchServer
from orchestrator.watch.state import RunFeed

TOKEN = "a-token-of-this-test"


@contextmanager
def serving(directory: RunDirectory, token: str | None = None) -> Iterator[WatchServer]:
    feed = RunFeed(directory.store)
    with WatchServer("127.0.0.1", 0, store=directory.store, feed=feed, token=token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(
    server: WatchServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "results")
    directory.status()
    directory.append(0)
    (tmp_path / "secret").write_text("secret")
    return directory


@pytest.fixture
def server(directory: RunDirectory) -> Iterator[WatchServer]:
    with serving(directory) as server:
        yield server


@pytest.fixture
def guarded(directory: RunDirectory) -> Iterator[WatchServer]:
    with serving(directory, TOKEN) as server:
        yield server


def test_the_state_is_what_the_files_say_now(directory: RunDirectory, server: WatchServer) -> None:
    status, headers, body = get(server, "/state")
    assert status == 200 and headers["content-type"].startswith("application/json")
    assert json.loads(body)["row_count"] == 1
    directory.append(1)
    assert json.loads(get(server, "/state")[2])["row_count"] == 2
    status, headers, body = get(server, "/", "HEAD")
    assert status == 200 and body == b"" and int(headers["content-length"]) > 0


def test_every_answer_forbids_what_the_page_does_not_need(server: WatchServer) -> None:
    for path in ("/", "/watch.css", "/watch.js", "/state", "/nothing"):
        _, headers, _ = get(server, path)
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "frame-ancestors 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


PATHS = ("/../secret", "/%2e%2e/secret", "/..%2fsecret", "/report/../../secret", "/status.json",
         "/rows/", "//etc/passwd", "/watch.js/..", "/assets/watch.js")  # fmt: skip


def test_no_path_leads_to_a_file_and_nothing_can_be_changed(server: WatchServer) -> None:
    for path in PATHS:
        status, _, body = get(server, path)
        assert status == 404 and b"secret" not in body, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(server, "/state", method)[0] == 501


def test_who_is_refused_sees_nothing_of_the_run(server: WatchServer, guarded: WatchServer) -> None:
    status, _, body = get(server, "/", Host="evil.example")
    assert status == 421 and b"night" not in body
    for path in ("/", "/state", "/nothing", "/?token=wrong"):
        status, headers, body = get(guarded, path)
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert b"?token=..." in body and TOKEN.encode() not in body


def test_the_token_in_the_address_becomes_a_cookie(guarded: WatchServer) -> None:
    status, headers, _ = get(guarded, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    status, _, body = get(guarded, "/state", Cookie=cookie.partition(";")[0])
    assert status == 200 and json.loads(body)["run"] == "night"


def test_the_report_is_served_once_there_is_one(
    directory: RunDirectory, server: WatchServer
) -> None:
    assert get(server, "/report")[0] == 404
    assert json.loads(get(server, "/state")[2])["report"] is False
    directory.store.write_file("report.html", "<!DOCTYPE html><title>r</title>")
    status, headers, body = get(server, "/report")
    assert status == 200 and body.endswith(b"<title>r</title>")
    assert headers["content-type"].startswith("text/html")
    assert json.loads(get(server, "/state")[2])["report"] is True


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("put", "kind"),
    [
        (lambda path: path.symlink_to("../../secret"), b""),
        (a_pipe, b"a pipe"),
        (a_device, b"a device"),
        (a_directory, b"a directory"),
        (a_sparse_file, b"larger than 256 MiB"),
    ],
)
def test_a_report_that_is_no_file_of_its_own_is_neither_shown_nor_waited_for(
    directory: RunDirectory, server: WatchServer, put: Callable[[Path], object], kind: bytes
) -> None:
    """Others may write results too: a link would show them what only the watcher may read."""
    report = directory.store.path / "report.html"
    put(report)
    status, _, body = get(server, "/report")
    assert status == 404 and b"secret" not in body and kind in body
    assert not report.is_symlink() or report.read_text() == "secret"
    assert get(server, "/state")[0] == 200


def test_the_served_report_is_held_to_the_policy_that_it_states(
    directory: RunDirectory, server: WatchServer
) -> None:
    rows = every_state()
    written = render(summarize(rows), rows)
    (stated,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', written)
    for page in (written, "<script>alert(document.cookie)</script>"):
        directory.store.write_file("report.html", page)
        served = get(server, "/report")[1]["content-security-policy"]
        assert served.startswith(stated + "; ") and "default-src 'none'" in stated
        assert re.search(r"script-src 'sha256-[\w+/=]{44}';", served)
        assert "sandbox allow-scripts" in served and "allow-same-origin" not in served


# ---------------------------------------------------------------- who is let in

OPEN = Access(port=8600, token=None)
CLOSED = Access(port=8600, token="right-token")


OURS = ("localhost:8600", "127.0.0.1:8600", "127.0.0.1", "[::1]:9000", "LOCALHOST", "a.localhost:1")
FOREIGN = ("evil.example:8600", "127.0.0.1.evil.example", "localhost.evil.example", "",
           "10.0.0.7:8600", "0.0.0.0", "[fe80::1]")  # fmt: skip


def test_on_loopback_its_own_names_are_let_in_and_foreign_ones_that_point_here_are_not() -> None:
    """With any port, since a tunnel may end at another one. A stranger's page can make his name
    resolve to 127.0.0.1, but not change the header."""
    verdicts = {host: OPEN.verdict({"Host": host}, "") for host in (*OURS, *FOREIGN)}
    allowed = dict.fromkeys(OURS, Verdict.ALLOWED)
    assert verdicts == allowed | dict.fromkeys(FOREIGN, Verdict.WRONG_HOST)


@pytest.mark.parametrize(
    ("headers", "query", "verdict"),
    [
        ({}, "", Verdict.NO_TOKEN),
        ({}, "token=", Verdict.NO_TOKEN),
        ({}, "token=wrong", Verdict.NO_TOKEN),
        ({}, "token=right-tokenx", Verdict.NO_TOKEN),
        ({}, "token=right-token", Verdict.SIGNED_IN),
        ({"Cookie": "nightgrid-watch-8600=right-token"}, "", Verdict.ALLOWED),
        ({"Cookie": "nightgrid-watch-8600=wrong"}, "", Verdict.NO_TOKEN),
        ({"Cookie": "nightgrid-watch-8601=right-token"}, "", Verdict.NO_TOKEN),
        ({"Cookie": "a\x01=;;="}, "", Verdict.NO_TOKEN),
        ({"Authorization": "Bearer right-token"}, "", Verdict.ALLOWED),
        ({"Authorization": "Basic right-token"}, "", Verdict.NO_TOKEN),
        ({"Authorization": "Bearer \u00e9\udc80"}, "", Verdict.NO_TOKEN),
        ({"Host": "127.0.0.1"}, "", Verdict.NO_TOKEN),
    ],
)
def test_with_a_token_only_the_token_lets_in(
    headers: dict[str, str], query: str, verdict: Verdict
) -> None:
    assert CLOSED.verdict(headers, query) is verdict


ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def watching(
    results: Path, *options: str, end: signal.Signals = signal.SIGINT, deaf: bool = False
) -> Iterator[str]:
    """The command in a process of its own; the address that it prints. ``deaf`` to SIGINT is what
    a shell starts in the background."""
    command = [sys.executable, "-m", "orchestrator", "watch", "--results", str(results)]
    process = subprocess.Popen(
        [*command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if deaf else None,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stdout.read()
        yield found[0]
        if deaf:
            process.send_signal(signal.SIGINT)
            assert status_of(found[0]) == 200
        process.send_signal(end)
        assert process.wait(timeout=patience(20)) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def status_of(url: str, **headers: str) -> int:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=patience(10)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True])
def test_it_serves_the_newest_run_on_loopback_until_it_is_ended(tmp_path: Path, deaf: bool) -> None:
    """Also by SIGTERM, where a shell has SIGINT ignored, as `nightgrid watch &` in a script."""
    RunDirectory(tmp_path).status()
    with watching(tmp_path, end=signal.SIGTERM if deaf else signal.SIGINT, deaf=deaf) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert status_of(url) == 200 and status_of(f"{url}state") == 200
    port = int(url.rstrip("/").rpartition(":")[2])
    with socket.socket() as asking:
        assert asking.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_beyond_loopback_it_makes_a_token_and_refuses_without(tmp_path: Path) -> None:
    RunDirectory(tmp_path).status()
    with watching(tmp_path, "--host", "0.0.0.0") as url:
        found = re.fullmatch(r"http://[^:]+:(\d+)/\?token=([\w-]{32})", url)
        assert found, url
        port, token = found.groups()
        assert status_of(f"http://127.0.0.1:{port}/state") == 401
        bearer = f"Bearer {token}"
        assert status_of(f"http://127.0.0.1:{port}/state", Authorization=bearer) == 200


def test_what_cannot_be_served_is_refused(tmp_path: Path, nightgrid: Nightgrid) -> None:
    nightgrid("watch", "--results", tmp_path, code=4)
    RunDirectory(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = nightgrid("watch", "--results", tmp_path, "--port", port, code=1)
    assert "--port 0 takes a free port" in refused.err
    nightgrid("watch", "--port", "65536", code=2)
