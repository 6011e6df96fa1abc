"""A pytest plugin: write what each test came to, choose tests by a file, and name the test that
executes a line to coverage, here and in the processes that it starts.

The set-up of a fixture that tests share is executed for each of them, though it runs within the
first: it has a name of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Environment variables: where results are written, the file with the tests to run, in their
#: order, the name of the executing test for coverage, and the expression of the quick selection.
RESULTS, SELECTED, TEST, QUICK = (
    "DEFECTS_RESULTS",
    "DEFECTS_SELECTED",
    "DEFECTS_TEST",
    "DEFECTS_QUICK",
)


def _measure_as(name: str) -> None:
    os.environ[TEST] = name
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        if (measured := coverage.Coverage.current()) is not None:
            measured.switch_context(name)


def _write(record: dict[str, Any]) -> None:
    if to := os.environ.get(RESULTS):
        with Path(to).open("a") as file:
            file.write(json.dumps(record) + "\n")


def _shared(item: pytest.Item) -> list[str]:
    """Names of the fixtures of a test that other tests have too."""
    defined = getattr(item, "_fixtureinfo", None)
    found = defined.name2fixturedefs if defined else {}
    return sorted(_name(each) for defs in found.values() for each in defs if _is_shared(each))


def _is_shared(fixture: Any) -> bool:
    return fixture.scope != "function"


def _name(fixture: Any) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if selected := os.environ.get(SELECTED):
        order = {name: at for at, name in enumerate(Path(selected).read_text().splitlines())}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )
        return
    if expression := os.environ.get(QUICK):
        from _pytest.mark import MarkMatcher
        from _pytest.mark.expression import Expression

        quick = Expression.compile(expression)
        for item in items:
            is_quick = quick.evaluate(MarkMatcher.from_markers(item.iter_markers()))
            _write({"test": item.nodeid, "quick": is_quick, "fixtures": _shared(item)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _measure_as(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    outer = os.environ.get(TEST, "")
    if _is_shared(fixturedef):
        _measure_as(_name(fixturedef))
    try:
        return (yield)
    finally:
        _measure_as(outer)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write({"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0})
