"""The tool that plants defects tells what a suite catches from what it does not."""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from defects.__main__ import quick_expression, summary  # noqa: E402 - tools/ is no package
from defects.executed import Project, Record, record  # noqa: E402
from defects.mutations import Mutation, chosen, is_defect, mutations  # noqa: E402
from defects.planting import plant, results  # noqa: E402

PRODUCT = """import subprocess
import sys

LIMIT = 5


def difference(a: int, b: int) -> int:
    return a - b


def apart() -> int:
    return subprocess.run([sys.executable, "-m", "tiny.other"]).returncode


def met_and_not_held(a: int) -> int:
    return a + LIMIT


def never_met(a: int) -> int:
    return a * 2
"""
OTHER = """import sys


def status() -> int:
    return 7


if __name__ == "__main__":
    sys.exit(status())
"""
TESTS = """from pathlib import Path
import pytest
from tiny import product


@pytest.fixture(scope="module")
def shared() -> int:
    return product.difference(2, 1)


def test_first(shared: int) -> None:
    assert product.met_and_not_held(1)


def test_that_fails_by_chance() -> None:
    once = Path(__file__).with_name("once")
    planted = "(a - LIMIT)" in Path(product.__file__).read_text()
    if product.met_and_not_held(1) and planted and not once.exists():
        once.touch()
        assert not planted


def test_second(shared: int) -> None:
    assert shared == 1


@pytest.mark.slow
def test_apart() -> None:
    assert product.apart() == 7


def test_that_fails_without_a_defect() -> None:
    assert product.difference(1, 2) == 1
"""
LAST = """from tiny.product import LIMIT

assert LIMIT != 6


def test_last() -> None:
    assert LIMIT
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A package whose functions are held, met and not held, or never met by its tests."""
    root = tmp_path / "tree"
    for name, text in {
        "tiny/product.py": PRODUCT,
        "tiny/other.py": OTHER,
        "tests/test_product.py": TESTS,
        "tests/test_the_last.py": LAST,
        "pytest.ini": "[pytest]\nmarkers = slow: takes long\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Project(root=root, packages=("tiny",), quick="not slow", libraries=("pytest",))


def named(project: Project, after: str) -> Mutation:
    found = (each for name, text in project.modules().items() for each in mutations(text, name))
    return next(each for each in found if each.after.strip() == after)


@pytest.mark.slow
def test_a_defect_meets_the_tests_that_execute_its_line(project: Project, tmp_path: Path) -> None:
    before = project.modules()
    record(project, project.test_files(), tmp_path / "executed", only_quick=False)
    expected = {
        "return (a + b)": ("tests/test_product.py::test_second", "caught", "caught"),
        "return 8": ("tests/test_product.py::test_apart", "survived", "caught"),
        "return (a - LIMIT)": ("", "survived", "survived"),
        "LIMIT = 50": ("", "survived", "survived"),
        "LIMIT = 6": ("tests/test_the_last.py", "caught", "caught"),
        "return (a / 2)": ("", "not executed", "not executed"),
    }
    defects = {after: named(project, after) for after in expected}
    written = tmp_path / "results.jsonl"
    plant(project, defects.values(), Record(tmp_path / "executed"), written)

    found = results(written)
    for after, (by, quick, whole) in expected.items():
        key = defects[after].key
        assert (found[key, "quick"].outcome, found[key, "whole"].outcome) == (quick, whole), after
        assert found[key, "whole"].by == by
    assert project.modules() == before
    lines = written.read_text()
    plant(project, defects.values(), Record(tmp_path / "executed"), written)
    assert written.read_text() == lines
    text = "\n".join(summary(list(found.values()), {defects["LIMIT = 50"].key: "no matter"}))
    assert "6 defects, 3 caught, 3 survived" in text
    assert "equivalent: no matter" in text


@pytest.mark.slow
def test_imports_tell_what_no_recording_does(project: Project, tmp_path: Path) -> None:
    defects = [named(project, after) for after in ("return (a + b)", "return 8", "return (a / 2)")]
    written = tmp_path / "results.jsonl"
    plant(project, defects, Record(tmp_path / "executed", project), written)
    whole = [each.outcome for each in results(written).values() if each.suite == "whole"]
    assert whole == ["caught", "caught", "survived"]


SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("orchestrator/scheduler/*.py"), *ROOT.glob("workloads/devices/*.py")]
}


@cache
def _found(path: str) -> list[Mutation]:
    return mutations(SOURCES[path], path)


@given(st.sampled_from(sorted(SOURCES)), st.data())
def test_a_mutation_changes_one_line(path: str, data: st.DataObject) -> None:
    source, found = SOURCES[path], _found(path)
    if not found:
        return
    mutation = data.draw(st.sampled_from(found))
    changed = mutation.applied(source).splitlines()
    differing = [at for at, line in enumerate(source.splitlines(), 1) if changed[at - 1] != line]
    assert differing in ([mutation.line], [])
    assert not (is_defect(mutation, source) and not differing)


@given(st.integers(0, 99))
def test_folders_take_turns(seed: int) -> None:
    modules = {"a/product.py": PRODUCT, "b/product.py": PRODUCT, "b/other.py": OTHER}
    drawn = chosen(modules, 6, seed)
    assert drawn == chosen(modules, 6, seed)
    assert Counter(os.path.dirname(each.path) for each in drawn) == {"a": 3, "b": 3}
    assert len({(each.path, each.line) for each in drawn}) == 6
    assert len({each.key for each in drawn}) == 6


def test_the_quick_selection_is_that_of_the_makefile() -> None:
    assert quick_expression((ROOT / "Makefile").read_text()) == "not ray and not slow and not real"
    with pytest.raises(ValueError, match="no target"):
        quick_expression("test:\n\tpytest\n")
