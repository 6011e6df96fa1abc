"""The script that measures LoRA's ways on a real card, tried out on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.card import finetuning
from workloads.models.loading import open_model


@pytest.mark.slow
def test_each_way_has_a_row_with_figures_or_the_reason(tmp_path: Path) -> None:
    path = str(open_model("tiny-chatglm3").path)
    finetuning.main(path, str(tmp_path), "60", "cpu", "1", "one row;one row, Liger")
    first, *rows = map(json.loads, (tmp_path / "finetuning.jsonl").read_text().splitlines())
    assert first["card"] and first["torch"]
    lora, liger, qlora = rows
    assert (
        lora["samples_per_s"] > 0 and lora["tflop_per_s"] is not None and len(lora["step_s"]) == 6
    )
    assert "failed" in liger and "liger" in liger["failed"].lower()
    assert qlora["method"] == "qlora" and qlora["samples_per_s"] > 0


def test_nothing_begins_after_the_time_that_is_left(tmp_path: Path) -> None:
    finetuning.main("nowhere", str(tmp_path), "0", "cpu", "2", "one row")
    assert len((tmp_path / "finetuning.jsonl").read_text().splitlines()) == 1
