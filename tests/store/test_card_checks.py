"""Card checks on disk, and where slow cards are named: report, status and doctor."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measurements import attempt, job, outcome, rank, row, worker

from orchestrator.analysis.provenance import banners_of
from orchestrator.cli.doctor import slow_card_findings
from orchestrator.cli.runs import run_lines
from orchestrator.core.card_check import CardCheck, slow_cards, slow_checks, spread_of_runs
from orchestrator.core.events import RecordRow
from orchestrator.core.job import State
from orchestrator.driver.loop import CardChecks
from orchestrator.report.run_report import read_summary
from orchestrator.store import files as run_files
from orchestrator.store.history import (
    earlier_card_checks,
    read_card_checks,
    slow_cards_of,
    spread_between_runs,
    table_of,
)
from orchestrator.store.store import Store
from workloads.devices import Level
from workloads.util.statistics import ALIKE


def a_check(index: int, speed: float = 1e12, **changes: object) -> CardCheck:
    made = CardCheck(
        run="night",
        taken_at=1000.0 + index,
        node="hpu-1",
        card_index=index,
        accelerator="HPU",
        device_name="Gaudi2",
        emulated=False,
        matmul_flops=speed,
        copy_bytes_per_s=1e9,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_card_is_held_against_its_like_only() -> None:
    """A tenth slower is slow, on emulated cards half."""
    cards = [a_check(n) for n in range(4)]
    assert not slow_cards(cards)
    (slow,) = slow_cards([*cards, a_check(4, 0.85e12)])
    assert str(slow) == "hpu-1/HPU4: matrix product at 85% of the other cards of its node"
    assert not slow_cards([*cards, a_check(4, 0.92e12)])
    assert not slow_cards([*cards, a_check(4, 0.5e12, node="hpu-2")])
    assert not slow_cards([*cards, a_check(4, 0.5e12, device_name="Gaudi3")])
    assert not slow_cards([*cards, a_check(4, 0.5e12, threads=1)])  # of one, not of two
    emulated = [replace(each, emulated=True) for each in (*cards, a_check(4, 0.55e12))]
    assert not slow_cards(emulated)
    assert slow_cards([*emulated, a_check(5, 0.45e12, emulated=True)])


def test_the_newest_check_counts_and_keeps_what_only_an_older_one_has() -> None:
    """A gang measures the link, a job on one card does not."""
    cards = [a_check(n, link_bytes_per_s=1e10) for n in range(3)]
    cards += [a_check(3, 1e12, link_bytes_per_s=4e9), a_check(3, 1.01e12, taken_at=2000.0)]
    (slow,) = slow_cards(cards)
    assert (slow.figure, slow.share) == ("link_bytes_per_s", pytest.approx(0.4))
    again = a_check(3, 1.01e12, taken_at=3000.0, link_bytes_per_s=1e10)
    assert not slow_cards([*cards, again])


def test_a_check_is_held_against_its_own_night_and_warns_of_rows_until_the_next() -> None:
    """Of three cards one is slow on the first night. On the second all are at 60 %."""
    nights = {1000.0: (1e12, 1e12, 0.5e12), 2000.0: (0.6e12,) * 3}
    checks = [
        a_check(n, speed, taken_at=at + n)
        for at, speeds in nights.items()
        for n, speed in enumerate(speeds)
    ]
    assert not slow_cards(checks)
    (slow,) = slow_checks(checks)
    assert slow.share == pytest.approx(0.5)
    assert (slow.card, slow.since, slow.until) == ("hpu-1/HPU2", 1002.0, 2002.0)
    times = (1001.5, 1500.0, 2001.9, 2500.0, 3500.0)  # the first is that of the check's own job
    rows = [
        row(n, card_indices=(card,), recorded_at=at)
        for n, (at, card) in enumerate([*((at, 2) for at in times), (1500.0, 1)])
    ]
    (banner,) = [one for one in banners_of(rows, [slow]) if one.name == "Slow cards"]
    assert banner.count == 2 and banner.details == (str(slow),)
    later = [one for one in rows if (one.recorded_at or 0.0) > 2001]
    assert "Slow cards" not in [one.name for one in banners_of(later, [slow])]


def test_the_table_is_typed_and_reads_back(tmp_path: Path) -> None:
    told = [a_check(0), a_check(1, clock_mhz=1500.0)]
    (tmp_path / run_files.CARD_CHECKS).write_bytes(table_of(CardCheck, told))
    assert read_card_checks(tmp_path) == tuple(told)
    table = pq.read_table(tmp_path / run_files.CARD_CHECKS)
    assert str(table.schema.field("clock_mhz").type) == "double" and table.num_rows == 2
    for wrong in (b"", b"not a table", table_of(CardCheck, told)[:-20]):
        (tmp_path / run_files.CARD_CHECKS).write_bytes(wrong)
        assert read_card_checks(tmp_path) == ()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("taken_at", [None]), ("taken_at", [[1.0]]), ("taken_at", [float("nan")])),
        *(("matmul_flops", [float("inf")]), ("node", [{"a": 1}]), ("run", ["once more"])),
    ],
)
def test_a_table_of_other_values_is_no_card_check(
    tmp_path: Path, name: str, values: list[object]
) -> None:
    table = pq.read_table(io.BytesIO(table_of(CardCheck, [a_check(0)])))
    if name != "run":
        table = table.drop_columns([name])
    table = pa.Table.from_arrays([*table.columns, pa.array(values)], [*table.column_names, name])
    with Store(tmp_path, "night") as store:
        store.append(row())
    pq.write_table(table, store.path / run_files.CARD_CHECKS)
    assert slow_cards_of(store.path) == () and spread_between_runs(store.path) == ALIKE


def ended(index: int, speed: float) -> RecordRow:
    this = attempt(job(batch_size=index + 1))
    card = replace(this.cards[0], index=index)
    this = replace(this, cards=(card,))
    figures = {"matmul_flops": speed, "copy_bytes_per_s": 1e9}
    done = rank(card_check=figures, worker=worker(device_name="Gaudi2", emulated=False))
    return RecordRow(
        job=this.job,
        state=State.SUCCEEDED,
        reason="",
        final=True,
        attempt=this,
        outcome=outcome(this, done),
    )


def test_a_slow_card_is_named_while_it_runs_and_afterwards(tmp_path: Path) -> None:
    for night in range(3):
        with Store(tmp_path, f"night{night}") as store:
            checks = CardChecks(store, lambda: 5000.0)
            assert [checks.saw(ended(n, 1e12)) for n in range(3)] == [()] * 3
            store.append(row())
    with Store(tmp_path, "slow") as store:
        checks = CardChecks(store, lambda: 6000.0)
        assert checks.saw(ended(0, 1e12)) == ()
        (said,) = checks.saw(ended(1, 0.5e12))
        assert said.startswith("hpu-1/HPU1: matrix product at 50% of")
        assert checks.saw(replace(ended(2, 1e12), outcome=None)) == ()
        ran = {"recorded_at": 6000.0}
        store.append(row(0, card_indices=(1,), **ran), row(1, card_indices=(0,), **ran))
    summary, _ = read_summary(Store.existing(tmp_path, "slow"))
    (banner,) = [each for each in summary.banners if each.name == "Slow cards"]
    assert banner.count == 1 and banner.of == 2 and "HPU1" in banner.details[0]
    (finding,) = slow_card_findings(tmp_path)
    assert finding.level is Level.WARNING and finding.where == "hpu-1/HPU1"
    assert not slow_card_findings(tmp_path / "nothing")
    assert len(earlier_card_checks(tmp_path / "slow")) == 9


def test_runs_differ_by_what_the_cards_have_in_common(tmp_path: Path) -> None:
    speeds = {"a": 1.0, "b": 0.9, "c": 1.0}
    runs = {run: [a_check(n, s * 1e12, run=run) for n in range(3)] for run, s in speeds.items()}
    together = [each for own in runs.values() for each in own]
    wanted = pytest.approx(-math.log(0.9) / math.sqrt(3))
    assert spread_of_runs(together).deviation == wanted and spread_of_runs(together).values == 3
    assert spread_of_runs([*runs["a"], *runs["b"]]) == ALIKE  # too few to tell
    others = [a_check(7, 5e11, run="b"), a_check(0, 2e12, run="c", threads=1)]
    runs["a"][0] = replace(runs["a"][0], matmul_flops=4e11)
    assert spread_of_runs([*together[1:], runs["a"][0], *others]).deviation == pytest.approx(
        0.06, abs=0.02
    )
    absent = {"a": [a_check(9, 1e9, run="a")], "b": [a_check(9, 9e9, run="b")], "c": []}
    for run, own in runs.items():  # one card is in the others' and not in the last one's
        with Store(tmp_path, run) as store:
            store.write_file(run_files.CARD_CHECKS, table_of(CardCheck, [*own, *absent[run]]))
            store.append(row())
    assert spread_between_runs(tmp_path / "c").deviation == pytest.approx(0.06, abs=0.02)
    assert spread_between_runs(tmp_path / "none") == ALIKE


def test_a_card_of_few_runs_says_nothing_about_the_spread() -> None:
    runs = "abcd"
    once = [a_check(n, 1e12 * (1 - n / 10), run=run) for n, run in enumerate(runs)]
    assert spread_of_runs(once) == ALIKE
    twice = [a_check(n, 1e12 * (n + 1), run=runs[n + 1]) for n in range(3)]
    assert spread_of_runs([*once, *twice]) == ALIKE
    always = [a_check(9, 9e11 if run == "b" else 1e12, run=run) for run in runs]
    alone = spread_of_runs(always)
    assert alone.values == 4 and alone.deviation == pytest.approx(-math.log(0.9) / 2)
    assert spread_of_runs([*always, *once, *twice]) == alone


def test_the_status_names_slow_cards(tmp_path: Path) -> None:
    from orchestrator.core.plan import Plan
    from orchestrator.core.status import RunStatus
    from orchestrator.driver.board import Board

    board = Board(run="night", plan=Plan(grid_name="g", jobs=(), nodes=()), started_at=0.0)
    board.slow_cards = ("hpu-1/HPU1: matrix product at 50% of the other cards of its node",)
    status = board.status(1.0, {})
    assert RunStatus.from_json(status.to_json()).slow_cards == board.slow_cards
    with Store(tmp_path, "night") as store:
        store.write_file(run_files.STATUS, status.to_json())
    said = run_lines(store)
    assert "1 slow card" in said and f"SLOW card {board.slow_cards[0]}" in said
