"""`nightgrid run` of a fine-tuning grid, from the command line to rows, page and adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.job import State
from orchestrator.store.store import Store

TRAINING = """\
name: training
defaults:
  workload: finetuning
  model: tiny-chatglm3
  accelerator: HPU
  precision: fp32
  batch_size: 2
  steps: 3
  samples: 8
  max_length: 96
measure: {warmup: 1, time_limit_s: 60}
experiments:
  - name: methods
    method: full
  - name: kept
    save_adapter: night
    learning_rate: 0.1
  - name: optimizers
    optimizer: adamw-8bit
"""


@pytest.mark.slow
def test_a_fine_tuning_grid_gives_rows_and_an_adapter(tmp_path, monkeypatch, nightgrid) -> None:
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    results = tmp_path / "results"
    (tmp_path / "training.yaml").write_text(TRAINING)
    nightgrid("run", "--in-process", "--results", results, tmp_path / "training.yaml")
    rows = Store.existing(results, "training").measurements()
    rows_of = {(row.experiment, row.parameters["method"]): row for row in rows}
    refused = rows_of.pop(("optimizers", "lora"))
    assert refused.state is State.UNSUPPORTED
    assert "what Gaudi lacks: 8-bit optimizers" in refused.reason
    assert rows_of.keys() == {("methods", "full"), ("kept", "lora")}
    for row in rows_of.values():
        assert row.state is State.SUCCEEDED and row.emulated and not row.model_was_resident
        assert row.metrics.throughput_unit == "samples/s" and (row.metrics.throughput or 0) > 0
        assert row.metrics.repeats == 3 and row.metrics.loss_first and row.metrics.loss_last
        assert row.tokenization_s and row.train_flops_per_token
        assert [sample.warmup for _, sample in row.samples] == [True, False, False, False]
        assert all(sample.forward_s and sample.loss for _, sample in row.samples)
        share = (row.trainable_parameter_count or 0) / (row.parameter_count or 1)
        assert share == 1 if row.experiment == "methods" else 0 < share < 1 / 50
    assert "samples/s" in (results / "training" / "report.html").read_text()
    adapter = Path(rows_of["kept", "lora"].details["saved_adapter"])
    assert (adapter / "adapter_model.safetensors").is_file() and adapter.name == "night"
