"""The kernel's counts of memory kills that a node's spawner follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.worker.memory_limit import memory_kills


def host(root: Path, group: str, counts: dict[str, int]) -> Path:
    """The files of a host that has these counts and puts this process in this group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, count in counts.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"nr_free_pages 5\noom_kill_disable 0\noom 77\noom_kill {count}\n")
    return root


MACHINE = {"proc/vmstat": 9}
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("group", "counts", "kills"),
    [
        ("0::/user/night\n", {f"{V2}/user/night/memory.events": 3, f"{V2}/memory.events": 4}, 3),
        ("0::/\n", {f"{V2}/memory.events": 4}, 4),  # a container that sees its own group alone
        ("4:memory:/a\n", {f"{V1}/a/memory.oom_control": 2, f"{V1}/memory.oom_control": 4}, 2),
        ("7:cpu,memory:/docker/x\n0::/\n", {f"{V1}/memory.oom_control": 1}, 1),
        ("5:cpu:/a\n0::/\n", {f"{V1}/a/memory.oom_control": 2}, 9),  # not told for its group
        ("", {}, 9),
        ("garbage\n::\n", {}, 9),
    ],
)
def test_the_count_of_the_own_group_goes_before_that_of_the_machine(
    tmp_path: Path, group: str, counts: dict[str, int], kills: int
) -> None:
    """For both versions of control groups, in a container and outside; the machine's is the last
    resort."""
    assert memory_kills(host(tmp_path, group, MACHINE | counts)) == kills


def test_a_machine_that_tells_nothing_has_no_kills(tmp_path: Path) -> None:
    """No number, and no error."""
    assert memory_kills(tmp_path) == 0
