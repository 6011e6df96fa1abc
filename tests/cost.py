"""The processor time of tests, by which `make quick` takes some and leaves others out.

A test function whose cases take more than ``LIMIT_S`` together, set-up and what they start
included, is marked slow (docs/contributing.md). Processor time says nearly the same on a busy
machine as on a quiet one; `make quick` names the functions that came to lie above, and fails for
none.
"""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

#: Seconds of one core.
LIMIT_S = 1.0

_NAME = "processor_s"
_NOT_THESE = re.compile(r"not \w+(?: and not \w+)*")


class Cost:
    def __init__(self) -> None:
        self._since_s = 0.0

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Import no file of which every test is left out: some load libraries for seconds."""
        expression = str(config.option.markexpr)
        if collection_path.suffix != ".py" or not _NOT_THESE.fullmatch(expression):
            return None
        left_out = "|".join(re.findall(r"not (\w+)", expression))
        whole = rf"^pytestmark = .*\bmark\.(?:{left_out})\b"
        return True if re.search(whole, collection_path.read_text(), re.MULTILINE) else None

    def pytest_collection_finish(self) -> None:
        self._since_s = _processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "teardown":
            since_s, self._since_s = self._since_s, _processor_s()
            item.user_properties.append((_NAME, self._since_s - since_s))
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if "not slow" not in str(terminalreporter.config.option.markexpr):
            return
        taken: Counter[str] = Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                if getattr(report, "when", "") == "teardown":
                    function = report.nodeid.partition("[")[0]
                    taken[function] += sum(s for name, s in report.user_properties if name == _NAME)
        above = [(name, s) for name, s in taken.most_common() if s > LIMIT_S]
        if above:
            terminalreporter.section(f"above {LIMIT_S:g} s of processor time: mark them slow")
        for name, seconds in above:
            terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


def _processor_s() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)
