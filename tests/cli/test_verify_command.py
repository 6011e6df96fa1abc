"""`nightgrid verify`: the questions made of a grid, the comparison, and the command on this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import Nightgrid

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


@pytest.mark.parametrize(
    ("tokens", "logits", "verdicts"),
    [
        ([0, 1], LOGITS[0], {"fp32": EQUAL, "bf16": EQUAL}),
        ([0, 1], LOGITS[0] + 0.01, {"fp32": NO, "bf16": EQUAL}),
        ([0, 1], LOGITS[0] * 2, {"bf16": NO, "fp8": QUANTIZED}),
        ([0, 1], LOGITS[0] * torch.tensor([1, 1, torch.nan]), {"bf16": NO}),
        ([2, 1], LOGITS[0], {"bf16": NO}),  # the reference did not nearly choose it
    ],
)
def test_other_numbers_are_no_rounding(
    tokens: list[int], logits: torch.Tensor, verdicts: dict[str, str]
) -> None:
    for precision, verdict in verdicts.items():
        assert compare([tokens], [logits], REFERENCE, precision)[1]["agrees"] == verdict


def test_the_furthest_logit_counts_and_padding_of_the_output_layer_is_left_out() -> None:
    """One engine's vocabulary may be rounded up; what both have is compared."""
    mine = torch.cat([LOGITS[0], torch.full((2, 1), -100.0)], dim=1)
    found, _ = compare([[0, 1]], [mine], REFERENCE, "fp32")
    assert found["largest_logit_difference"] == 0.0
    mine[0, 2] += 1e-4
    found, _ = compare([[0, 1]], [mine], REFERENCE, "fp32")
    assert found["compared_tokens"] == found["reference_tokens"] == 2
    assert found["largest_logit_difference"] == pytest.approx(1e-4, rel=1e-2)


def test_a_near_tie_is_no_fault_and_ends_the_comparison() -> None:
    """Where the reference hardly preferred its token, rounding decides; what follows is another
    text, so the step after the parting is not compared."""
    mine = LOGITS[0] + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.02]])
    found, details = compare([[0, 2]], [mine], REFERENCE, "bf16")
    parting = "prompt 0, token 1: 2 instead of 1, which the reference preferred by 0.01"
    assert details["first_parting"] == parting
    assert details["agrees"] == NEAR_TIES and found["near_ties"] == 1
    first, _ = compare([[1, 1]], [mine], REFERENCE, "bf16")
    assert (first["compared_tokens"], first["reference_tokens"]) == (1, 2)


@pytest.mark.slow
def test_the_command_verifies_on_this_cpu(
    workplace: Path, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched and padded in one process, one by one in another."""
    monkeypatch.setenv("NIGHTGRID_CACHE", str(workplace / "cache"))
    (workplace / "night.yaml").write_text(GRID.replace("[fp32, bf16]", "[fp32]"))
    size = ("--prompts", 3, "--tokens", 6)
    (answer,) = nightgrid("verify", "night.yaml", "--in-process", *size, "--json").json
    assert answer["agrees"] == "yes" and answer["compared"] == "18 of 18"
    assert 0 < answer["largest_difference"] < 1e-3 < answer["spread"]
    assert answer["emulated"] is False or answer["accelerator"] == "CPU"


def test_a_grid_without_generation_is_refused(workplace: Path, nightgrid: Nightgrid) -> None:
    (workplace / "g.yaml").write_text(
        "name: g\nexperiments:\n"
        "  - {name: t, workload: finetuning, model: tiny-chatglm3, accelerator: CPU}\n"
    )
    assert "nothing to verify" in nightgrid("verify", "g.yaml", "--in-process", code=2).err
