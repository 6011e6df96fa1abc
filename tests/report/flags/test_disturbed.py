"""Flags of rows that had to share their host's processors, or that were cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from measurement_factory import Night, a_job, with_interval

from orchestrator.analysis.flags import raised_on
from orchestrator.analysis.summary import summarize
from orchestrator.core.measurement import Measurement
from orchestrator.report.text import to_markdown
from orchestrator.report.wording import cell_text


def row(precision: str = "fp32", cards: int = 1, rate: float = 100.0, **facts: Any) -> Measurement:
    """A succeeded row with an interval and these facts of its host's processors."""
    made = Night().add(a_job(precision=precision, cards=cards))
    return replace(with_interval(made, rate, 1.0), **facts)


@pytest.mark.parametrize(
    ("facts", "disturbed"),
    [
        ({}, False),  # not known, as in old rows
        ({"processor_wait_share": 0.05, "processor_cores": 0.95}, False),
        ({"processor_wait_share": 0.06, "processor_cores": 0.94}, True),
        ({"stolen_share": 0.1, "processor_cores": 1.0}, True),
        ({"stolen_share": 0.1, "processor_cores": 0.02}, False),  # it waits for its card
        ({"processor_wait_share": 0.03, "stolen_share": 0.03, "processor_cores": 4.0}, True),
        ({"processor_wait_share": 0.0, "processor_cores": 0.0, "host_load": 64.0}, False),
        ({"processor_wait_share": 3.0, "oversubscribed": True, "processor_cores": 0.5}, False),
    ],
)
def test_a_row_is_disturbed_by_what_it_lost(facts: dict[str, Any], disturbed: bool) -> None:
    """Waiting while runnable counts, and what a hypervisor took while it ran; sleep does not, nor
    does the wait of its own threads for each other, nor how busy its host was."""
    names = {one.flag.name for one in raised_on(row(**facts))}
    assert ("disturbed" in names) == disturbed


def test_a_disturbed_row_wins_nothing_and_is_listed() -> None:
    """The fastest of three waited for a processor: another has the star."""
    rows = [
        row("bf16", rate=200.0, processor_wait_share=0.24, processor_cores=0.76),
        row("fp32", rate=100.0, processor_wait_share=0.01, processor_cores=0.99),
        row("fp16", rate=50.0),
    ]
    summary = summarize(rows)
    assert summary.rankings[0].winner == rows[1]
    assert "it waited for a processor for 24% of its timed part" in to_markdown(summary)


def test_oversubscribed_gangs_rank_among_gangs_of_their_size() -> None:
    """Of two sizes and of one that fits, each is in a ranking of its own."""
    rows = [
        row("bf16", 4, oversubscribed=True, threads=1, host_cores=2),
        row("fp32", 4, oversubscribed=True, threads=1, host_cores=2, rate=50.0),
        row("fp16", 4, oversubscribed=False, rate=10.0),
        row("bf16", 8, oversubscribed=True, threads=1, host_cores=2, rate=300.0),
    ]
    summary = summarize(rows)
    assert sorted(ranking.contenders for ranking in summary.rankings) == [1, 1, 2]
    (pair,) = [ranking for ranking in summary.rankings if ranking.contenders == 2]
    assert pair.winner == rows[0]
    assert "4 processes of 1 thread on a host of 2 cores" in to_markdown(summary)


def test_a_row_without_a_complete_repeat_is_drawn_as_such() -> None:
    """Its rate stands in brackets, and ranks nowhere."""
    whole, cut = row("fp32"), row("bf16", rate=1206.0)
    bare = replace(cut.metrics, repeats=0, throughput_low=None, throughput_high=None)
    summary = summarize([whole, replace(cut, metrics=bare)])
    (table,) = summary.tables
    (size,) = table.columns
    text = cell_text(table, "bf16", size)
    assert (text.value, text.mark, text.note) == ("(1,206)", "!", "")
    assert summary.rankings[0].fastest == whole
    assert "no repeat was completed within" in to_markdown(summary)
