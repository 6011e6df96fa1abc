"""Submissions that need no cluster: commands, addresses, and what is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from refusing_proxy import refusing_proxy

from orchestrator.cli.main import main
from orchestrator.core.errors import SubmitError
from orchestrator.grid import grid_path
from orchestrator.grid.parser import load_grid
from orchestrator.on_ray.jobs import (
    HeadJobFailed,
    JobInfo,
    JobServer,
    Submission,
    resolve_job_address,
)
from orchestrator.on_ray.upload import Upload, is_secret_file, program_files, upload_of


def submission(tmp_path: Path, **changes: object) -> Submission:
    values: dict[str, object] = {
        "grid": tmp_path / "grids" / "a b.yaml",
        "working_dir": tmp_path,
        "run": "night",
        "submission_id": "id",
    }
    return Submission(**(values | changes))  # type: ignore[arg-type]


def test_the_job_runs_the_command_one_would_type(tmp_path: Path) -> None:
    sent = submission(tmp_path, results="/data/my rows", arguments=("--retry-failed",))
    assert sent.entrypoint == (
        "exec python -m orchestrator run 'grids/a b.yaml' --run night "
        "--results '/data/my rows' --retry-failed"
    )


def test_a_grid_that_would_not_be_uploaded_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "work" / ".." / "grid.yaml"
    with pytest.raises(SubmitError, match="outside the directory that is uploaded"):
        _ = submission(tmp_path, grid=outside, working_dir=tmp_path / "work").entrypoint


def test_the_commit_travels_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster has no repository, so rows get the commit from the workstation."""
    monkeypatch.setenv("NIGHTGRID_GIT_COMMIT", "0123456789abcdef")
    monkeypatch.setenv("NIGHTGRID_GIT_DIRTY", "1")
    environment = submission(tmp_path).runtime_env(tmp_path / "staged")
    assert environment["working_dir"] == str(tmp_path / "staged")
    variables = environment["env_vars"]
    assert variables["NIGHTGRID_GIT_COMMIT"] == "0123456789abcdef"
    assert variables["NIGHTGRID_GIT_DIRTY"] == "1"
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > 30


def test_a_head_whose_agent_is_not_there_yet_is_tried_again(tmp_path, monkeypatch) -> None:
    """Ray's job server answers before its agent does, and refuses after ten seconds."""
    no_agent = "Request failed with status code 500: No available agent to submit job, please try"
    refusals = [RuntimeError(no_agent), RuntimeError("TimeoutError: Failed to get head node agent")]
    sent: list[str] = []
    deaths: list[OSError] = []
    gone: list[OSError] = []

    class Client:
        def __init__(self, *_: str) -> None: ...

        def get_job_info(self, _: str) -> None:
            if gone:
                raise gone[0]
            raise RuntimeError("404: does not exist")

        def submit_job(self, **job: Any) -> str:
            assert Path(job["runtime_env"]["working_dir"], "grid.yaml").is_file()
            if refusals:
                raise refusals.pop(0)
            if deaths:
                gone.append(deaths.pop())
                raise gone[0]
            sent.append(job["submission_id"])
            return sent[-1]

    monkeypatch.setattr("orchestrator.on_ray.jobs.JobClient", Client)
    monkeypatch.setattr("time.sleep", lambda _: None)
    (tmp_path / "grid.yaml").write_text("name: g\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = JobServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert server.submit(submission(tmp_path, grid=tmp_path / "grid.yaml"))
        assert sent == ["id"] and not refusals
        refusals.append(RuntimeError("500: no such thing"))
        with pytest.raises(SubmitError, match="no such thing"):
            server.submit(submission(tmp_path, grid=tmp_path / "grid.yaml"))
        deaths.append(ConnectionError("connection refused"))
        with pytest.raises(SubmitError, match="went away: connection refused"):
            server.submit(submission(tmp_path, grid=tmp_path / "grid.yaml"))


@pytest.mark.parametrize(
    ("status", "printed", "reason"),
    [
        ("SUCCEEDED", "night: 4/4 jobs", ""),
        ("FAILED", "nightgrid status: there is no run 'night'", "8265: there is no run 'night'$"),
        ("FAILED", "Traceback: no module", "8265: Traceback: no module$"),
        ("STOPPED", "", "`orchestrator status` ended as STOPPED"),
    ],
)
def test_a_command_that_fails_on_the_head_is_no_answer(monkeypatch, status, printed, reason):
    class Head(JobServer):
        def __init__(self) -> None:
            self.address = "http://head:8265"

        def _send(self, **job: Any) -> str:
            assert job["entrypoint"].endswith(" status night --results /data")
            return "job"

        def job(self, submission_id: str) -> JobInfo:
            times = {"started_at": 1.0, "ended_at": 2.0, "exit_code": None}
            return JobInfo(
                submission_id=submission_id, status=status, entrypoint="", message="", **times
            )

        def logs(self, submission_id: str) -> str:
            return f"2026-11-23 02:00:00,000\tINFO job_manager.py:568 -- Runtime env\n{printed}\n"

    if not reason:
        assert Head().ask(["status", "night"], results="/data") == printed
        return
    with pytest.raises(HeadJobFailed, match=reason):
        Head().ask(["status", "night"], results="/data")


@pytest.mark.parametrize("address", ["ray://head:10001", "ftp://head", "http://:8265", "head:xyz"])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(SubmitError):
        resolve_job_address(address)


def test_no_address_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(SubmitError, match="--address"):
        resolve_job_address(None)


class Answers(BaseHTTPRequestHandler):
    """Answers every request with ``status`` and ``body``, and notes it."""

    status, body = 200, '{"ray_version": "2.60.0"}'
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def answering(status: int, body: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the port of a server on all of 127.0.0.0/8, and its requests."""
    kind = type("Of", (Answers,), {"status": status, "body": body, "requests": []})
    with ThreadingHTTPServer(("0.0.0.0", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port, kind.requests  # type: ignore[attr-defined]
        finally:
            server.shutdown()


@pytest.mark.parametrize("no_proxy", [None, "example.org, 10.0.0.0/8", "*"])
def test_a_head_is_never_asked_through_a_proxy(monkeypatch, no_proxy) -> None:
    """Status, logs and submit failed with "asks for a token" behind a proxy that answers 403."""
    for name in ("no_proxy", "NO_PROXY", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")  # so that it is set back
        monkeypatch.delenv(name)
    if no_proxy:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    with refusing_proxy() as proxy, answering(200, Answers.body) as (head, requests):
        for name, value in proxy.variables.items():
            monkeypatch.setenv(name, value)
        for host in ("127.0.0.1", "localhost", "127.0.0.2"):  # the last by the given address
            JobServer(f"http://{host}:{head}")
        assert len(requests) >= 3
        assert not no_proxy or os.environ["no_proxy"].startswith(no_proxy.partition(",")[0])
    assert proxy.requests == []


@pytest.mark.parametrize(
    ("status", "body", "words", "others"),
    [
        (403, "<h1>denied by squid</h1>", "squid.*a proxy or gateway stands before", "token"),
        (407, "", "a proxy or gateway stands before", "RAY_AUTH"),
        (502, "<h1>nginx</h1>", "a proxy or gateway stands before", "RAY_AUTH"),
        (401, "Unauthorized: Missing authentication token", "asks for a token", "gateway"),
        (403, "Forbidden: Invalid authentication token", "asks for a token", "gateway"),
    ],
)
def test_a_refusal_of_a_gateway_is_not_that_of_a_head(monkeypatch, status, body, words, others):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with answering(status, body) as (port, _), pytest.raises(SubmitError, match=words) as refused:
        JobServer(f"http://127.0.0.1:{port}")
    assert others not in str(refused.value)


def test_hooks_travel_and_a_secret_is_warned_of(tmp_path, monkeypatch, capsys, head) -> None:
    """An address would stand in the cluster's list of jobs for all to read."""
    monkeypatch.chdir(tmp_path)
    _grid(tmp_path, "tiny-chatglm3", "advertisegen-synthetic")
    submit = ["submit", "grid.yaml", "--address", head.address, "--notify"]
    assert main([*submit, "@/home/me/hook"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert main([*submit, "https://hooks.example.com/secret"]) == 0
    captured = capsys.readouterr()
    assert "--notify @FILE" in captured.err and "secret" not in captured.out + captured.err
    hook, address = head.submissions
    assert hook.arguments[-2:] == ("--notify", "@/home/me/hook")
    assert address.entrypoint.endswith("--notify https://hooks.example.com/secret")


# ---------------------------------------------------------------- the luggage of `nightgrid submit`


GRID = """\
name: g
experiments:
  - name: e
    workload: text-generation
    model: {model}
    dataset: {dataset}
    accelerator: CPU
"""
#: What lies in a home directory and must not leave it.
SECRETS = (
    *(".env", ".netrc", ".ssh/id_rsa", ".ssh/config", ".aws/credentials", ".kube/config"),
    *(".docker/config.json", ".gnupg/secring.gpg", ".bash_history", ".config/gcloud/x.db"),
    *("tls/server.pem", "tls/server.key", "secrets.yaml", "client_secret_12.json", "prod.env"),
    *("service-account.json", "keys.p12", ".git-credentials", ".pypirc", "token", ".env.local"),
)
HARMLESS = ("notes.txt", "photos/a.jpg", "mail/inbox", ".bashrc", "orchestrator.txt")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*SECRETS, *HARMLESS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("hunter2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts.jsonl").write_text('{"content": "a", "summary": "b"}\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def upload(home: Path) -> Callable[..., Upload]:
    def make(*include, model="tiny-chatglm3", dataset="advertisegen-synthetic") -> Upload:
        jobs = load_grid(_grid(home, "tiny-chatglm3", "advertisegen-synthetic")).jobs()
        jobs = tuple(replace(job, model=model, dataset=dataset) for job in jobs)
        return upload_of(_grid(home, model, dataset), jobs, home, include)

    return make


def _grid(directory: Path, model: str, dataset: str) -> Path:
    path = directory / "grid.yaml"
    path.write_text(GRID.format(model=model, dataset=dataset))
    return path


def test_from_a_home_directory_only_the_grid_goes(upload: Callable[..., Upload]) -> None:
    sent = upload()
    assert set(sent.named) == {"grid.yaml"}
    assert {"orchestrator/__main__.py", "workloads/__init__.py"} <= set(sent.program)
    tables = {f"orchestrator/analysis/{name}.csv" for name in ("published", "devices")}
    assert tables <= set(sent.program)
    assert {name.split("/")[0] for name in sent.program} == {"orchestrator", "workloads"}
    assert not [name for name in sent.files if name.endswith(".pyc") or is_secret_file(name)]
    with sent.staged() as directory:
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }
        assert set(files) == set(sent.files)
        assert b"hunter2" not in b"".join(
            data for name, data in files.items() if name not in sent.program
        )
    assert not directory.exists()
    assert sent.text().startswith(f"uploads {len(files)} files, ")
    assert sent.text().endswith("MB: the program, grid.yaml")


def test_a_shipped_grid_goes_under_its_own_name(tmp_path: Path) -> None:
    for name in ("smoke", "gaudi"):
        sent = submission(tmp_path, grid=grid_path(name))
        assert f"orchestrator run {name}.yaml " in sent.entrypoint
        assert list(sent.upload().named) == [f"{name}.yaml"]


def test_more_than_100_mb_are_refused_before_they_are_packed(
    upload: Callable[..., Upload], home: Path
) -> None:
    (home / "data" / "large.jsonl").touch()
    os.truncate(home / "data" / "large.jsonl", 120_000_000)
    with pytest.raises(SubmitError, match=r"120 MB would be uploaded \(data/large.jsonl") as large:
        upload(dataset="data/large.jsonl")
    assert "put data where the cluster's nodes see it and write its absolute path" in str(
        large.value
    )
    assert set(upload("data/prompts.jsonl").named) == {"grid.yaml", "data/prompts.jsonl"}


def test_what_the_grid_names_goes_along(upload: Callable[..., Upload], home: Path) -> None:
    assert set(upload(dataset="data/prompts.jsonl").named) == {"grid.yaml", "data/prompts.jsonl"}
    (home / "models" / "mine" / ".git").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", ".git/config"):
        (home / "models" / "mine" / name).write_text("{}")
    assert set(upload(model="./models/mine").named) == {
        "grid.yaml",
        *(f"models/mine/{n}" for n in ("config.json", "tokenizer.json", "model.safetensors")),
    }
    assert set(upload(model=str(home / "models" / "mine")).named) == {"grid.yaml"}
    assert set(upload(model="~/models/mine").named) == {"grid.yaml"}
    assert set(upload(model="org/name").named) == {"grid.yaml"}
    assert set(upload("notes.txt").named) == {"grid.yaml", "notes.txt"}


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_named_as_secrets_are_goes_only_if_it_is_named(upload, name) -> None:
    with pytest.raises(SubmitError, match="--include"):
        upload(dataset=name)
    top = name.split("/")[0]
    if top != name:
        with pytest.raises(SubmitError, match="named as secrets are"):
            upload(top)
    assert name in upload(name).named


@pytest.mark.parametrize("name", [".", "..", "/", "~", "data/.."])
def test_a_home_directory_never_goes(upload: Callable[..., Upload], home: Path, name: str) -> None:
    with pytest.raises(SubmitError, match=r"a home directory or more|no such file"):
        upload(name)
    (home / "link").symlink_to(home)
    with pytest.raises(SubmitError, match="a home directory or more"):
        upload("link")
    if name in (".", "data/.."):
        with pytest.raises(SubmitError, match="a home directory or more"):
            upload(model=name)


def test_links_lead_no_secret_out(upload: Callable[..., Upload], home: Path) -> None:
    (home / "data" / "x.json").symlink_to(home / ".ssh" / "id_rsa")
    with pytest.raises(SubmitError, match=r"a link to \.ssh/id_rsa"):
        upload("data")
    (home / "data" / "x.json").unlink()
    (home / "data" / "x.json").symlink_to("/etc/passwd")
    with pytest.raises(SubmitError, match="outside"):
        upload("data")
    with pytest.raises(SubmitError, match="outside"):
        upload("data/x.json")


def test_ordinary_files_are_not_taken_for_secrets() -> None:
    for name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "id_rsa.pub"):
        assert not is_secret_file(name), name
    for name in ("x/token.py", "keys/model.safetensors", "environment.yaml", "monkey.jsonl"):
        assert not is_secret_file(name), name
    assert "orchestrator/on_ray/cluster.py" in program_files()


def test_the_program_of_a_checkout_goes_before_the_installed_one(tmp_path: Path) -> None:
    """Whoever changes the code and submits it means the changed code."""
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "workloads").mkdir()
    (tmp_path / "orchestrator" / "__main__.py").write_text("changed = True")
    (tmp_path / "orchestrator" / ".env").write_text("hunter2")
    files = program_files(tmp_path)
    assert files["orchestrator/__main__.py"] == tmp_path / "orchestrator" / "__main__.py"
    assert "orchestrator/.env" not in files


def test_submit_refuses_and_says_which_option(home, capsys) -> None:
    grid = _grid(home, "tiny-chatglm3", "advertisegen-synthetic")
    address = ("--address", "http://127.0.0.1:1")
    assert main(["submit", str(grid), "--include", "tls", *address]) == 5
    error = capsys.readouterr().err
    assert "tls/server.key, tls/server.pem" in error and "--include tls/server.key" in error


def test_an_upload_is_told_of_once_the_cluster_answers(home, capsys) -> None:
    grid = _grid(home, "tiny-chatglm3", "advertisegen-synthetic")
    assert main(["submit", str(grid), "--address", "http://127.0.0.1:1"]) == 5
    error = capsys.readouterr().err
    assert "nothing answers at 127.0.0.1:1" in error and "the program, grid.yaml" not in error
