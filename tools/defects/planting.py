"""Plant defects into a copy of the tree, one after the other, and let the tests look for them.

A defect meets only the tests that execute its line, quick ones before all others and short ones
before long ones. The first that fails ends it, if it passes without the defect and fails with it
again. Every result is a line of a file, so that an interrupted run goes on with the next defect.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from defects import plugin
from defects.executed import Project, Record, Test, pytest_command
from defects.imports import mirrored
from defects.mutations import Mutation

#: A run of tests may take this many times as long as when it was recorded, and a minute.
PATIENCE = 20.0
_START_S = 60.0
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a defect: ``caught``, ``survived``, or ``not executed`` by any test."""

    key: str
    kind: str
    path: str
    suite: str
    outcome: str
    by: str
    met: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    status: int
    failed: str
    finished: int


def results(path: Path) -> dict[tuple[str, str], Result]:
    """The results of a file by defect and suite."""
    if not path.exists():
        return {}
    found = (Result(**json.loads(line)) for line in path.read_text().splitlines())
    return {(each.key, each.suite): each for each in found}


def plant(
    project: Project,
    defects: Iterable[Mutation],
    record: Record,
    to: Path,
    *,
    suites: Sequence[str] = ("quick", "whole"),
    first: frozenset[str] = frozenset(),
) -> None:
    """Plant defects and write a result for each and each suite; ``first`` names tests to run
    before all others. The whole suite catches what its quick tests catch."""
    for defect in defects:
        known = results(to)
        executing = record.executing(defect, (project.root / defect.path).read_text())
        caught_by = ""
        for suite in suites:
            if (old := known.get((defect.key, suite))) is not None:
                caught_by = caught_by or old.by
                continue
            tests = [test for test in executing if test.quick == (suite == "quick")]
            began = time.monotonic()
            if tests and not caught_by:
                for some in _stages(tests, defect.path, first):
                    caught_by = caught_by or _catching(project, defect, some, to.parent)
            outcome = "caught" if caught_by else "survived" if tests else "not executed"
            result = Result(
                key=defect.key,
                kind=defect.kind,
                path=defect.path,
                suite=suite,
                outcome=outcome,
                by=caught_by,
                met=len(tests),
                seconds=round(time.monotonic() - began, 1),
            )
            with to.open("a") as file:
                file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
            print(f"{suite:5} {outcome:12} {defect.key}", flush=True)


def _catching(project: Project, defect: Mutation, tests: list[Test], work: Path) -> str:
    """The test that catches a planted defect, by name; empty if none does."""
    tests = _by_file(tests)
    while tests:
        run = _with(project, defect, tests, work)
        if run.status in (0, 5):
            return ""
        at = next((at for at, test in enumerate(tests) if test.name == run.failed), 0)
        sound = _pytest(project, tests[at : at + 1], work).status == 0
        if sound and _with(project, defect, tests[at : at + 1], work).status not in (0, 5):
            return run.failed or ("no end" if run.status < 0 else "collection of the tests")
        tests = tests[at + 1 :]  # it fails without the defect, or by chance
    return ""


def _with(project: Project, defect: Mutation, tests: list[Test], work: Path) -> _Run:
    """Run tests while the defect is planted."""
    path = project.root / defect.path
    source = path.read_text()
    try:
        _write(path, defect.applied(source))
        return _pytest(project, tests, work)
    finally:
        _write(path, source)


def _stages(tests: list[Test], path: str, first: frozenset[str]) -> Iterator[list[Test]]:
    """Tests that import a module themselves, and those of the folder that mirrors its own, catch
    most of its defects: the files of all others are collected only if those do not."""
    wanted = (
        lambda test: test.name in first,
        lambda test: test.imports is not None and test.imports <= 1,
        lambda test: mirrored(test.file, path),
        lambda test: True,
    )
    for among in wanted:
        yield from filter(None, [[test for test in tests if among(test)]])
        tests = [test for test in tests if not among(test)]


def _by_file(tests: list[Test]) -> list[Test]:
    """Keep the tests of a file together, so that what they share is made once; the order of files
    and within files stays."""
    order: dict[str, list[Test]] = {}
    for test in tests:
        order.setdefault(test.file, []).append(test)
    return [test for group in order.values() for test in group]


def _write(path: Path, source: str) -> None:
    """Write a module and drop its compiled form: Python knows that by size and whole seconds,
    which another version may share."""
    path.write_text(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _pytest(project: Project, tests: list[Test], work: Path) -> _Run:
    selected, written = work / "selected.txt", work / "outcomes.jsonl"
    selected.write_text("\n".join(test.name for test in tests))
    written.unlink(missing_ok=True)
    files = list(dict.fromkeys(test.file for test in tests))
    limit_s = _START_S + PATIENCE * sum(test.seconds for test in tests)
    environment = project.environment(
        **{plugin.SELECTED: str(selected), plugin.RESULTS: str(written)}
    )
    with (work / "log.txt").open("w") as log:
        process = subprocess.Popen(
            pytest_command("-x", "-p", "no:cacheprovider", *files),
            cwd=project.root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _ended(process, limit_s)
    lines = written.read_text().splitlines() if written.exists() else []
    outcomes = [json.loads(line) for line in lines]
    failed = [each["test"] for each in outcomes if each["outcome"] == "failed"]
    return _Run(status=status, failed=failed[0] if failed else "", finished=len(outcomes))


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Wait for a process, and kill it when its time is over. On a machine where several tasks
    share a core time passes slowly: tests that are only late have caught nothing."""
    while limit_s > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        limit_s -= _LOOK_S / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return -signal.SIGKILL
