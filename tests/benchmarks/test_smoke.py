"""Each benchmark runs at a size that says nothing about speed: contenders start, lines come out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, announced, main, takes_s
from benchmarks.setting import Setting

#: Those that start Ray, or several processes that import large libraries, take 13 s of CPU each and
#: more: `make bench` has them, and what they compute has tests of its own.
LONG = ("finetuning", "startup", "orchestration", "measuring", "grid")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LONG])
def test_a_benchmark_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    module = importlib.import_module(f"benchmarks.{name}")
    setting = Setting(scratch=tmp_path, peers_python=None, smoke=True, say=lambda _: None)
    lines, facts = module.run(setting)
    rates = [value for line in lines if line.unit for value in (*line.ours, *line.theirs)]
    assert rates and all(value > 0 for value in rates)
    json.dumps(facts)


def test_the_page_and_a_first_look_fit_their_time() -> None:
    assert sum(takes_s(name, quick=False) for name in NAMES) < 20 * 60
    assert sum(takes_s(name, quick=True) for name in NAMES) < 8 * 60
    first, *others = announced(NAMES, quick=False)
    assert first.endswith("minutes on two quiet cores:") and len(others) == len(NAMES)


def test_an_unknown_name_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "generatoin"])
    with pytest.raises(SystemExit):
        main()
    assert "there is command_line" in capsys.readouterr().err
