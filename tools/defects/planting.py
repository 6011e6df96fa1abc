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
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from defects import plugin
from defects.executed import PYTEST, Project, Record, Test
from defects.forks import Forks
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
    known = results(to)
    with Forks(project.libraries) as forks:
        for defect in defects:
            if any((defect.key, suite) not in known for suite in suites):
                for result in _met(forks, project, defect, record, to, suites, first):
                    with to.open("a") as file:
                        file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
                    print(f"{result.suite:5} {result.outcome:12} {defect.key}", flush=True)


def _met(
    forks: Forks,
    project: Project,
    defect: Mutation,
    record: Record,
    to: Path,
    suites: Sequence[str],
    first: frozenset[str],
) -> Iterator[Result]:
    """Results of one defect, suite by suite, those that stand in the file already left out."""
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
                caught_by = caught_by or _catching(forks, project, defect, some, to.parent)
        yield Result(
            key=defect.key,
            kind=defect.kind,
            path=defect.path,
            suite=suite,
            outcome="caught" if caught_by else "survived" if tests else "not executed",
            by=caught_by,
            met=len(tests),
            seconds=round(time.monotonic() - began, 1),
        )


def _catching(
    forks: Forks, project: Project, defect: Mutation, tests: list[Test], work: Path
) -> str:
    """The test that catches a planted defect, by name; empty if none does."""
    tests = _by_file(tests)
    while tests:
        run = _with(forks, project, defect, tests, work)
        if run.status in (0, 5):
            return ""
        fits = (at for at, test in enumerate(tests) if run.failed in (test.name, test.file))
        # A file that cannot be imported fails under its own name, and no end comes to a next test.
        at = next(fits, min(run.finished, len(tests) - 1))
        sound = _pytest(forks, project, tests[at : at + 1], work).status == 0
        if sound and _with(forks, project, defect, tests[at : at + 1], work).status not in (0, 5):
            return run.failed or ("no end" if run.status < 0 else "collection of the tests")
        tests = tests[at + 1 :]  # it fails without the defect, or by chance
    return ""


def _with(forks: Forks, project: Project, defect: Mutation, tests: list[Test], work: Path) -> _Run:
    """Run tests while the defect is planted."""
    path = project.root / defect.path
    source = path.read_text()
    try:
        _write(path, defect.applied(source))
        return _pytest(forks, project, tests, work)
    finally:
        _write(path, source)


def _stages(tests: list[Test], path: str, first: frozenset[str]) -> Iterator[list[Test]]:
    """Tests whose file is named as the module, those that import it themselves, and those of the
    folder that mirrors its own catch most of its defects: the files of all others are collected
    only if those do not."""
    name = Path(path).stem.strip("_")
    wanted = (
        lambda test: test.name in first,
        lambda test: test.imports is not None and name in test.file,
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


def _pytest(forks: Forks, project: Project, tests: list[Test], work: Path) -> _Run:
    selected, written = work / "selected.txt", work / "outcomes.jsonl"
    selected.write_text("\n".join(test.name for test in tests))
    written.unlink(missing_ok=True)
    files = list(dict.fromkeys(test.file for test in tests))
    limit_s = _START_S + PATIENCE * sum(test.seconds for test in tests)
    environment = project.environment(
        **{plugin.SELECTED: str(selected), plugin.RESULTS: str(written)}
    )
    pid = forks.start(
        [*PYTEST, "-x", "-p", "no:cacheprovider", *files],
        at=project.root,
        environment=environment,
        log=work / "log.txt",
    )
    status = _ended(forks, pid, limit_s)
    lines = written.read_text().splitlines() if written.exists() else []
    outcomes = [json.loads(line) for line in lines]
    failed = [each["test"] for each in outcomes if each["outcome"] == "failed"]
    return _Run(status=status, failed=failed[0] if failed else "", finished=len(outcomes))


def _ended(forks: Forks, pid: int, limit_s: float) -> int:
    """Wait for a process, and kill it when its time is over. On a machine where several tasks
    share a core time passes slowly: tests that are only late have caught nothing."""
    while limit_s > 0:
        if (status := forks.status(_LOOK_S)) is not None:
            return status
        limit_s -= _LOOK_S / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while (status := forks.status(_LOOK_S)) is None:
        pass
    return -signal.SIGKILL
