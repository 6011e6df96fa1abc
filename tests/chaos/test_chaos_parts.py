"""Parts of a night of faults: its laws catch what is planted, its plan and clock are sound."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chaos_invariants
import psutil
import pytest
from chaos_cluster import listening, processes_left
from chaos_files import Canaries
from chaos_plan import KINDS, ROT, Fault, counts, plan
from hypothesis import given
from hypothesis import strategies as st
from measurements import row
from patience import until

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement

WORKS = {"behaviour": "work"}


def worked(number: int = 0, **changes: Any) -> Measurement:
    """The row of a job that works and did, from second 990 to 1000."""
    return row(number, **{"parameters": WORKS, "started_at": 990.0, "ended_at": 1000.0, **changes})


def failed(reason: str, **changes: Any) -> Measurement:
    """A first attempt on hpu-1/0 by process 70 that came to nothing; the job goes on."""
    values = {"state": State.LOST, "reason": reason, "final": False, "worker_pid": 70}
    return worked(0, **{**values, **changes})


def fault(kind: str, at: float = 995.0, **changes: Any) -> Fault:
    """One on hpu-1/0 in its midst."""
    return Fault(**{"kind": kind, "at": at, "node": "hpu-1", "card": 0, **changes})


def everywhere(kind: str, at: float = 995.0, **changes: Any) -> Fault:
    """One that hit the driver or all of the cluster."""
    return Fault(**{"kind": kind, "at": at, **changes})


# ---------------------------------------------------------------- rows


def test_a_lost_row_is_caught() -> None:
    rows = [worked(0), failed("hung", job_id="b", attempt_id="b-1")]
    assert chaos_invariants.lost(rows, [rows[0].job_id, "b", "c"]) == ["b", "c"]


@given(copies=st.lists(st.integers(0, 5), max_size=4, unique=True))
def test_a_doubled_row_is_caught(copies: list[int]) -> None:
    rows = [worked(number) for number in range(6)]
    found = chaos_invariants.duplicated([*rows, *(rows[number] for number in copies)])
    attempts = {f"attempt {rows[number].attempt_id}" for number in copies}
    assert {text for text in found if text.startswith("attempt")} == attempts
    assert bool(found) == bool(copies)


def test_a_job_that_was_measured_twice_is_caught() -> None:
    again = worked(0, invocation_id="i2", attempt_id="x-2", attempt_number=2)
    (found,) = chaos_invariants.duplicated([worked(0), again])
    assert found.endswith("measured twice")


def test_a_job_that_did_not_end_as_it_must_is_caught() -> None:
    given_up = failed("the worker process died of SIGKILL", state=State.FAILED, final=True)
    hangs = worked(1, parameters={"behaviour": "hang"})
    assert len(chaos_invariants.wrong_ends([given_up, hangs], [])) == 2
    hit = [fault("kill a worker", pid=70)]
    assert len(chaos_invariants.wrong_ends([given_up, hangs], hit)) == 1


# ---------------------------------------------------------------- explanations

KILLED = "the worker process died of SIGKILL during x"
NODE = "node hpu-1 was lost: Ray declared it dead"
DRIVER = "its driver, process 41 on host, which held the run since noon, died while it ran"
EXPLAINED = [
    (failed(KILLED), fault("kill a worker", pid=70)),
    (failed("died of SIGSEGV"), fault("segfault a worker", pid=70)),
    # Dead before the attempt was sent to it, by a driver that had not heard of it.
    (failed(KILLED, started_at=999.0), fault("kill a worker", at=981.0, pid=70)),
    (failed("hung in warmup: no progress for 15 s"), fault("freeze a worker", at=991, pid=70)),
    (
        failed("stopped: the process 70 of this rank has been stopped by a signal for 5 s"),
        fault("freeze a worker", at=991, pid=70),
    ),
    (failed(NODE), fault("kill a raylet", card=None)),
    (failed(NODE, nodes=("hpu-1-7ace",)), fault("kill a raylet", card=None)),
    (failed(NODE), fault("freeze a raylet", at=960.0, until=992.0, card=None)),
    (failed(DRIVER, ended_at=990.0), everywhere("kill the driver", pid=41)),
    (failed(DRIVER, ended_at=990.0), everywhere("kill the driver under its supervisor", pid=41)),
    (failed(DRIVER), everywhere("kill the control store", at=940.0, until=1030.0)),
    (failed("the control store is gone"), everywhere("restart the head", until=1080.0)),
    (failed(NODE), everywhere("restart the cluster", at=980.0, until=1030.0)),
]


@pytest.mark.parametrize(("attempt", "cause"), EXPLAINED)
def test_what_a_fault_did_is_explained_by_it(attempt: Measurement, cause: Fault) -> None:
    assert chaos_invariants.explained(attempt, [cause])
    assert chaos_invariants.unexplained([attempt], [cause]) == []


@pytest.mark.parametrize(("attempt", "cause"), EXPLAINED)
def test_a_false_explanation_is_caught(attempt: Measurement, cause: Fault) -> None:
    lies = [
        dataclasses.replace(cause, at=cause.at + 3600, until=None),
        dataclasses.replace(cause, at=cause.at - 3600, until=None),
    ]
    if cause.node:
        lies.append(dataclasses.replace(cause, node="hpu-2"))
    if cause.card is not None:
        lies += [dataclasses.replace(cause, card=1), dataclasses.replace(cause, pid=71)]
    if cause.kind in chaos_invariants.OF_DRIVER:
        lies.append(dataclasses.replace(cause, pid=42))
    lies += [
        dataclasses.replace(cause, kind=kind)
        for kind in (*KINDS, ROT)
        if kind not in chaos_invariants.SAYS
    ]
    for lie in lies:
        assert not chaos_invariants.explained(attempt, [lie]), lie
    other = dataclasses.replace(attempt, reason="the card was not free")
    assert chaos_invariants.unexplained([other], [cause, *lies]) != []


def test_nothing_explains_what_no_fault_did() -> None:
    others = [cause for _, cause in EXPLAINED if cause.kind != "kill a worker"]
    lonely = failed(KILLED)
    assert chaos_invariants.unexplained([lonely], []) != []
    assert chaos_invariants.unexplained([lonely], others) != []


def test_every_kind_either_interrupts_or_is_harmless() -> None:
    assert {kind for kind in KINDS if not KINDS[kind].harmless} == set(chaos_invariants.SAYS)


@given(offset=st.sampled_from([7200, -7200]), begins=st.floats(0, 3000), at=st.floats(0, 3600))
def test_times_of_a_stepped_clock_become_true(offset: int, begins: float, at: float) -> None:
    step = everywhere("step the clock", at=begins, until=begins + 20, offset_s=offset)
    wrong = begins <= at <= begins + 20
    told = worked(0, started_at=5.0, ended_at=at + offset if wrong else at, recorded_at=None)
    (true,) = chaos_invariants.with_true_times([told], [step])
    assert true.ended_at == pytest.approx(at)
    assert (true.started_at, true.recorded_at) == (5.0, None)


def test_the_end_of_an_attempt_is_wrong_as_its_start_is() -> None:
    step = everywhere("step the clock", at=100.0, until=120.0, offset_s=-7200)
    told = worked(0, started_at=110.0 - 7200, ended_at=160.0 - 7200, recorded_at=160.0)
    (true,) = chaos_invariants.with_true_times([told], [step])
    assert (true.started_at, true.ended_at, true.recorded_at) == (110.0, 160.0, 160.0)


# ---------------------------------------------------------------- what is left behind


def test_a_process_that_is_left_over_is_caught() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)  # ray::NodeAgent"]
    process = subprocess.Popen(words)
    try:
        there = psutil.Process(process.pid)
        assert until(there.cmdline, 10)  # empty for a moment while the program is loaded
        (found,) = processes_left([there, psutil.Process()])
        assert str(process.pid) in found
    finally:
        process.kill()
        process.wait()
    assert processes_left([there]) == []


@pytest.mark.parametrize("owned", [True, False])
def test_a_port_that_is_left_open_is_caught(owned: bool) -> None:
    program = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | ({"NIGHTGRID_OWNER": "a.b"} if owned else {}),
        stdin=subprocess.PIPE,
    )
    try:
        there = psutil.Process(process.pid)
        assert until(lambda: there.net_connections("inet"), 60)
        assert len(listening([there])) == (1 if owned else 0)
    finally:
        process.communicate(b"\n")


def test_a_file_outside_that_is_touched_is_caught(tmp_path: Path) -> None:
    canaries = Canaries(tmp_path / "outside")
    assert canaries.harmed() == []
    first, second, _, nowhere = canaries.targets
    link = tmp_path / "link"
    link.symlink_to(nowhere)
    link.write_text("made through a link")
    with first.open("a") as file:
        file.write("!")
    second.unlink()
    names = " ".join(canaries.harmed())
    assert len(canaries.harmed()) == 3
    assert all(path.name in names for path in (first, second, nowhere))


# ---------------------------------------------------------------- the plan


@given(seed=st.integers(0, 2**32), kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1))
def test_a_plan_has_enough_of_each_kind_in_time_and_order(seed: int, kinds: set[str]) -> None:
    planned = plan(seed, 3600.0, 20.0, least=3, kinds=kinds)
    found = counts(kind for _, kind in planned)
    assert found.keys() == kinds and min(found.values()) >= 3
    times = [at for at, _ in planned]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 3600
    assert plan(seed, 3600.0, 20.0, least=3, kinds=sorted(kinds, reverse=True)) == planned


def test_the_page_lists_the_kinds_that_there_are() -> None:
    page = Path(__file__).parents[2].joinpath("docs/rehearsal.md").read_text(encoding="utf-8")
    table = page.partition("| fault | how |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()] == [*KINDS]
