"""Grids of very many keys, values and experiments: work grows with the file, text does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from grid_cases import HEAD

from orchestrator.core.errors import GridError
from orchestrator.core.topology import assumed_servers
from orchestrator.grid.diagnostics import summed_up
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan

ONE = f"{HEAD}  - name: e\n"


def listed(setting: str, value: str, count: int) -> str:
    """An experiment with an axis; ``value`` has the number of a value for ``#``."""
    values = ", ".join(value.replace("#", str(number)) for number in range(1, count + 1))
    return f"{ONE}    {setting}: {{batch_size: [{values}]}}\n"


def repeated(line: str, count: int, head: str = HEAD) -> str:
    return head + "".join(line.replace("#", str(number)) + "\n" for number in range(count))


GRIDS: dict[str, Callable[[int], str]] = {
    "unknown keys": lambda count: repeated("    key#: 1", count, ONE),
    "a key twice": lambda count: repeated("    cards: 1", count, ONE),
    "values": lambda count: listed("axes", "#", count),
    "wrong values": lambda count: listed("axes", "x#", count),
    "refused entries": lambda count: repeated("      - 1", count, f"{ONE}    exclude:\n"),
    "exclusions": lambda count: repeated(
        "      - {batch_size: #, cards: 1}", count, listed("axes", "#", count) + "    exclude:\n"
    ),
    "experiments": lambda count: repeated("  - {name: e#}", count),
    "missing models": lambda count: repeated("  - {name: e#, model: m#}", count),
}


def planned(text: str) -> list[str]:
    """The notes of a grid's plan, or its problems."""
    try:
        grid = parse_grid(text.encode(), "g.yaml")
    except GridError as error:
        return [problem.message for problem in error.problems]
    return list(make_plan(grid, assumed_servers(grid.accelerators()), []).notes)


def lines_for(text: str) -> int:
    """Lines of Python that planning a grid executes, those of loops each time."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return trace

    sys.settrace(trace)
    try:
        planned(text)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_the_work_of_a_plan_grows_no_faster_than_its_grid(grid: Callable[[int], str]) -> None:
    planned(grid(10))  # imports, and fills what is memoised
    assert lines_for(grid(300)) < 2.2 * lines_for(grid(150))


@pytest.mark.parametrize(
    ("grid", "count", "last"),
    [
        ("unknown keys", 6_000, "and 5,900 more problems"),
        ("a key twice", 2_001, "and 1,900 more problems"),
        ("wrong values", 4_000, "and 3,900 values that were not checked"),
        ("missing models", 1_000, "and 900 values that were not checked"),
        ("experiments", 2_000, "and 1,994 more like this"),
    ],
)
def test_notes_and_problems_of_one_kind_are_summed_up(grid: str, count: int, last: str) -> None:
    texts = planned(GRIDS[grid](count))
    assert last in texts and len(texts) <= 101


def test_notes_of_another_kind_are_not_summed_up_with_many_of_one() -> None:
    many = [f"dataset d{number}.json: 1 of 9 records are left out" for number in range(9)]
    *first, counted, other = summed_up([*many[:5], "fine-tuning learns the text", *many[5:]])
    assert first == many[:5] and counted == "and 4 more like this"
    assert other == "fine-tuning learns the text"
