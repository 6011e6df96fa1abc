"""Stable Diffusion by the real optimum-habana under the stand-in, beside stock diffusers."""

from __future__ import annotations

from typing import Any

import pytest
from rows_of import rows_of

pytestmark = pytest.mark.timeout(600)
STEPS, BATCHES = 4, 4  # of each job, two batches of them left out


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Seven jobs in one process."""
    return rows_of("image_jobs.py")


@pytest.mark.parametrize("name", ["usual", "collected", "unguided", "euler", "xl"])
def test_images_are_those_of_stock_diffusers(rows: dict[str, Any], name: str) -> None:
    """In fp32, from the same latents, with captured graphs and without: to a rounded level."""
    assert rows[name]["difference"] < 0.1


def test_other_batches_and_formats_paint_nearly_the_same(rows: dict[str, Any]) -> None:
    """The first image of a batch of four, and of weights in bf16."""
    assert rows["four"]["difference"] < 0.1
    assert 0 < rows["bf16"]["difference"] < 3
    assert rows["bf16"]["precision"].startswith("bfloat16")


def test_the_unet_is_captured_once_and_replayed(rows: dict[str, Any]) -> None:
    """One shape is one graph; every further step of every batch is a replay, and nothing is
    compiled while the clock runs."""
    for name, row in rows.items():
        graphs = name != "collected"
        assert row["details"]["hpu_graphs"] == ("yes" if graphs else "no")
        assert row["captured"] == (1 if graphs else 0)
        assert row["replayed"] == (STEPS * BATCHES - 1 if graphs else 0)
        assert row["timed_compilations"] == 0
        assert row["batches"] == [True, True, False, False]


def test_rows_tell_the_librarys_classes_and_all_of_their_time(rows: dict[str, Any]) -> None:
    """The clock is ours: what the parts took is what the batch took."""
    for name, row in rows.items():
        scheduler = "GaudiEulerDiscreteScheduler" if name == "euler" else "GaudiDDIMScheduler"
        kind = "XL" if name == "xl" else ""
        assert row["details"]["pipeline"] == f"GaudiStableDiffusion{kind}Pipeline"
        assert row["details"]["scheduler"] == scheduler
        for parts, wall in zip(row["parts"], row["walls"], strict=True):
            assert 0.95 * wall - 0.01 < parts <= wall
