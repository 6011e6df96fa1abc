"""BERT pretraining with the real optimum-habana under the stand-in, in lazy mode and compiled."""

from __future__ import annotations

from typing import Any

import pytest
from rows_of import rows_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["lazy", "compile"])
def rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of each job of ``masked_words.py``, in a process of that mode."""
    mode = request.param
    lazy = "1" if mode == "lazy" else "0"
    variables = {"PT_HPU_LAZY_MODE": lazy, "PT_ENABLE_INT64_SUPPORT": "1"}
    return rows_of("masked_words.py", mode, **variables) | {"mode": mode}


def test_the_librarys_trainer_learns_what_our_loop_learns(rows: dict[str, Any]) -> None:
    """Same fresh weights, masks, clipping and schedule: the first loss is equal, and later ones are
    as near as an epsilon of 1e-6 in the library's AdamW beside torch's 1e-8 lets them be. A sample
    is a chunk. Compiled, the model went through torch.compile's graphs."""
    row, own = rows["fresh"], rows["own loop"]
    assert row["details"]["trainer"] == "GaudiTrainer"
    assert row["details"]["hpu_mode"] == rows["mode"] and row["details"]["new_weights"] == "all"
    assert row["loss"][0] == pytest.approx(own["loss"][0], rel=1e-6)
    assert row["loss"] == pytest.approx(own["loss"], rel=3e-3)
    assert row["loss"][-1] < 0.95 * row["loss"][0]
    assert row["items"] == [4] * 6 and row["input_tokens"] == [4 * 64] * 6
    assert row["warmup"] == [True] * 3 + [False] * 3
    assert (row["graphs"] > 0) is (rows["mode"] == "compile")
    found = row["metrics"]
    assert found["first_batch_loss_after"] < found["first_batch_loss_before"]


def test_autocast_is_mixed_precision(rows: dict[str, Any]) -> None:
    """ "bf16" of the published comparison: fp32 weights under bf16 autocast."""
    exact, mixed = rows["fresh"]["loss"], rows["mixed"]["loss"]
    assert mixed == pytest.approx(exact, rel=1e-3) and mixed != exact


def test_two_cards_learn_as_one(rows: dict[str, Any]) -> None:
    """By DDP; the library averages the means of the cards, whose masks are not equally many."""
    if rows["mode"] != "lazy":
        pytest.skip("the gang is one of the lazy process")
    both = rows["gang"]
    means = [sum(losses) / 2 for losses in zip(*(rank["loss"] for rank in both), strict=True)]
    assert means == pytest.approx(rows["fresh"]["loss"], rel=1e-2)
    assert [rank["items"] for rank in both] == [[2] * 6] * 2
    assert all(rank["details"]["data_parallel"] == "2" for rank in both)


def test_a_checkpoint_goes_on(rows: dict[str, Any]) -> None:
    """With its own weights, none of which are new."""
    if rows["mode"] != "lazy":
        pytest.skip("once is enough")
    row = rows["checkpoint"]
    assert "new_weights" not in row["details"]
    assert row["loss"][0] != rows["fresh"]["loss"][0]
