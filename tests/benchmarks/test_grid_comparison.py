"""Two commands that measure the same cells, compared."""

from __future__ import annotations

from benchmarks.grid import OUTPUT_TOKENS, Turn, line_of_cells, ratios_of_cells


def test_what_a_cell_costs_besides_its_timed_passes() -> None:
    turn = Turn(took_s=20.0, cells={"fp32 × 1": (1.0, 2.0), "fp32 × 2": (3.0, 4.0)})
    assert turn.besides_s == 5.0
    assert turn.cells_per_minute == 6.0


def test_cells_stand_side_by_side_and_together() -> None:
    ours = Turn(took_s=9.0, cells={"fp32 × 1": (1.0, 2.0, 9.0), "bf16 × 4": (4.0, 4.0, 4.0)})
    theirs = Turn(took_s=9.0, cells={"fp32 × 1": (1.0, 1.0, 1.0), "bf16 × 4": (2.0, 4.0, 4.0)})
    together = line_of_cells(ours, theirs, "peer")
    assert together.ours[0] == OUTPUT_TOKENS / 2.0 and together.theirs[0] == OUTPUT_TOKENS / 1.0
    assert together.ratios == (0.5, 1.0) and together.met is None  # two cells settle nothing
    assert ratios_of_cells(ours, theirs) == {"fp32 × 1": 0.5, "bf16 × 4": 1.0}
