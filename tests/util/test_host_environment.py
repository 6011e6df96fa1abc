"""Hosts whose user has no home or name, and memory as Ray's monitor sees it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.util import host as processors
from orchestrator.util.host import MemoryUse, memory_use, usable_cores
from orchestrator.worker import memory_limit
from orchestrator.worker.memory_limit import share_of_host
from workloads.base import DataMissing
from workloads.data.cache import cache_root

ROOT = Path(__file__).parents[2]
NAMELESS = 54_321
#: Runs the rest of the command line as a user without a name, as `docker run --user` does.
AS_USER = (
    f"import os, sys; os.setgroups([]); os.setgid({NAMELESS}); os.setuid({NAMELESS}); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
GRID = """\
name: g
experiments:
  - {name: e, workload: text-generation, model: tiny-chatglm3, accelerator: CPU}
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def nameless(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    unset = {"HOME", "USER", "LOGNAME", "NIGHTGRID_CACHE", "HF_HOME", "RAY_ADDRESS"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-c", AS_USER, *command],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of everybody's, with a grid."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o777)
    (tmp_path / "g.yaml").write_text(GRID)
    return tmp_path


@as_root
def test_a_user_without_home_and_name_has_both(place: Path) -> None:
    """``Path.home`` and ``getpass.getuser`` raise there, also in libraries."""
    code = (
        "import getpass, pathlib; from orchestrator.util import host; host.complete_environment();"
        "print(pathlib.Path.home(), getpass.getuser(), host.home_problem(), sep='|')"
    )
    done = nameless("-c", code, cwd=place)
    home, user, problem = done.stdout.strip().split("|")
    assert (home, user) == ("/", f"user-{NAMELESS}"), done.stderr
    assert problem.startswith(f"the home directory / of user {NAMELESS} cannot be written to")


@as_root
@pytest.mark.slow
def test_a_home_that_can_hold_no_cache_is_refused_before_the_night(place) -> None:
    """Every job failed at its cache, after cards were claimed."""
    variables = {"HOME": "/nonexistent"}
    command = ("-m", "orchestrator", "{}", "g.yaml", "--emulate", "1x1:CPU", "--results", "rows")
    run = nameless(*(word.format("run") for word in command), cwd=place, **variables)
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    why = "is not a directory"
    assert f"{why}: caches have no place; set HOME to a directory" in " ".join(run.stderr.split())
    assert not (place / "rows").exists()
    plan = nameless(*(word.format("plan") for word in command), cwd=place, **variables)
    assert plan.returncode == 0 and f"{why}: caches have no place; set HOME" in plan.stdout
    places = {"NIGHTGRID_CACHE": str(place / "cache"), "HF_HOME": str(place / "hf")}
    plan = nameless(*(word.format("plan") for word in command), cwd=place, **variables, **places)
    assert plan.returncode == 0 and "note: the home" not in plan.stdout


@pytest.mark.parametrize("value", ["~nosuch/rows", "$SCRATCH/rows"])
def test_results_that_the_environment_names_wrongly_are_refused(monkeypatch, capsys, value) -> None:
    monkeypatch.setenv("NIGHTGRID_RESULTS", value)
    assert main(["runs"]) == 4
    assert f"nightgrid runs: NIGHTGRID_RESULTS={value}: " in capsys.readouterr().err
    monkeypatch.setenv("NIGHTGRID_CACHE", "~nosuch/cache")
    with pytest.raises(DataMissing, match=r"no home directory ~nosuch.*set NIGHTGRID_CACHE to"):
        cache_root()


@pytest.mark.parametrize(
    ("group", "variables", "share", "words"),
    [
        ({}, {}, 0.75, ""),
        ({}, {"RAY_memory_usage_threshold": "0.8"}, 0.75, "75% of 64.0 GiB .*from 80% on Ray's"),
        ({"memory.max": "max", "memory.current": "5"}, {}, 0.75, ""),
        ({"memory.max": "8000", "memory.current": "7800"}, {}, 0.925, "92% of .* from 95% on"),
        (
            {"memory.max": "8000", "memory.current": "7800"},
            {"RAY_memory_monitor_refresh_ms": "0"},
            *(0.925, ""),
        ),
    ],
)
def test_memory_is_counted_as_rays_monitor_counts_it(
    tmp_path, monkeypatch, group, variables, share, words
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable: {16 << 20} kB\n",
        "proc/self/cgroup": "0::/own\n",
        "sys/fs/cgroup/own/memory.stat": "anon 5000\ninactive_file 400\n",
        **{f"sys/fs/cgroup/own/{name}": value for name, value in group.items()},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    use = memory_use(tmp_path)
    assert use.share == pytest.approx(share)
    assert bool(use.problem) == bool(words)
    assert re.search(words, use.problem)


@pytest.mark.parametrize(
    ("used", "killed_from", "share"),
    [(0, 0.95, 80), (40, 0.95, 49.5), (40, 0.0, 54), (90, 0.95, 9)],
    ids=["idle", "busy", "no monitor", "full"],
)
def test_emulated_cards_leave_room_below_rays_memory_monitor(
    used: int, killed_from: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 2**30
    use = MemoryUse(used_bytes=used * gib, limit_bytes=100 * gib, killed_from=killed_from)
    monkeypatch.setattr(memory_limit, "memory_use", lambda: use)
    assert share_of_host(4) == pytest.approx(share * gib / 4, abs=2**20)


def test_memory_of_this_host_is_known() -> None:
    use = memory_use()
    assert 0 < use.share < 1 and use.limit_bytes > 2**28


# ---------------------------------------------------------------- cores


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of eight hardware threads in pairs, {0,4} {1,5} {2,6} {3,7}, all of them allowed."""
    for number in range(8):
        (tmp_path / f"siblings{number}").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(processors, "SIBLINGS", str(tmp_path / "siblings{}"))
    monkeypatch.setattr(processors, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def test_one_hardware_thread_of_each_core_counts(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cores() == (0, 1, 2, 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 6})
    assert usable_cores() == (2, 5)


@pytest.mark.parametrize(
    ("name", "text", "cores"),
    [
        ("cpu.max", "250000 100000", (0, 1)),
        ("cpu.max", "50000 100000", (0,)),  # a part of a core is one that is shared
        ("cpu.max", "max 100000", (0, 1, 2, 3)),
        ("cpu.max", "800000 100000", (0, 1, 2, 3)),
        ("cpu.max", "nonsense", (0, 1, 2, 3)),
        ("cpu/cpu.cfs_quota_us", "300000", (0, 1, 2)),
        ("cpu/cpu.cfs_quota_us", "-1", (0, 1, 2, 3)),
    ],
)
def test_a_quota_of_the_control_group_limits_them(
    host: Path, name: str, text: str, cores: tuple[int, ...]
) -> None:
    (host / "cpu").mkdir()
    (host / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (host / name).write_text(text + "\n")
    assert usable_cores() == cores
