"""Grids sent to a real head node, which asks for a token, as Ray jobs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patience, until

from orchestrator.cli.main import main
from orchestrator.core.job import State
from orchestrator.store import files as run_files
from orchestrator.store.remote import travelling_files
from orchestrator.store.store import Store
from orchestrator.worker import cpu_slots

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = "NIGHTGRID_REHEARSAL" in os.environ

GRID = """\
name: submitted
defaults:
  workload: text-generation
  model: tiny-chatglm3
  dataset: advertisegen-synthetic
  accelerator: HPU
  output_tokens: 4
  prompts: 2
measure:
  warmup: 0
  min_repeats: 1
  max_repeats: 1
experiments:
  - name: one
    axes:
      precision: [fp32, fp8]
      batch_size: [1, 2]
"""


#: So many jobs, of a quarter of a second each, that a head is dead before the last of them.
JOBS = 60
LONG = f"{[*range(1, JOBS + 1)]}"


@dataclass
class Head:
    environment: dict[str, str]  # of those who have the token
    home: Path
    ports: list[int]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.ports[0]}"

    def start(self) -> None:
        port, dashboard, client, agent, metrics = self.ports
        path = self.home / "ray-start.log"
        with path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                    *("--node-name", "hpu-1", "--node-ip-address", "127.0.0.2"),
                    *("--port", str(port), "--dashboard-port", str(dashboard)),
                    *("--ray-client-server-port", str(client)),
                    *("--dashboard-agent-listen-port", str(agent)),
                    *("--metrics-export-port", str(metrics)),
                    *("--num-cpus", "0", "--object-store-memory", "80000000"),
                    *("--resources", '{"HPU": 2, "emulated": 1, "server_cards": 2}'),
                ],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + patience(90)
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", dashboard), timeout=1).close()
                return
            in_time = self.process.poll() is None and time.monotonic() < deadline
            assert in_time, path.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """``kill -9`` of all of Ray that runs there, as a power failure of the head would. What Ray
        started for others has to end by itself."""
        assert self.process is not None
        for each in psutil.Process(self.process.pid).children():
            each.kill()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience(20))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stranger(self, **variables: str) -> dict[str, str]:
        kept = {k: v for k, v in self.environment.items() if not k.startswith("RAY_AUTH_")}
        return kept | {"HOME": str(self.home / "stranger")} | variables

    def nightgrid(self, *arguments, cwd=ROOT, timeout_s=150, environment=None):
        """Type a command in a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments],
            cwd=cwd,
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=patience(timeout_s),
        )

    def here(self, *arguments, cwd=ROOT, environment=None):
        """Type a command in this process, which saves the start of one: only for commands that
        speak with the dashboard and start no Ray."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name in os.environ:
                patch.delenv(name)
            for name, value in (environment or self.environment).items():
                patch.setenv(name, value)
            patch.chdir(cwd)
            code = main([*arguments])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


#: The largest of what a workstation does without (requirements-client.txt).
ABSENT = "torch, ray, transformers, datasets, pyarrow, safetensors, tokenizers, sentencepiece"


def workstation(head: Head, directory: Path) -> dict[str, str]:
    """The environment of a process in which importing these packages fails."""
    refusing = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}.split(', ')))\n"
    (directory / "sitecustomize.py").write_text(refusing)
    return head.environment | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def uploaded(head: Head) -> list[set[str]]:
    unpacked = Path(head.environment["RAY_TMPDIR"]).glob("**/working_dir_files/_ray_pkg_*/")
    found = [
        {path.relative_to(each).as_posix() for path in each.rglob("*") if path.is_file()}
        for each in unpacked
        if each.is_dir()
    ]
    assert found
    return found


def contents(run: Path) -> dict[str, bytes]:
    """The files of a run that are copied."""
    return {name: (run / name).read_bytes() for name in travelling_files(run)}


def job_logs(head: Head) -> set[str]:
    """Logs of every job that the head has run."""
    directory = Path(head.environment["RAY_TMPDIR"])
    return {path.name for path in directory.glob("ray/session_2*/logs/job-driver-*.log")}


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, below those that the kernel gives to connections (32768 and up) and
    above those that Ray gives to its workers (to 19999): they are still free in ten seconds."""
    found: list[int] = []
    while len(found) < count:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as trying, contextlib.suppress(OSError):
            trying.bind(("0.0.0.0", port))
            found += [port] if port not in found else []
    return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    temp_dir = tempfile.mkdtemp(prefix="ngs-", dir="/tmp")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NIGHTGRID_"))}
    environment |= {k: v for k, v in os.environ.items() if k == cpu_slots.VARIABLE}
    token = home / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    environment |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),  # in place of an installation on workstation and cluster
        "HOME": str(home),
        "NIGHTGRID_CACHE": os.environ.get("NIGHTGRID_CACHE", str(home / "cache")),
        "RAY_TMPDIR": temp_dir,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_num_workers_soft_limit": "2",  # nodes without CPUs would keep no process of tasks
    }
    head = Head(environment=environment, home=home, ports=free_ports(5))
    try:
        head.start()
        yield head
    finally:
        head.end()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.mark.timeout(1800)
def test_a_submitted_grid_is_found_again_and_followed(head: Head, tmp_path: Path) -> None:
    """From a workstation with neither Ray nor torch, while somebody elsewhere watches the run. The
    rehearsal kills 20 drivers of the run at random moments of their lives: every other one after it
    has written rows, those between perhaps before they hold the run, since a supervisor waits twice
    as long after each driver in a row that achieved nothing."""
    kills = 20 if REHEARSAL else 0
    sizes = [*range(1, 3 + 6 * kills)]
    there = tmp_path / "workstation"
    there.mkdir()
    nightgrid = partial(head.nightgrid, environment=workstation(head, there))
    text = GRID.replace("advertisegen-synthetic", "own/prompts.jsonl")
    text = text.replace("output_tokens: 4", "output_tokens: 128").replace("[1, 2]", str(sizes))
    (tmp_path / "grid.yaml").write_text(text)
    (tmp_path / "own").mkdir()
    example = json.dumps({"content": "类型#裙*风格#简约", "summary": "简约的裙子"})
    (tmp_path / "own" / "prompts.jsonl").write_text(f"{example}\n" * 4)
    for secret in (".env", ".netrc", ".ssh/id_rsa", "private.txt"):
        (tmp_path / secret).parent.mkdir(exist_ok=True)
        (tmp_path / secret).write_text("hunter2")
    results = tmp_path / "results"
    submit = ("submit", "grid.yaml", "--address", head.url, "--results", str(results))
    submit += ("--submission-id", "night-1")
    started = time.monotonic()
    sent = nightgrid(*submit, cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout.splitlines()[0] == "night-1"
    said = sent.stderr.splitlines()[0]
    assert said.endswith("MB: the program, grid.yaml, own/prompts.jsonl"), sent.stderr
    assert time.monotonic() - started < patience(60)

    again = head.here(*submit, cwd=tmp_path)
    assert again.returncode == 0 and "is there already" in again.stdout, again.stderr
    other = head.here(*submit, "--run", "other", cwd=tmp_path)
    assert other.returncode == 5 and "another command" in other.stderr

    run = results / "submitted"
    assert until((run / "status.json").is_file, 90)
    for package in uploaded(head):  # before a watcher's list of what it has
        assert {name.split("/")[0] for name in package} <= {
            *("orchestrator", "workloads", "results", "grid.yaml", "own")
        }
    with watched(head, "submitted", tmp_path) as finished:
        measured_then = kill_drivers(run, kills) if kills else set()
        followed = nightgrid("logs", "night-1", "--address", head.url, "--follow", timeout_s=900)
        assert followed.returncode == 0, followed.stdout + followed.stderr
        assert until(finished, 30)
    assert "\x1b[" not in followed.stdout and "\r" not in followed.stdout
    assert followed.stdout.count("killed by SIGKILL. What was measured is safe") == kills
    assert "] SUCCEEDED  " in followed.stdout and "UNSUPPORTED" in followed.stdout
    assert not followed.stderr

    jobs = 2 * len(sizes)  # half of them in fp8
    jobs_before = job_logs(head)
    status = head.here("status", "submitted", "--address", head.url)
    assert status.returncode == 0 and "night-1  SUCCEEDED  run submitted" in status.stdout
    assert "exit code 0" in status.stdout and f"submitted: {jobs}/{jobs} jobs" in status.stdout
    where = ("--address", head.url, "--results", str(results))
    listed = json.loads(nightgrid("runs", *where, "--json").stdout)
    assert [(each["run"], each["state"], each["succeeded"]) for each in listed] == [
        ("submitted", "FINISHED", len(sizes))
    ]
    fetched = nightgrid("fetch", "night-1", "--address", head.url, cwd=tmp_path / "own")
    assert fetched.returncode == 0 and not fetched.stderr, fetched.stderr
    assert contents(tmp_path / "own" / "results" / "submitted") == contents(run)
    assert job_logs(head) == jobs_before  # all were read over HTTP; no job was started
    [links] = Path(head.environment["RAY_TMPDIR"]).glob("ray/session_2*/logs/nightgrid")
    shutil.rmtree(links)  # as on a head that was started again
    there = ("submitted", "--address", head.url, "--results", str(tmp_path / "copied"))
    reported = head.here("report", *there, cwd=tmp_path)
    told = f"All {jobs} jobs have an answer; {len(sizes)} measured"
    assert told in reported.stdout, reported.stderr
    assert (tmp_path / "copied" / "submitted" / "report.html").is_file()

    rows = Store(results, "submitted").measurements()
    final = {row.job_id: row.state for row in rows if row.final}  # each driver refuses fp8
    assert Counter(final.values()) == dict.fromkeys(set(final.values()), len(sizes))
    assert set(final.values()) == {State.SUCCEEDED, State.UNSUPPORTED}
    measured = [row for row in rows if row.state is State.SUCCEEDED]
    assert len({row.job_id for row in measured}) == len(measured) == len(sizes)
    assert bool(measured_then) == bool(kills) and measured_then <= {
        row.attempt_id for row in measured
    }
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert {(r.nodes, r.emulated, r.niceness) for r in measured} == {(("hpu-1",), True, niceness)}


def kill_drivers(run: Path, kills: int) -> set[str]:
    """Kill so many drivers of a submitted run; the attempts that were measured then."""
    assert until(lambda: supervisor_of(run.name), 60)
    supervisor = supervisor_of(run.name)
    assert supervisor is not None
    moments = random.Random(4)

    def drivers() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):  # one ended meanwhile
            return [child for child in supervisor.children() if "run" in child.cmdline()]
        return []

    def measured() -> set[str]:
        rows = Store.existing(run.parent, run.name).measurements()
        return {row.attempt_id for row in rows if row.state is State.SUCCEEDED}

    seen: set[str] = set()
    for kill in range(kills):
        assert until(drivers, 60), f"no driver after kill {kill}"
        (driver,) = drivers()
        works = kill % 2 == 0
        if works:
            assert until(lambda: measured() - seen, 120), f"no row after kill {kill}"
        time.sleep(moments.uniform(0, 0.5 if works else 10))
        driver.kill()
        driver.wait()
        seen.update(measured())
    return seen


@contextlib.contextmanager
def watched(head: Head, run: str, cwd: Path) -> Iterator[Callable[[], bool]]:
    """`nightgrid watch` of a cluster's run whose results are not here; whether its page says that
    the run has finished."""
    words = ["watch", run, "--address", head.url, "--port", "0", "--results", "copy"]
    watching = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *words],
        cwd=cwd,
        env=head.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdout is not None
        url = watching.stdout.readline().split()[-1]

        def finished() -> bool:
            with urllib.request.urlopen(f"{url}state", timeout=patience(10)) as answer:
                status = json.load(answer)["status"]
            return status is not None and status["finished"]

        yield finished
    finally:
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(patience(30)) == 0


def supervisor_of(run: str) -> psutil.Process | None:
    """The process of a submitted run's job."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if {"run", "--run", run} <= set(words) and process.children():
                return process
    return None


def test_rays_own_submit_works_from_a_checkout(head: Head, tmp_path: Path) -> None:
    """`ray job submit --working-dir . -- python -m orchestrator run …` as it stands; without
    --results the rows outlive the job's working directory, in the home of the driver's node."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("orchestrator", "workloads"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "grids").mkdir()
    (checkout / "grids" / "small.yaml").write_text(GRID.replace("[1, 2]", "[1]"))
    for big in (".venv/x", "results/run/rows.bin"):
        (checkout / big).parent.mkdir(parents=True)
        (checkout / big).write_bytes(b"big")
    secret_files = (".env", ".netrc", ".ssh/id_ed25519", "tls/server.pem", "grids/.env.local")
    for secret in secret_files:
        (checkout / secret).parent.mkdir(exist_ok=True)
        (checkout / secret).write_text("hunter2")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit"),
            *("--address", head.url, "--working-dir", "."),
            *("--", "python", "-m", "orchestrator", "run", "grids/small.yaml"),
        ],
        cwd=checkout,
        env=head.environment | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=patience(150),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("] SUCCEEDED  ") == 1
    assert list((head.home / "nightgrid-results" / "submitted" / "rows").glob("*.parquet"))
    left_out = {*secret_files, ".venv/x", "results/run/rows.bin"}
    assert not [package for package in uploaded(head) if package & left_out]


#: A grid whose model is at a path that no node has.
PATHS = """\
name: there
defaults: {workload: text-generation, accelerator: HPU, output_tokens: 4}
experiments:
  - {name: a, model: /nowhere/model}
"""


def test_a_workstation_has_the_cluster_examined(head: Head, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(PATHS)
    shared = tmp_path / "shared"
    shared.mkdir()
    done = head.here(
        *("doctor", "--address", head.url, "--json", "--shared", str(shared)),
        *("--import", "csv", "--import", "nightgrid_none", "--nodes", "1", "--grid", "grid.yaml"),
        cwd=tmp_path,
    )
    told = json.loads(done.stdout)
    assert done.returncode == 13 and told["worst"] == "error", done.stdout + done.stderr
    wrong = {f["check"]: f for f in told["findings"] if f["level"] != "note"}
    assert wrong.keys() - {"disk"} == {"imports", "files"}  # the disk here may be rather full
    assert "there is no /nowhere/model" in wrong["files"]["message"]
    assert wrong["files"]["level"] == "error"
    assert told["emulated"] and told["facts"]["token"]
    assert told["facts"]["dashboard"].startswith("127.")
    assert [node["cards"] for node in told["facts"]["nodes"]] == [{"HPU": 2}]
    assert list(shared.iterdir()) == []


def test_a_clusters_paths_are_looked_at_on_its_nodes(head: Head, tmp_path: Path) -> None:
    """By submit, as by the doctor above, and named at the grid's line; the rehearsal asks for a
    plan, too, which is refused by the same function."""
    (tmp_path / "grid.yaml").write_text(PATHS)
    for command in ("submit", "plan") if REHEARSAL else ("submit",):
        refused = head.here(command, "grid.yaml", "--address", head.url, cwd=tmp_path)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "grid.yaml:4:" in refused.stderr and "there is no /nowhere/model" in refused.stderr


def test_an_unknown_job_is_refused(head: Head) -> None:
    unknown = head.here("status", "nobody", "--address", head.url)
    assert unknown.returncode == 5 and "no job and no run 'nobody'" in unknown.stderr
    unknown = head.here("logs", "nobody", "--follow", "--address", head.url)
    assert unknown.returncode == 5 and "no job 'nobody'" in unknown.stderr


def test_the_token_that_ray_keeps_for_its_user_is_sent(head: Head) -> None:
    environment = head.stranger(HOME=str(head.home / "owner"))
    kept = head.home / "owner" / ".ray" / "auth_token"
    kept.parent.mkdir(parents=True)
    kept.write_text((head.home / "token").read_text())
    done = head.here("status", "--address", head.url, environment=environment)
    assert done.returncode == 0, done.stderr


def test_a_client_without_the_token_is_refused(head: Head, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    submit = ("submit", "grid.yaml", "--address", head.url)
    run = ("run", "grid.yaml", "--address", head.address, "--results", str(tmp_path / "results"))
    wrong = head.stranger(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    cases = [
        (head.stranger(), "none was sent, because RAY_AUTH_MODE is not set"),
        (head.stranger(RAY_AUTH_MODE="token"), "auth_token cannot be read: "),
        (head.stranger(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH="/none"), "/none cannot be read"),
        (wrong, "the one that was sent is not the cluster's"),
    ]
    over_http = [(submit, *case) for case in cases]
    over_http += [(("status", "--address", head.url), head.stranger(), "asks for a token")]
    answers = [
        (head.here(*command, cwd=tmp_path, environment=environment), 5, why)
        for command, environment, why in over_http
    ]
    answers += [(head.nightgrid(*run, cwd=tmp_path, environment=wrong), 3, cases[-1][1])]
    for done, exit_code, why in answers:
        assert done.returncode == exit_code, done.stdout + done.stderr
        assert why in done.stderr, done.stderr
        assert "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in done.stderr
        assert "Traceback" not in done.stderr
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head.url}/api/jobs/", timeout=patience(10))
    assert refused.value.code == 401
    assert not (tmp_path / "results").exists()


@contextlib.contextmanager
def late_node(head: Head) -> Iterator[None]:
    """A node of one emulated GPU that joins now and leaves at the end of the block."""
    ports = free_ports(2)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
        *("--address", head.address, "--node-name", "gpu-1", "--node-ip-address", "127.0.0.3"),
        *("--dashboard-agent-listen-port", str(ports[0]), "--metrics-export-port", str(ports[1])),
        *("--num-cpus", "0", "--num-gpus", "1", "--object-store-memory", "80000000"),
        *("--resources", '{"emulated": 1, "server_cards": 1}'),
    ]
    with (head.home / "late-node.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=head.environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def test_a_node_that_joins_late_is_waited_for(head: Head, tmp_path: Path) -> None:
    """Without the option its jobs become UNSUPPORTED rows at once."""
    text = GRID.replace("HPU", "GPU").replace("[fp32, fp8]", "fp32").replace("[1, 2]", "[1]")
    (tmp_path / "grid.yaml").write_text(text)
    command = ["run", "grid.yaml", "--address", head.address, "--results", "rows"]
    waits = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *command, "--wait-for-cards", "120"],
        cwd=tmp_path,
        env=head.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert waits.stdout is not None
    words = "waiting up to 2m00s for cards for jobs of 1 GPU; the cluster has 2 HPU"
    before = next((line for line in waits.stdout if words in line), "")
    assert before
    with late_node(head):
        output, _ = waits.communicate(timeout=patience(150))
    assert waits.returncode == 0, output
    (row,) = Store.existing(tmp_path / "rows", "submitted").measurements()
    assert row.state is State.SUCCEEDED


@pytest.mark.skipif(
    not REHEARSAL,
    reason="a minute, four drivers; `make rehearsal-night` runs it",
)
def test_runs_of_a_busy_cluster_wait_for_each_other(head: Head, tmp_path: Path) -> None:
    """Three grids are sent, and an urgent one after them. One run at a time has the cards, in
    order of priority and arrival; those that wait say for whom. One that waits and is killed is
    started again, one that is asked to stops, and what they measured is fetched."""
    results, there = tmp_path / "results", ("--address", head.url)
    many = [*range(1, 151)]  # it is stopped long before it has come to its end
    sizes_of = {"long": str(many), "killed": "[1]", "last": "[1]", "urgent": "[1]"}
    for name, sizes in sizes_of.items():
        text = GRID.replace("submitted", name).replace("[fp32, fp8]", "fp32")
        (tmp_path / f"{name}.yaml").write_text(text.replace("[1, 2]", sizes))

    def status_of(run: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            told: dict[str, Any] = json.loads((results / run / "status.json").read_bytes())
            return told
        return {}

    def submit(*names: str) -> None:
        grids = [f"{name}.yaml" for name in names]
        priority = ("--priority", "5") if "urgent" in names else ()
        sent = head.nightgrid(
            "submit", *grids, *there, "--results", str(results), *priority, cwd=tmp_path
        )
        assert sent.returncode == 0, sent.stderr

    submit("long", "killed", "last")
    assert until(lambda: status_of("long").get("cards"), 90)
    submit("urgent")
    assert until(lambda: all(status_of(n).get("waiting") for n in ("killed", "last", "urgent")), 90)
    assert status_of("last")["waiting"].startswith("long (on ")
    listed = head.nightgrid("runs", *there, "--results", str(results), "--json", cwd=tmp_path)
    states = {each["run"]: each["state"] for each in json.loads(listed.stdout)}
    assert states == dict.fromkeys(states, "WAITING") | {"long": "RUNNING"} and len(states) == 4

    os.kill(int(json.loads((results / "killed" / "driver.lock").read_bytes())["pid"]), 9)
    stopped = head.nightgrid("stop", "long", *there, cwd=tmp_path)
    assert stopped.returncode == 0 and "what runs may end" in stopped.stdout, stopped.stderr
    waited = ("urgent", "last", "killed")
    assert until(lambda: all(status_of(run).get("finished") for run in waited), 200)
    rows = {run: Store(results, run).measurements() for run in ("long", *waited)}
    assert all([row.state for row in rows[run]] == [State.SUCCEEDED] for run in waited)
    ends = {run: max(row.recorded_at or 0.0 for row in found) for run, found in rows.items()}
    assert ends["long"] < ends["urgent"] < min(ends["last"], ends["killed"])
    left = [row for row in rows["long"] if row.final]
    assert len(left) == len(many) and State.NOT_STARTED in {row.state for row in left}
    assert "asked to stop by" in status_of("long")["stopping"]
    fetched = head.nightgrid("fetch", "long", *there, "--results", "got", cwd=tmp_path)
    assert fetched.returncode == 0, fetched.stderr
    assert contents(tmp_path / "got" / "long") == contents(results / "long")
    assert run_files.REPORT in contents(results / "long")


@pytest.mark.skipif(
    not REHEARSAL,
    reason="half a minute, a head is started again; `make rehearsal-night` runs it",
)
def test_the_next_submission_goes_on_with_the_run_of_a_head_that_died(head, tmp_path) -> None:
    """A submitted driver dies with its head. Once that is back on its port, the same grid sent
    again measures what is missing, and nothing twice."""
    (tmp_path / "grid.yaml").write_text(GRID.replace("[fp32, fp8]", "fp32").replace("[1, 2]", LONG))
    results = tmp_path / "results"
    submit = ("submit", "grid.yaml", "--address", head.url, "--results", str(results))
    sent = head.nightgrid(*submit, "--submission-id", "before", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    run = results / "submitted"
    assert until(lambda: list((run / "rows").glob("*.parquet")), 60)
    driver = int(json.loads((run / "driver.lock").read_bytes())["pid"])
    shown = head.nightgrid("status", "submitted", "--address", head.url)
    assert "before  RUNNING  run submitted" in shown.stdout, shown.stderr
    head.kill()
    lost = head.nightgrid("status", "submitted", "--address", head.url)
    assert lost.returncode == 5 and "Last seen from here" in lost.stderr, lost.stderr
    assert "measures only what is missing" in lost.stderr and f"rows: {run}" in lost.stderr
    measured = {row.attempt_id: row for row in Store(results, "submitted").measurements()}
    assert until(lambda: not psutil.pid_exists(driver), 30), "the driver outlived its head"
    head.start()
    sent = head.nightgrid(*submit, "--submission-id", "after", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    followed = head.nightgrid("logs", "after", "--address", head.url, "--follow")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "taken over from a driver that died: process " in followed.stdout
    rows = Store(results, "submitted").measurements()
    final = [row for row in rows if row.final]
    assert {row.state for row in final} == {State.SUCCEEDED}, followed.stdout
    assert len({row.job_id for row in final}) == len(final) == JOBS
    assert len({row.invocation_id for row in final}) == 2  # some before, some after
    assert {row.attempt_id for row in rows} >= measured.keys()
    assert all("died while it ran" in row.reason for row in rows if not row.final)
