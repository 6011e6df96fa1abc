"""Telling that a run has ended: a real local web server, real commands, and never a lost run."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_workload
from command_line import Nightgrid
from example_grids import GRID
from measurements import row

from orchestrator.analysis.summary import summarize
from orchestrator.core.errors import NightgridError
from orchestrator.core.job import State
from orchestrator.watch.notify import (
    CommandHook,
    Ending,
    HookFailed,
    Notice,
    WebHook,
    concealed,
    hook_of,
    hooks_of,
    tell_all,
)

SECRET = "T0/B1/very-secret"
NOTICE = Notice(
    run="night",
    ending=Ending.FINISHED,
    reason="every job has ended",
    exit_code=0,
    host="head",
    rows="/results/night/rows",
    report="/results/night/report.html",
)


@dataclass
class Receiver:
    port: int = 0
    answers: list[int] = field(default_factory=lambda: [200])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/{SECRET}?key=also-secret"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    kept = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.requests.append((self.command, self.path, self.headers["Content-Type"]))
            kept.bodies.append(json.loads(body))
            answer = kept.answers.pop(0) if len(kept.answers) > 1 else kept.answers[0]
            self.send_response(answer)
            if answer == 302:
                self.send_header("Location", f"http://127.0.0.1:{kept.port}/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield kept
        server.shutdown()
        thread.join()


def said(hook: Any, notice: Notice = NOTICE) -> str:
    lines: list[str] = []
    tell_all([hook], notice, lines.append)
    return "\n".join(lines)


# ---------------------------------------------------------------- an address


def test_a_busy_receiver_is_asked_again(receiver: Receiver) -> None:
    receiver.answers = [503, 429, 200]
    pauses: list[float] = []
    WebHook(receiver.url, sleep=pauses.append).tell(NOTICE)
    assert len(receiver.bodies) == 3 and pauses == [2.0, 4.0]


def test_each_try_through_a_proxy_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = []

    def refused(_: object, request: urllib.request.Request, **__: object) -> None:
        schemes.append(request.type)
        request.set_proxy("127.0.0.1:3128", "http")  # as ``ProxyHandler`` does
        raise OSError("the proxy is busy")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refused)
    said(WebHook("https://hooks.example.com/secret", sleep=lambda _: None))
    assert schemes == ["https"] * 3


@pytest.mark.parametrize(("answer", "tries"), [(404, 1), (302, 1), (500, 3)])
def test_a_refusal_is_said_without_the_secret(receiver: Receiver, answer: int, tries: int) -> None:
    receiver.answers = [answer]
    text = said(WebHook(receiver.url, sleep=lambda _: None))
    assert f"could not notify http://127.0.0.1:{receiver.port}/…: it answers {answer}" in text
    assert "secret" not in text
    assert len(receiver.bodies) == tries
    assert not any(path == "/elsewhere" for _, path, _ in receiver.requests)


def test_nobody_there_is_said() -> None:
    text = said(WebHook("http://127.0.0.1:9/x/secret", sleep=lambda _: None))
    assert "cannot be reached" in text and "secret" not in text


@pytest.mark.parametrize(
    "url",
    ["ftp://host/x", "https://", "http:///x", "https://host:x/secret", "https://h/a\nb", "://x"],
)
def test_what_is_no_address_is_refused_before_anything_starts(url: str) -> None:
    """And the message does not repeat it: a secret may stand beside what is wrong."""
    with pytest.raises(NightgridError, match="https://HOST/PATH") as error:
        hook_of(url)
    assert "secret" not in str(error.value)


# ---------------------------------------------------------------- a command


def test_a_command_gets_the_notice_on_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NIGHTGRID_TURNS", raising=False)  # which all tests have
    out = tmp_path / "out.json"
    script = (
        "import json, os, sys; json.dump([json.load(sys.stdin),"
        " {n: v for n, v in os.environ.items() if n.startswith('NIGHTGRID_')}],"
        f" open({str(out)!r}, 'w'))"
    )
    hook = CommandHook((sys.executable, "-c", script))
    assert said(hook) == f"notified the command {Path(sys.executable).name}"
    values, variables = json.loads(out.read_text())
    assert values == NOTICE.values()
    assert variables == {
        "NIGHTGRID_RUN": "night",
        "NIGHTGRID_STATE": "finished",
        "NIGHTGRID_EXIT_CODE": "0",
        "NIGHTGRID_REPORT": "/results/night/report.html",
    }


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("sh", "-c", "echo no such channel; exit 3"), "it ended with 3: no such channel"),
        (("/no/such/program",), "it cannot be started"),
        (("sh", "-c", "exec <&-; exit 0"), ""),  # one that does not read what it is sent is fine
    ],
)
def test_a_command_that_fails_is_said(words: tuple[str, ...], reason: str) -> None:
    text = said(CommandHook(words))
    assert reason in text and text.startswith("could not notify" if reason else "notified")


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hook = CommandHook(("sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"), timeout_s=0.5)
    with pytest.raises(HookFailed, match=r"longer than 0\.5 s"):
        hook.tell(NOTICE)
    child = int(pid_file.read_text())
    for _ in range(100):
        with contextlib.suppress(OSError):  # it has gone
            if Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
                time.sleep(0.05)
                continue
        return
    os.kill(child, signal.SIGKILL)
    pytest.fail("the command's child lives on")


def test_a_hook_can_stand_in_a_file_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hook"
    file.write_text("https://hooks.example.com/x\n")
    assert hook_of(f"@{file}") == WebHook("https://hooks.example.com/x")
    assert hooks_of([]) == []
    monkeypatch.setenv("NIGHTGRID_NOTIFY", f"@{file}")
    assert hooks_of([]) == [WebHook("https://hooks.example.com/x")]
    assert hooks_of(["mail -s 'a b' me"]) == [CommandHook(("mail", "-s", "a b", "me"))]
    for bad in ("", "'unclosed", f"@{tmp_path / 'none'}"):
        with pytest.raises(NightgridError, match="--notify"):
            hook_of(bad)


def test_a_command_line_is_shown_without_the_secret_of_an_address() -> None:
    line = "python -m orchestrator run g.yaml --notify https://u:p@hooks.example.com/T0/B1 --force"
    assert concealed(line) == line.replace("u:p@hooks.example.com/T0/B1", "hooks.example.com/…")
    line = "run grids/smoke.yaml --address http://head:8265"
    assert concealed(line) == line


# ---------------------------------------------------------------- what is told


def test_the_notice_has_counts_and_the_best_results() -> None:
    rows = [row(0), row(1), row(2, state=State.FAILED, reason="no")]
    why = "circuit breaker: <all> failed & so on"
    stopped = replace(NOTICE, ending=Ending.STOPPED, reason=why, summary=summarize(rows))
    values = stopped.values()
    json.dumps(values, allow_nan=False)
    assert values["counts"] == {"SUCCEEDED": 2, "FAILED": 1} and values["jobs"] == 3
    assert values["emulated"] is True and values["wall_s"] > 0
    (best,) = values["best"]
    assert (best["precision"], best["batch_size"], best["throughput"]) == ("bf16", 2, 101.0)
    lines = values["text"].splitlines()
    assert lines[0] == "Nightgrid run night was stopped on head."
    assert lines[1] == "circuit breaker: &lt;all&gt; failed &amp; so on"
    assert "b=2 or b=1 is the provisional best" in values["text"]
    assert "the first at 101.0 tokens/s" in values["text"] and "Emulated cards" in values["text"]


# ---------------------------------------------------------------- nightgrid run --notify


@pytest.fixture
def grid(workplace: Path) -> Path:
    path = workplace / "grid.yaml"
    path.write_text(GRID)
    return path


def test_a_run_tells_that_it_has_finished(
    grid: Path, receiver: Receiver, nightgrid: Nightgrid
) -> None:
    hooks = ("--notify", receiver.url, "--notify", "false")  # one that fails changes nothing
    printed = nightgrid("run", grid, "--in-process", *hooks)
    ((method, path, kind),) = receiver.requests
    assert (method, kind) == ("POST", "application/json") and SECRET in path
    (body,) = receiver.bodies
    assert (body["run"], body["state"], body["exit_code"]) == ("tiny-run", "finished", 0)
    assert body["counts"] == {"SUCCEEDED": 2}
    assert body["text"].startswith("Nightgrid run tiny-run has finished on ")
    assert Path(body["report"]).is_file() and Path(body["rows"]).is_dir()
    assert "notified http://127.0.0.1" in printed.err
    assert "the command false: it ended with 1" in printed.err
    assert "secret" not in printed.all


def test_a_stopped_run_tells_why(
    grid: Path, receiver: Receiver, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny_workload.run

    def interrupting(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(tiny_workload, "run", interrupting)
    grid.write_text(GRID.replace("[1, 2]", "[1, 2, 4, 8]"))
    nightgrid("run", grid, "--in-process", "--notify", receiver.url, code=10)
    (body,) = receiver.bodies
    assert body["state"] == "stopped" and "SIGTERM" in body["reason"]
    assert body["counts"]["NOT_STARTED"] >= 1


def test_a_run_that_cannot_go_on_tells_so(
    grid: Path, receiver: Receiver, nightgrid: Nightgrid
) -> None:
    Path("results").write_text("a file is in the way")
    nightgrid("run", grid, "--in-process", "--notify", receiver.url, code=4)
    (body,) = receiver.bodies
    assert (body["run"], body["state"], body["exit_code"]) == ("tiny-run", "failed", 4)
    assert "StoreError" in body["reason"] and "has failed" in body["text"]


def test_a_refused_grid_or_hook_tells_nobody(
    grid: Path, receiver: Receiver, nightgrid: Nightgrid
) -> None:
    grid.write_text("name: g\n")
    run = ("run", grid, "--in-process", "--notify", receiver.url)
    nightgrid(*run, code=2)
    grid.write_text(GRID)
    assert "https://HOST/PATH" in nightgrid(*run, "--notify", "ftp://x", code=1).err
    assert receiver.bodies == [] and not Path("results").exists()
