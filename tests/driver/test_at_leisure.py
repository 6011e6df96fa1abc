"""A task beside the last jobs of a run."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from orchestrator.core.status import CardStatus, RunStatus
from orchestrator.driver.run import AtLeisure

FIRST = RunStatus(
    run="night",
    at=1.0,
    started_at=0.0,
    total=4,
    done=2,
    counts={"reused": 1, "SUCCEEDED": 1},
    attempts=1,
    emulated=True,
    eta_s=None,
    cards=(CardStatus(card="hpu-1/HPU0", attempt_id="a-1"), CardStatus(card="hpu-1/HPU1")),
)


def test_it_begins_when_no_job_is_left_to_start() -> None:
    """A job that waits may run beside it, and be measured meanwhile; it runs once."""
    done: list[str] = []
    last = dataclasses.replace(FIRST, done=3)
    at_leisure = AtLeisure(lambda: done.append("it"))
    at_leisure.saw(FIRST)
    at_leisure.saw(dataclasses.replace(last, counts={"reused": 3}))
    assert at_leisure.thread is None
    at_leisure.saw(last)
    at_leisure.saw(dataclasses.replace(last, done=4, cards=()))
    assert at_leisure.thread is not None
    at_leisure.thread.join()
    assert done == ["it"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_its_failure_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback is printed amid the progress of a run; the log has it for whoever asks."""

    def fails() -> None:
        raise OSError("no template")

    at_leisure = AtLeisure(fails)
    with caplog.at_level(logging.DEBUG, "nightgrid.drive"):
        at_leisure.saw(dataclasses.replace(FIRST, done=4))
        assert at_leisure.thread is not None
        at_leisure.thread.join()
    assert "no template" in caplog.text
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
