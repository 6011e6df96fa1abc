"""A benchmark's measurements outlive a failure of its evaluation, and is not measured twice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from measurements import row

from benchmarks import __main__ as command
from benchmarks import emulated, intervals
from benchmarks.setting import Setting
from orchestrator.results.store import Store
from orchestrator.results.tables import to_table


def measured(file: Path) -> None:
    """The rows of a turn, each without the repeats that an interval needs."""
    pq.write_table(to_table([row(number) for number in range(2)]), file)


@pytest.mark.parametrize("named", [False, True])
def test_rows_are_kept_where_they_cannot_be_evaluated(
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message says where they lie, whether that place was named or not. The next call takes
    them from there: it starts no process, and fails at the same row."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / "kept" / "intervals"
    place.mkdir(parents=True)
    for number in range(6):
        measured(place / f"rows-{number}.parquet")
    monkeypatch.setattr(Setting, "started", lambda *_, **__: pytest.fail("a process was started"))
    if not named:
        monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(place))
    options = ["--smoke", "--results", str(tmp_path / "results")]
    options += ["--scratch", str(tmp_path / "kept")] if named else []
    monkeypatch.setattr("sys.argv", ["benchmarks", "intervals", *options])
    assert command.main() == 1
    error = capsys.readouterr().err
    assert "has no interval: 1 repeats" in error
    assert f"what it measured is in {place}" in error
    assert sorted(place.glob("rows-*.parquet")) == [place / f"rows-{n}.parquet" for n in range(6)]


def test_rows_of_another_grid_are_not_taken(tmp_path: Path) -> None:
    """A smaller grid's, for example."""
    (tmp_path / "grid.yaml").write_text("{}")
    setting = Setting(scratch=tmp_path, peers_python=None, smoke=True, say=lambda _: None)
    with pytest.raises(RuntimeError, match="holds the rows of another grid"):
        intervals.run(setting)


def test_a_run_that_was_kept_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its seconds and its rows; one that was cut off begins anew."""
    called = []

    def night(grid: Path, name: str, results: Path, *, emulate: str) -> tuple[float, tuple]:
        called.append((name, emulate, sorted(path.name for path in results.iterdir())))
        with Store.open(results, name) as store:
            store.append(row(0, run=name))
        return 12.5, tuple(Store.existing(results, name).read().measurements)

    monkeypatch.setattr(emulated, "night", night)
    setting = Setting(scratch=tmp_path, peers_python=None, smoke=True, say=lambda _: None)
    cut_off = tmp_path / "alone-0" / "left"
    cut_off.mkdir(parents=True)
    first = emulated.run(setting)
    assert emulated.run(setting) == first
    assert called == [("emulated", "2x8", []), ("alone", "1x1:CPU", [])]
