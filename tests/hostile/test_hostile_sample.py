"""A sample of the hostile inputs of `make rehearsal` (``hostile.py``), from a seed."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hostile import SEED, Findings, preload, run_cases

#: Inputs of every kind; ten thousand are asked in the rehearsal.
SAMPLE = 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_of_hostile_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    preload(("transformers",))  # its log keeps the standard error that it was imported under,
    log = logging.getLogger("transformers")  # which may be an earlier test's, closed since
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()])
    findings = Findings(loud=False)
    run_cases(list(range(100_000, 100_000 + SAMPLE)), SEED, findings.add)
    assert findings.inputs.total() == SAMPLE
    assert len(findings.inputs) >= 6, "the sample has inputs of nearly every kind"
    assert findings.codes.keys() >= {"0", "2"}, "some commands work, some are refused"
    assert not findings.causes, str(findings)
