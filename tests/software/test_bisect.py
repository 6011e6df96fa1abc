"""The version in which a job became slower is found by the test of ``compare``."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import row
from planted_worker import SOURCE, STEPS
from wheels import make_wheel, use_only

from orchestrator.cli.main import main
from orchestrator.core.errors import NotComparable
from orchestrator.software import bisect
from orchestrator.software.bisect import Bisector, Step, with_version
from orchestrator.store.store import Store

VERSIONS = [f"1.{number}" for number in range(9)]


class Machine:
    """Speeds of versions, the first slow one and later ones ten per cent slower, with noise."""

    def __init__(self, first_slow: str, *, noise: float = 0.01, broken: Sequence[str] = ()) -> None:
        self._slow = VERSIONS[VERSIONS.index(first_slow) :] if first_slow else []
        self._noise, self._broken = noise, broken
        self._random = random.Random(first_slow)
        self.runs: Counter[str] = Counter()

    def speed(self, version: str) -> float:
        if version in self._broken:
            raise NotComparable("it cannot be installed")
        self.runs[version] += 1
        drift = 1 - 0.001 * self.runs.total()  # the machine slows down meanwhile
        speed = 90.0 if version in self._slow else 100.0
        return speed * drift * self._random.gauss(1, self._noise)


@given(st.sampled_from(VERSIONS[1:]))
def test_the_first_slow_version_is_found(first_slow: str) -> None:
    answer = Bisector(Machine(first_slow).speed).find(VERSIONS)
    before = VERSIONS[VERSIONS.index(first_slow) - 1]
    assert (answer.good, answer.bad, answer.skipped) == (before, first_slow, ())
    assert answer.change.high is not None and answer.change.high < 1


def test_more_processes_are_run_where_few_do_not_decide() -> None:
    quiet, loud = Machine("1.5", noise=0.002), Machine("1.5", noise=0.03)
    for machine in (quiet, loud):
        assert Bisector(machine.speed).find(VERSIONS).bad == "1.5"
    assert quiet.runs["1.0"] < loud.runs["1.0"]


def test_versions_of_one_speed_are_not_bisected() -> None:
    machine = Machine("")
    with pytest.raises(NotComparable, match=r"1\.8 is not slower than 1\.0"):
        Bisector(machine.speed).find(VERSIONS)
    assert set(machine.runs) == {"1.0", "1.8"}


def test_a_version_that_cannot_be_measured_is_passed_over() -> None:
    steps: list[Step] = []
    machine = Machine("1.4", broken=["1.3", "1.4"])
    answer = Bisector(machine.speed, report=steps.append).find(VERSIONS)
    assert (answer.good, answer.bad, answer.skipped) == ("1.2", "1.5", ("1.3", "1.4"))
    assert not answer.sure
    assert {step.version for step in steps if step.ratio is None} == {"1.3", "1.4"}


def test_a_package_takes_the_place_of_its_other_version() -> None:
    assert with_version("default", "a", "2") == "a==2"
    assert with_version("b==1 a==1", "a", "2") == "a==2 b==1"


@pytest.mark.slow
def test_the_command_finds_a_wheel_with_a_planted_slow_down(tmp_path, monkeypatch, capsys) -> None:
    """By the fastest CPU times of real processes, so that a busy machine does not matter."""
    for version, slower in (("1.9", 1), ("1.10", 2), ("2.0", 2)):
        source = SOURCE.format(steps=slower * STEPS // 2)
        make_wheel(tmp_path / "wheels", "planted", version, source)
    use_only(tmp_path / "wheels", tmp_path / "cache", monkeypatch)
    monkeypatch.setattr(bisect, "WORKER", "planted_worker:PlantedWorker")
    measured = row(0, workload="text-encoding", emulated=True, cards=1, batch_size=1)
    with Store(tmp_path, "night") as store:
        store.append(measured)
    command = ["bisect", "night", measured.job_id, "--results", str(tmp_path), "--json"]
    versions = ["--processes", "2", "--package", "planted", "--good", "1.9", "--bad", "2.0"]
    assert main([*command, *versions]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["good"], answer["bad"], answer["skipped"]) == ("1.9", "1.10", [])
    assert answer["ratio"] == pytest.approx(1 / 2, abs=0.1)
    versions[-1] = "3.0"
    assert main([*command, *versions]) == 2
    assert (
        "planted has no version 3.0 here; the newest are 1.9, 1.10, 2.0" in capsys.readouterr().err
    )
