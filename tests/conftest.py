"""The ground of every test: laws are checked without a time limit per example, since CI is shared,
and there on the same examples each time; at a desk each run tries others, and finds new ones.
Garbage is looked for among what a test made, since looking through all libraries took half of a
job. What tests start ends with them, time limits grow with the load, and SIGINT is a signal like
others."""

from __future__ import annotations

import gc
import io
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from guardian import guard_this_process
from hypothesis import HealthCheck, settings
from patience import patience

settings.register_profile(
    "nightgrid",
    max_examples=40,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("quick", settings.get_profile("nightgrid"), max_examples=10)
settings.load_profile("nightgrid")  # before --hypothesis-profile, which `make quick` names

# Else each of hundreds of processes that tests start would compile all of our modules anew, and
# each run of the suite all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Emulated cards of the tests of this process take turns among themselves. With the host's file they
# would wait for whatever else runs there, for minutes, and measured runs would wait for them; with
# one file for all processes of the suite, for a gang that another process trains.
OWN_TURNS = Path(tempfile.gettempdir(), f"nightgrid-turns-of-tests-{os.getpid()}.lock")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["NIGHTGRID_TURNS"] = str(OWN_TURNS)
os.environ.setdefault("NIGHTGRID_TURNS", str(OWN_TURNS))

# What tests compute is small; where cores are shared, a second thread mostly waits, at full load.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Have all that tests start end with this process. A shell starts what it puts in the
    background with SIGINT ignored, which programs would inherit: one that has a handler, even one
    that does nothing, is theirs by default again."""
    logging.getLogger().addHandler(logging.NullHandler())  # else warnings go to standard error
    guard_this_process()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)


def pytest_unconfigure() -> None:
    """Remove the file of turns, if this process has made it, and not one that it is a part of."""
    OWN_TURNS.unlink(missing_ok=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which every test is left out: some load libraries for seconds."""
    expression = str(config.option.markexpr)
    if collection_path.suffix != ".py" or not re.fullmatch(r"not \w+( and not \w+)*", expression):
        return None
    left_out = "|".join(re.findall(r"not (\w+)", expression))
    whole = rf"^pytestmark = .*\bmark\.(?:{left_out})\b"
    return True if re.search(whole, collection_path.read_text(), re.MULTILINE) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while test files are imported: looking through the libraries that they
    import takes a fifth of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> object:
    """The time limit of a test grows with the load, as those within it do."""
    import pytest_timeout

    longer = settings._replace(timeout=patience(settings.timeout))
    return pytest_timeout.pytest_timeout_set_timer(item, longer)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Several processes take the files in an order of our own."""
    from lanes import Lanes

    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one of several processes, what takes long comes first. In CI a test on a real cluster
    that failed is run once more: dozens of processes and their faults meet in another order each
    time. Its first failure is printed all the same. At a desk it fails at once."""
    if "CI" in os.environ and config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):
        from lanes import rank

        items.sort(key=lambda item: rank(item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why a test was run once more."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed, and was run once more: {report.nodeid}", yellow=True)
        terminalreporter.write_line(str(report.longrepr))


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the tests' own, in which the pretrained model is made once out of its package;
    several processes of the suite share it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("pretrained")
    shared = tmp_path_factory.getbasetemp().parent / "pretrained"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="module", autouse=True)
def _thawed() -> Iterator[None]:
    """Let the remains of a module's tests be collected after it."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Workers collect garbage whenever a job ends: what is there before a test is kept out."""
    gc.freeze()


class LoggedRecords(logging.StreamHandler[io.StringIO]):
    """The log of a test."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.records: list[logging.LogRecord] = []
        self._levels: list[tuple[logging.Logger, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        super().emit(record)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    def set_level(self, level: int, logger: str) -> None:
        changed = logging.getLogger(logger)
        self._levels.append((changed, changed.level))
        changed.setLevel(level)

    def close(self) -> None:
        for changed, level in self._levels:
            changed.setLevel(level)
        super().close()


@pytest.fixture
def caplog() -> Iterator[LoggedRecords]:
    """In the place of pytest's own, which looks through all loggers of all libraries at each step
    of each test, one twentieth of the time of `make quick`."""
    root, handler = logging.getLogger(), LoggedRecords()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)
    handler.close()
