"""Medians, ratios, spread, goals: what the table says follows from the turns."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as runner
from benchmarks import machine
from benchmarks.contender import Contender, take_turns
from benchmarks.figures import Goal, Line, Outcome, cpu_ratio, rates
from benchmarks.machine import code
from benchmarks.page import page, table
from benchmarks.setting import Setting


def test_a_ratio_is_the_median_over_turns_and_its_spread_their_extremes() -> None:
    line = Line(what="w", against="a", unit="x/s", ours=(2.0, 9.0, 4.0), theirs=(1.0, 3.0, 4.0))
    assert line.ratios == (2.0, 3.0, 1.0)
    assert line.ratio == 2.0
    assert line.spread == (1.0, 3.0)


def test_an_even_number_of_turns_takes_the_middle_of_two() -> None:
    line = Line(what="w", against="a", unit="x", ours=(1.0, 2.0), theirs=(1.0, 1.0))
    assert line.ratio == 1.5


@pytest.mark.parametrize(
    ("goal", "ratio", "met"),
    [
        (Goal(kind="at least", value=2), 2.0, True),
        (Goal(kind="at least", value=2), 1.99, False),
        (Goal(kind="at most", value=1.05), 1.05, True),
        (Goal(kind="at most", value=1.05), 1.06, False),
        (Goal(), 0.1, None),
    ],
)
def test_goals(goal: Goal, ratio: float, met: bool | None) -> None:
    assert goal.met(ratio) is met


@pytest.mark.parametrize(
    ("interval", "met"),
    [
        ((0.985, 1.015), True),
        ((0.979, 1.01), None),
        ((0.99, 1.03), None),
        ((1.021, 1.03), False),
        ((0.9, 0.97), False),
        (None, None),
    ],
)
def test_equality_is_claimed_by_an_interval_alone(
    interval: tuple[float, float] | None, met: bool | None
) -> None:
    assert Goal(kind="within", value=0.02).met(1.0, interval) is met


@pytest.mark.parametrize("many", range(6, 41))
def test_an_interval_leaves_no_more_out_than_95_percent_allow(many: int) -> None:
    """By the law of tosses itself, since its normal approximation gave 93 % for 8 and 11 turns."""
    line = Line(what="w", against="a", unit="x", ours=tuple(float(n) for n in range(many)))
    assert line.interval is not None
    left_out = int(line.interval[0])

    def coverage(below: int) -> float:
        return 1 - 2 * sum(math.comb(many, each) for each in range(below + 1)) / 2**many

    assert coverage(left_out) >= 0.95 > coverage(left_out + 1)


@pytest.mark.parametrize("many", [6, 15, 40])
def test_an_interval_of_the_median_holds_in_95_of_100(many: int) -> None:
    chance = random.Random(many)
    held = 0
    for _ in range(2000):
        drawn = tuple(chance.lognormvariate(0.0, 1.0) for _ in range(many))
        low, high = Line(what="w", against="a", unit="x", ours=drawn).interval or (0.0, 0.0)
        held += low <= 1.0 <= high
    assert held / 2000 >= 0.94


def test_few_turns_have_no_interval() -> None:
    """Five ratios lie on one side of their median in 1 case of 16."""
    assert Line(what="w", against="a", unit="x", ours=(1.0,) * 5).interval is None


def test_turns_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="3 turns beside 2"):
        Line(what="w", against="a", unit="x", ours=(1.0, 1.0, 1.0), theirs=(1.0, 1.0))


def test_rates_and_cpu_ratios_come_from_work_and_time() -> None:
    ours = [{"work": 10, "wall_s": 2.0, "cpu_s": 1.0}]
    theirs = [{"work": 10, "wall_s": 1.0, "cpu_s": 4.0}]
    assert rates(ours) == (5.0,)
    assert cpu_ratio(ours, theirs) == 4.0
    assert cpu_ratio(ours, [{"work": 10, "wall_s": 1.0}]) is None
    assert cpu_ratio(ours, [{"work": 10, "wall_s": 1.0, "cpu_s": None}]) is None


@given(st.lists(st.tuples(*[st.floats(0.1, 1e6)] * 2), min_size=1, max_size=9))
def test_the_ratio_lies_within_its_spread(turns: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*turns, strict=True)
    line = Line(what="w", against="a", unit="x", ours=ours, theirs=theirs)
    assert line.spread[0] <= line.ratio <= line.spread[1]


def outcome(**changes: object) -> dict[str, object]:
    lost = Line(
        what="things", against="peer", unit="x/s", ours=(1.0,), theirs=(2.0,),
        goal=Goal(kind="at least", value=2.0), note="a|b",
    )  # fmt: skip
    told = Outcome(
        name="n", title="Title", about="By `x`.", lines=(lost,), facts={"size": 7}, took_s=1.0
    )
    host = {
        "processor": "P", "cores": 2, "memory_gib": 4, "system": "S", "python": "3", "accelerator":
        "none", "fast_arithmetic": ["avx2"],
    }  # fmt: skip
    return json.loads(json.dumps(told.to_json())) | {
        "machine": host, "versions": {"nightgrid": {"torch": "2"}}, "finished_at": "now", **changes,
    }  # fmt: skip


def test_a_line_that_loses_stands_in_the_page() -> None:
    text = page([outcome()])
    (row,) = [line for line in text.splitlines() if line.startswith("| things")]
    assert "0.5" in row and "≥ 2: **no**" in row and "a\\|b" in row
    assert "By `x`." in text and "torch 2" in text
    assert table([outcome()]) in text


def test_a_page_says_whose_code_made_it() -> None:
    one = {"commit": "abc", "changed_files": 0}
    assert "One run of abc; 0 minutes" in page([outcome(code=one, run="1")] * 2)
    two_runs = page([outcome(code=one, run="1"), outcome(code=one, run="2")])
    assert "**Put together from 2 runs** of abc" in two_runs
    other = page([outcome(code=one, run="1"), outcome(code=one | {"commit": "d"}, run="1")])
    assert "**Put together" in other and "abc, d" in other
    dirty = page([outcome(code=one | {"changed_files": 3}, run="1")])
    assert "in no commit**: n." in dirty
    assert "an unknown commit" in page([outcome(code=None)])


def test_a_page_names_what_is_missing() -> None:
    assert "failed: other." in page([outcome()], ["n", "other"])
    assert "Not on this page" not in page([outcome()], ["n"])


def test_code_knows_its_commit_and_its_changes(tmp_path: Path) -> None:
    assert code(tmp_path) == {"commit": None, "changed_files": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text("page")
    found = code(tmp_path)
    assert len(found["commit"]) == 12 and found["changed_files"] == 0
    (tmp_path / "new.py").write_text("")
    assert code(tmp_path)["changed_files"] == 1


def test_an_open_goal_tells_the_turns_that_it_needs() -> None:
    goal = Goal(kind="within", value=0.02)
    settled = Line(what="w", against="a", unit="x", ours=(1.0,) * 20, theirs=(1.0,) * 20, goal=goal)
    assert settled.met is True and settled.turns_needed is None
    even = Line(
        what="w", against="a", unit="x", ours=(0.9, 1.0, 1.1) * 4, theirs=(1.0,) * 12, goal=goal
    )
    assert even.turns_needed is not None and 60 < even.turns_needed < 200
    row = table([outcome() | {"lines": [json.loads(json.dumps(_json_of(even)))]}])
    assert f"not settled: about {even.turns_needed} turns would do" in row


def _json_of(line: Line) -> object:
    told = Outcome(name="n", title="T", about="", lines=(line,), facts={}, took_s=1.0)
    return told.to_json()["lines"][0]


def test_a_busy_machine_is_told() -> None:
    assert "not alone" not in page([outcome(others=0.1)])
    assert "other programs used 0.3 of 2 cores" in page([outcome(others=0.3)])


@pytest.mark.parametrize("used", [(0.1, 0.7), (0.7, 0.1)])
def test_what_others_use_is_looked_for_before_and_after(
    used: tuple[float, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, done = iter(used), SimpleNamespace(TITLE="T", run=lambda setting: ((), {}))
    monkeypatch.setattr(runner, "cores_used", lambda: next(found))
    monkeypatch.setattr(runner, "takes_s", lambda name, quick: 1.0)
    monkeypatch.setattr(runner.importlib, "import_module", lambda name: done)
    setting = Setting(scratch=tmp_path, peers_python=None, optimum_python=None)
    assert runner.run_one("n", setting)["others"] == 0.7


def test_cores_used_are_those_of_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks over seconds, without those that other virtual machines had: 60 of 80 in half one."""
    ticks = iter([(1000, 100), (1080, 120)])
    clock = iter([10.0, 10.5])
    monkeypatch.setattr(machine, "wanted_and_stolen", lambda: next(ticks))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    assert machine.cores_used(0.5) == pytest.approx(1.2)


def test_a_goal_that_turns_meet_and_miss_is_not_met_clearly() -> None:
    goal = Goal(kind="at least", value=1.0)

    def told(*ours: float) -> str:
        line = Line(
            what="w", against="a", unit="x", ours=ours, theirs=(1.0,) * len(ours), goal=goal
        )
        row = table([outcome() | {"lines": [json.loads(json.dumps(_json_of(line)))]}])
        return row.splitlines()[-1].split(" | ")[-2]

    assert told(1.1, 1.2) == "≥ 1: yes"
    assert told(0.9, 1.2) == "≥ 1: yes, not clearly"
    assert told(0.7, 0.8, 1.2) == "≥ 1: **no**, not clearly"
    assert told(0.9, *[1.1] * 9) == "≥ 1: yes"  # which the interval leaves out
    assert told(*[0.9] * 3, *[1.1] * 7) == "≥ 1: yes, not clearly"


def test_a_machine_that_was_not_given_its_cores_is_told() -> None:
    assert "not alone" not in page([outcome(stolen=0.01)])
    assert "35% of the time was stolen" in page([outcome(stolen=0.35)])


PROGRAM = """
from benchmarks import machine
from benchmarks.contender import serve
import os, sys, time
print("noise of a library")
def turn():
    with open(sys.argv[1], "a") as log:
        log.write(sys.argv[2])
    return {"work": 3}
serve(turn)
"""


def test_contenders_take_turns_and_are_measured(tmp_path: Path) -> None:
    program, log = tmp_path / "program.py", tmp_path / "order"
    program.write_text(PROGRAM)
    started = [
        Contender(name, [sys.executable, program, log, name], tmp_path / f"{name}.log")
        for name in "ab"
    ]
    with started[0], started[1]:
        turns = take_turns(started, 3, warm_ups=1, fewer={"b": 2})
        assert started[0].ready() > 0  # again, without waiting
    assert log.read_text() == "ab" + "ab" + "ba" + "a"
    assert {name: len(found) for name, found in turns.items()} == {"a": 3, "b": 2}
    told = turns["a"][0]
    assert told["work"] == 3 and told["wall_s"] > 0 and told["peak_bytes"] > 2**20


def test_a_contender_that_dies_says_why(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('no such model')")
    with pytest.raises(RuntimeError, match="no such model"):
        Contender("x", [sys.executable, program], tmp_path / "log").ready()
