"""`nightgrid verify`: the questions made of a grid, the comparison, and the command on this CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from orchestrator.cli.main import main
from orchestrator.grid.parser import grid_of_values, parse_grid
from orchestrator.planning.verification import verification_grid
from workloads.verification import EQUAL, NEAR_TIES, NO, QUANTIZED, Reference, compare

GRID = """\
name: night
defaults: {workload: text-generation, model: tiny-chatglm3, accelerator: CPU}
experiments:
  - name: sizes
    axes: {precision: [fp32, bf16], batch_size: [1, 2, 4], cards: [1, 2]}
  - {name: training, workload: finetuning}
"""


def test_each_way_of_computing_is_asked_about_once() -> None:
    jobs = parse_grid(GRID.encode(), "grid").jobs()
    asked = verification_grid("night", jobs, prompts=2, output_tokens=4, batch_size=2)
    assert asked is not None and asked["name"] == "verify-night"
    grid = grid_of_values(asked)
    assert [(job.workload, job.precision, job.cards) for job in grid.jobs()] == [
        ("verification", "fp32", 1),
        ("verification", "bf16", 1),
    ]
    none = [job for job in jobs if job.workload == "finetuning"]
    assert verification_grid("n", none, prompts=1, output_tokens=1, batch_size=1) is None


LOGITS = torch.tensor([[[2.0, 0.0, -2.0], [0.0, 2.0, 1.99]]])  # [1 prompt, 2 steps, 3 tokens]
REFERENCE = Reference(tokens=torch.tensor([[0, 1]]), logits=LOGITS)


def test_equal_texts_are_compared_to_their_end() -> None:
    mine = LOGITS[0] + torch.tensor([[0.0, 0.0, 1e-4], [0.0, 0.0, 0.0]])
    found = compare([[0, 1]], [mine], REFERENCE)
    assert found.compared_steps == found.all_steps == 2
    assert found.largest_difference == pytest.approx(1e-4, rel=1e-2)
    assert found.verdict("fp32") == EQUAL


def test_a_near_tie_is_no_fault_and_ends_the_comparison() -> None:
    """Where the reference hardly preferred its token, rounding decides; what follows is another
    text, so the step after the parting is not compared."""
    mine = LOGITS[0] + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.02]])
    found = compare([[0, 2]], [mine], REFERENCE)
    (parting,) = found.partings
    assert (parting.step, parting.token, parting.reference_token) == (1, 2, 1)
    assert parting.margin == pytest.approx(0.01, rel=1e-3)
    assert found.verdict("bf16") == NEAR_TIES
    assert found.metrics()["near_ties"] == len(found.partings) > 0
    first = compare([[1, 1]], [mine], REFERENCE)
    assert first.compared_steps == 1 and first.all_steps == 2


def test_other_numbers_are_no_rounding() -> None:
    wrong = compare([[0, 1]], [LOGITS[0] * 2], REFERENCE)
    assert wrong.verdict("bf16") == NO and wrong.verdict("fp8") == QUANTIZED
    assert compare([[2, 1]], [LOGITS[0]], REFERENCE).verdict("bf16") == NO
    close = compare([[0, 1]], [LOGITS[0] + 0.01], REFERENCE)
    assert close.verdict("bf16") == EQUAL and close.verdict("fp32") == NO


def test_a_row_of_padding_in_the_output_layer_is_left_out() -> None:
    wider = torch.cat([LOGITS[0], torch.full((2, 1), -100.0)], dim=1)
    assert compare([[0, 1]], [wider], REFERENCE).largest_difference == 0.0


@pytest.mark.slow
def test_the_command_verifies_on_this_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))
    grid = tmp_path / "night.yaml"
    grid.write_text(GRID.replace("[fp32, bf16]", "[fp32]"))
    arguments = ["--in-process", "--results", str(tmp_path), "--prompts", "3", "--tokens", "6"]
    assert main(["verify", str(grid), *arguments, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["agrees"] == "yes" and answer["compared"] == "18 of 18"
    assert 0 < answer["largest_difference"] < 1e-3 < answer["spread"]
    assert answer["emulated"] is False or answer["accelerator"] == "CPU"


def test_a_grid_without_generation_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "g.yaml"
    grid.write_text(
        "name: g\nexperiments:\n"
        "  - {name: t, workload: finetuning, model: tiny-chatglm3, accelerator: CPU}\n"
    )
    assert main(["verify", str(grid), "--in-process", "--results", str(tmp_path)]) == 2
    assert "nothing to verify" in capsys.readouterr().err
