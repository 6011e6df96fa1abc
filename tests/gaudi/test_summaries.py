"""T5 with the real optimum-habana under the stand-in: trained by its trainer, and writing."""

from __future__ import annotations

from typing import Any

import pytest
from rows_of import rows_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Results of each job of ``summaries.py``, all in one process and three forked from it."""
    return rows_of("summaries.py")


def test_t5_is_trained_by_the_librarys_trainer_for_pairs(rows: dict[str, Any]) -> None:
    """All weights or an adapter; the loss falls, and every batch has one shape: sources of 48
    tokens, targets of 24."""
    for name in ("full", "lora"):
        row = rows[name]
        assert row["details"]["trainer"] == "GaudiSeq2SeqTrainer"
        assert row["details"]["architecture"] == "GaudiT5ForConditionalGeneration"
        assert row["warmup"] == [True] * 3 + [False] * 3 and row["items"] == [4] * 6
        assert row["computed_tokens"] == [4 * (48 + 24)] * 6
        found = row["metrics"]
        assert found["first_batch_loss_after"] < found["first_batch_loss_before"]
    assert rows["lora"]["details"]["adapter"] == "rank 8, alpha 16 on q, k, v"


def test_gradient_checkpointing_learns_the_same(rows: dict[str, Any]) -> None:
    """By torch's own function; the library's copy of it dies in T5's backward pass."""
    assert rows["checkpointed"]["loss"] == pytest.approx(rows["full"]["loss"], rel=1e-6)
    assert "use_reentrant=False" in rows["checkpointed"]["details"]["gradient_checkpointing"]


def test_two_cards_learn_what_one_learns_from_the_same_batch(rows: dict[str, Any]) -> None:
    """With checkpointing, two pairs on each of two cards: the mean of their losses is that of four
    pairs on one card, at every step."""
    first, second = rows["gang"]
    mean = [(a + b) / 2 for a, b in zip(first["loss"], second["loss"], strict=True)]
    assert mean == pytest.approx(rows["full"]["loss"], rel=1e-5)
    assert first["loss"] != second["loss"] and first["items"] == second["items"] == [2] * 6
    assert [a + b for a, b in zip(first["input_tokens"], second["input_tokens"], strict=True)] == (
        rows["full"]["input_tokens"]
    )
    assert first["details"]["strategy"] == "ddp" and first["details"]["data_parallel"] == "2"


def test_summaries_are_those_of_stock_transformers(rows: dict[str, Any]) -> None:
    """In fp32 token for token, with the source padded to a bucket; encoder and decoder apart."""
    written = rows["written"]
    assert written["texts"] == rows["stock"]["texts"] and len(written["texts"]) == 3
    assert written["details"]["static_shapes"] == "true"
    assert written["computed_tokens"] == [2 * (128 + 12), 128 + 12]
    for row in (written, rows["written in bf16"]):
        for encoder_s, wall_s in zip(row["encoder_s"], row["wall_s"], strict=True):
            assert 0 < encoder_s < wall_s
        found = row["metrics"]
        assert found["summaries_per_s"] == pytest.approx(3 / sum(row["wall_s"]))
        assert found["encoder_s"] + found["decoder_s"] == pytest.approx(sum(row["wall_s"]) / 2)
