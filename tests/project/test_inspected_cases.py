"""The tables of docs/inspection.md: their cases are tested, and all tested cases stand there."""

from __future__ import annotations

import re
from collections import Counter

from source_tree import ROOT

SECTION = re.compile(r"^## (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CASE = re.compile(r"^\| (.+?) \| .+? \| (?:(test_\w+) )?\|$", re.MULTILINE)


def documented_cases() -> list[tuple[str, str, str]]:
    """Section, case and test of every row of the page."""
    page = (ROOT / "docs/inspection.md").read_text()
    return [
        (section, case, test or "test_is_refused")
        for section, body in SECTION.findall(page)
        for case, test in CASE.findall(body)
        if case != "case"
    ]


def test_every_case_names_a_test_that_exists() -> None:
    cases = documented_cases()
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert [case for case in cases if case[2] not in there] == []
    kinds = Counter(kind for kind, *_ in cases)
    assert len(kinds) == 4 and min(kinds.values()) >= 10 and kinds.total() >= 95


def test_every_tested_checkpoint_stands_in_the_table() -> None:
    """By the keys of the tables of cases."""
    cases = {case for _, case, _ in documented_cases()}
    text = (ROOT / "tests/workloads/inspection/test_look.py").read_text()
    assert set(re.findall(r'^    "([a-z0-9-]+)": [(\[]', text, re.MULTILINE)) <= cases
