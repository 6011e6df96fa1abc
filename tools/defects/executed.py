"""Record the tests that execute each line of the product, one test file after the other.

A file whose record is complete is not run again, so that an interrupted recording goes on where it
stopped. A record holds what coverage.py measured, in this process and in those that tests start,
and what each test came to, with its time.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from coverage import CoverageData

from defects import plugin
from defects.imports import Imports, mirrored
from defects.mutations import Mutation, lines_of_functions

#: What a test takes that was never timed.
_UNKNOWN_S = 0.1
HERE = Path(__file__).resolve().parent
_RC = """[run]
parallel = true
data_file = {data}
source = {sources}
context = ${{{test}-}}
patch = _exit
disable_warnings = no-data-collected,module-not-measured,module-not-imported,no-sysmon-context
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A copy of the tree to plant defects in, its packages, and the marks of quick tests."""

    root: Path
    packages: tuple[str, ...]
    quick: str
    libraries: tuple[str, ...] = ()  # that tests import and nothing is planted in

    def modules(self) -> dict[str, str]:
        """The source of every module of the product by path."""
        paths = (path for name in self.packages for path in (self.root / name).rglob("*.py"))
        return {str(path.relative_to(self.root)): path.read_text() for path in sorted(paths)}

    def test_files(self) -> list[str]:
        found = (path.relative_to(self.root) for path in (self.root / "tests").rglob("test_*.py"))
        return sorted(str(path) for path in found)

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of pytest: this copy before any other, and no measuring but ours."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("COVERAGE_", "DEFECTS_"))}
        path = [str(self.root), str(HERE.parent), kept.get("PYTHONPATH", "")]
        return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


PYTEST = ("-q", "-p", "defects.plugin")


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *PYTEST, *arguments]


@dataclass(slots=True, eq=False)
class Test:
    """A test as it was recorded."""

    name: str
    quick: bool = True
    fixtures: tuple[str, ...] = ()
    seconds: float = 0.0
    outcomes: set[str] = field(default_factory=set)
    imports: int | None = None  # that lead to the module of a defect; None: its lines are recorded

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def passed(self) -> bool:
        return self.outcomes == {"passed"}


def record(project: Project, files: Iterable[str], to: Path, *, only_quick: bool) -> None:
    """Run test files under coverage, each in a pytest of its own, and keep what they executed."""
    for name in files:
        place = to / name.replace("/", ".")
        wanted = "quick" if only_quick else "all"
        if (place / "all").exists() or (place / wanted).exists():
            continue
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        place.chmod(0o777)  # tests give up their rights, too
        (place / "file.txt").write_text(name)
        sources = ",".join(str(project.root / package) for package in project.packages)
        rc = place / "coveragerc"
        rc.write_text(_RC.format(data=place / "coverage", sources=sources, test=plugin.TEST))
        environment = project.environment(
            COVERAGE_PROCESS_START=str(rc),
            **{plugin.RESULTS: str(place / "tests.jsonl"), plugin.QUICK: project.quick},
        )
        environment["PYTHONPATH"] += os.pathsep + str(HERE / "startup")
        selection = ["-m", project.quick] if only_quick else []
        with (place / "log.txt").open("w") as log:
            done = subprocess.run(
                pytest_command("-p", "no:cacheprovider", *selection, name),
                cwd=project.root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        _combine(place, rc)
        print(f"{name}: exit status {done.returncode}", flush=True)
        (place / wanted).touch()


def _combine(place: Path, rc: Path) -> None:
    """Merge the data of all processes of a recording into one file."""
    command = [sys.executable, "-m", "coverage", "combine", "-q", "--rcfile", str(rc), str(place)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and "No data to combine" not in done.stdout + done.stderr:
        raise RuntimeError(f"{place}: coverage combine said {done.stdout}{done.stderr}")


def collected(project: Project, to: Path) -> list[Test]:
    """All tests of a project, and whether they are quick; pytest is asked once."""
    found = to / "collected.jsonl"
    if not found.exists():
        to.mkdir(parents=True, exist_ok=True)
        partial = found.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        environment = project.environment(
            **{plugin.RESULTS: str(partial), plugin.QUICK: project.quick}
        )
        command = pytest_command("-p", "no:cacheprovider", "--collect-only")
        done = subprocess.run(
            command, cwd=project.root, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"pytest cannot collect the tests: {done.stdout[-2000:]}")
        partial.rename(found)
    lines = map(json.loads, found.read_text().splitlines())
    return [
        Test(each["test"], quick=each["quick"], seconds=_UNKNOWN_S, outcomes={"passed"})
        for each in lines
        if "quick" in each
    ]


class Record:
    """Read recordings: which tests execute a line."""

    def __init__(self, place: Path, project: Project | None = None, *, near: bool = False) -> None:
        """Read what is recorded in a folder; of test files of ``project`` that are not, their
        imports tell; ``near`` leaves out those that lie far from the module."""
        self._near = near
        found = sorted(path.parent for path in place.glob("*/file.txt"))
        self._places = {path: (path / "file.txt").read_text() for path in found}
        self.files = set(self._places.values())
        self.tests: dict[str, Test] = {}
        for line in self._lines():
            test = self.tests.setdefault(line["test"], Test(line["test"]))
            if "quick" in line:
                test.quick, test.fixtures = line["quick"], tuple(line["fixtures"])
            if "outcome" in line:
                test.outcomes.add(line["outcome"])
                test.seconds += line["seconds"]
        self._unrecorded: dict[str, list[Test]] = {}
        self._imports = None
        if project is not None and not self.files.issuperset(project.test_files()):
            self._imports = Imports(project.root, project.packages)
            for test in collected(project, place):
                if test.file not in self.files:
                    self._unrecorded.setdefault(test.file, []).append(test)
        self._by_fixture: dict[str, set[str]] = {}
        for test in self.tests.values():
            for each in test.fixtures:
                self._by_fixture.setdefault(each, set()).add(test.name)

    def _lines(self) -> Iterator[dict]:
        for place in self._places:
            if (place / "tests.jsonl").exists():
                yield from map(json.loads, (place / "tests.jsonl").read_text().splitlines())

    def executing(self, defect: Mutation, source: str) -> list[Test]:
        """The tests that execute the line of a defect, those with short runs first, then the others
        of their files, since what is kept from test to test is executed within the first.

        What a line of a module's own, such as a constant, has made is executed by the tests that
        call the functions of the module; a module without any stands for all who import it.
        """
        contexts = self._contexts(defect.path)
        if not defect.at_import:
            names = set(contexts.get(defect.line, ()))
        else:
            inside = lines_of_functions(ast.parse(source))
            names = set().union(*(found for at, found in contexts.items() if at in inside))
        names |= {name for each in names for name in self._by_fixture.get(each, ())}
        files = {name.partition("::")[0] for name in names}
        if defect.at_import:
            files |= self._importing(defect.path)
        tests = (test for test in self.tests.values() if test.passed and test.file in files)
        known = sorted(tests, key=lambda test: (test.name not in names, test.seconds))
        found = self._imports.executing(defect.path) if self._imports else {}
        name = Path(defect.path).stem.strip("_")
        others = sorted(
            (name not in file, imports, file)  # one that is named as the module comes first
            for file, imports in found.items()
            if file in self._unrecorded
            and (not self._near or name in file or imports <= 1 or mirrored(file, defect.path))
        )
        for _, imports, file in others:
            for test in self._unrecorded[file]:
                test.imports = imports
                known.append(test)
        return known

    def _importing(self, path: str) -> set[str]:
        """The test files in whose run a module was imported."""
        return {file for place, file in self._places.items() if self._measured(place, path)}

    @lru_cache(maxsize=8)  # noqa: B019 - one record a process
    def _contexts(self, path: str) -> dict[int, set[str]]:
        merged: dict[int, set[str]] = {}
        for place in self._places:
            for line, contexts in self._measured(place, path).items():
                merged.setdefault(line, set()).update(contexts)
        return merged

    @staticmethod
    def _measured(place: Path, path: str) -> dict[int, list[str]]:
        if not (place / "coverage").exists():
            return {}
        data = CoverageData(basename=str(place / "coverage"))
        data.read()
        measured = next((m for m in data.measured_files() if m.endswith(f"/{path}")), None)
        return data.contexts_by_lineno(measured) if measured else {}
