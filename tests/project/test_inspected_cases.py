"""The table of docs/inspection.md: its cases are tested, and all cases of the tests stand in it."""

from __future__ import annotations

import re
from collections import Counter

from source_tree import ROOT

CASE = re.compile(r"\| (models|data|cards|hosts) \| (.+?) \| (.+?) \| (test_\w+) \|")


def test_every_case_names_a_test_that_exists() -> None:
    cases = CASE.findall((ROOT / "docs/inspection.md").read_text())
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert [case for case in cases if case[3] not in there] == []
    kinds = Counter(kind for kind, *_ in cases)
    assert len(kinds) == 4 and min(kinds.values()) >= 10 and kinds.total() >= 95


def test_every_tested_checkpoint_stands_in_the_table() -> None:
    """By the keys of the tables of cases."""
    cases = {case for _, case, _, _ in CASE.findall((ROOT / "docs/inspection.md").read_text())}
    text = (ROOT / "tests/workloads/inspection/test_look.py").read_text()
    assert set(re.findall(r'^    "([a-z0-9-]+)": [(\[]', text, re.MULTILINE)) <= cases
