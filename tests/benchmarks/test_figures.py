"""Medians, ratios, spread, goals: what the table says follows from the turns."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contender import Contender, take_turns
from benchmarks.figures import Goal, Line, Outcome
from benchmarks.machine import code
from benchmarks.page import page, table


def line(*ours: float, theirs: tuple[float, ...] = (), goal: Goal | None = None) -> Line:
    goals = {} if goal is None else {"goal": goal}
    return Line(what="w", against="a", unit="x", ours=ours, theirs=theirs, **goals)


def test_a_ratio_is_the_median_over_turns_and_its_spread_their_extremes() -> None:
    """Turn by turn, not median by median: 2/1, 9/3, 4/4."""
    turns = line(2.0, 9.0, 4.0, theirs=(1.0, 3.0, 4.0))
    assert (turns.ratios, turns.ratio, turns.spread) == ((2.0, 3.0, 1.0), 2.0, (1.0, 3.0))
    assert line(1.0, 2.0, theirs=(1.0, 1.0)).ratio == 1.5
    with pytest.raises(ValueError, match="3 turns beside 2"):
        line(1.0, 1.0, 1.0, theirs=(1.0, 1.0))


@pytest.mark.parametrize(
    ("kind", "value", "ratio", "interval", "met"),
    [
        ("at least", 2, 2.0, None, True),
        ("at least", 2, 1.99, None, False),
        ("at most", 1.05, 1.05, None, True),
        ("at most", 1.05, 1.06, None, False),
        # Equality is claimed by an interval alone, all of which lies within.
        ("within", 0.02, 1.0, (0.985, 1.015), True),
        ("within", 0.02, 1.0, (0.979, 1.01), None),
        ("within", 0.02, 1.0, (0.99, 1.03), None),
        ("within", 0.02, 1.0, (1.021, 1.03), False),
        ("within", 0.02, 1.0, (0.9, 0.97), False),
        ("within", 0.02, 1.0, None, None),
    ],
)
def test_goals_on_both_sides_of_their_edges(kind, value, ratio, interval, met) -> None:
    assert Goal(kind=kind, value=value).met(ratio, interval) is met
    assert Goal().met(0.1) is None


@pytest.mark.parametrize("many", range(6, 41))
def test_an_interval_leaves_no_more_out_than_95_percent_allow(many: int) -> None:
    """By the law of tosses itself, since its normal approximation gave 93 % for 8 and 11 turns."""
    interval = line(*map(float, range(many))).interval
    assert interval is not None
    left_out = int(interval[0])

    def coverage(below: int) -> float:
        return 1 - 2 * sum(math.comb(many, each) for each in range(below + 1)) / 2**many

    assert coverage(left_out) >= 0.95 > coverage(left_out + 1)
    # Five ratios lie on one side of their median in 1 case of 16.
    assert line(*[1.0] * 5).interval is None


def outcome(**changes: object) -> dict[str, Any]:
    goal = Goal(kind="at least", value=2.0)
    sides = {"against": "peer", "unit": "x/s", "ours": (1.0,), "theirs": (2.0,)}
    lost = Line(what="things", goal=goal, note="a|b", **sides)
    made = Outcome(name="n", title="T", about="By `x`.", lines=(lost,), facts={}, took_s=1.0)
    names = ("processor", "system", "python", "accelerator", "fast_arithmetic")
    host = dict.fromkeys(names, "P") | {"cores": 2, "memory_gib": 4}
    versions = {"nightgrid": {"torch": "2"}}
    whole = made.to_json() | {"machine": host, "versions": versions, "finished_at": "now"}
    return json.loads(json.dumps(whole)) | changes


def test_a_page_has_the_lines_that_lose_and_names_what_is_missing() -> None:
    text = page([outcome()], ["n", "other"])
    (row,) = [line for line in text.splitlines() if line.startswith("| things")]
    assert "0.5" in row and "≥ 2: **no**" in row and "a\\|b" in row
    assert "torch 2" in text and table([outcome()]) in text
    assert "failed: other." in text
    assert "Not on this page" not in page([outcome()], ["n"])


CODE = {"commit": "abc", "changed_files": 0}


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ([{"code": CODE, "run": "1"}] * 2, ["One run of abc; 0 minutes"]),
        ([{"code": CODE, "run": run} for run in "12"], ["**Put together from 2 runs** of abc"]),
        ([{"code": CODE | {"commit": c}} for c in ("abc", "d")], ["**Put together", "abc, d"]),
        ([{"code": CODE | {"changed_files": 3}}], ["in no commit**: n."]),
        ([{"code": None}], ["an unknown commit"]),
        ([{"others": 0.3}], ["other programs used 0.3 of 2 cores"]),
        # A virtual machine can be starved by its neighbours with no load to be seen.
        ([{"stolen": 0.35}], ["35% of the time was stolen"]),
    ],
)
def test_a_page_says_whose_code_made_it_and_who_disturbed_it(changes, texts) -> None:
    text = page([outcome(**one) for one in changes])
    assert all(part in text for part in texts)
    assert "not alone" not in page([outcome(others=0.1, stolen=0.01)])


def test_code_knows_its_commit_and_its_changes(tmp_path: Path) -> None:
    """The page itself is no change; a new file is."""
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


def row_of(line: Line) -> str:
    made = Outcome(name="n", title="T", about="", lines=(line,), facts={}, took_s=1.0).to_json()
    return table([outcome(**json.loads(json.dumps(made)))]).splitlines()[-1]


def test_an_open_goal_tells_the_turns_that_it_needs() -> None:
    goal = Goal(kind="within", value=0.02)
    settled = line(*[1.0] * 20, theirs=(1.0,) * 20, goal=goal)
    assert settled.met is True and settled.turns_needed is None
    even = line(*[0.9, 1.0, 1.1] * 4, theirs=(1.0,) * 12, goal=goal)
    assert even.turns_needed is not None and 60 < even.turns_needed < 200
    assert f"not settled: about {even.turns_needed} turns would do" in row_of(even)


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ([1.1, 1.2], "yes"),
        ([0.9, 1.2], "yes, not clearly"),  # without an interval every turn counts, with one its end
        ([0.7, 0.8, 1.2], "**no**, not clearly"),
        ([0.9, *[1.1] * 9], "yes"),  # which the interval leaves out
        ([*[0.9] * 3, *[1.1] * 7], "yes, not clearly"),
    ],
)
def test_a_goal_that_turns_meet_and_miss_is_not_met_clearly(ours: list[float], told: str) -> None:
    goal = Goal(kind="at least", value=1.0)
    row = row_of(line(*ours, theirs=(1.0,) * len(ours), goal=goal))
    assert row.split(" | ")[-2] == f"≥ 1: {told}"


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
