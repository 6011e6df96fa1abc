"""Jobs of the real optimum-habana under the stand-in, beside stock libraries and our own loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import patience

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
STEPS, BATCHES = 4, 4  # of each image job, two batches of them left out
pytestmark = pytest.mark.timeout(900)


def rows_of(*arguments: str) -> dict[str, Any]:
    """Run ``gaudi_jobs.py`` and return its rows: with arguments in lazy mode, else compiled."""
    folders = [TESTS.parent, TESTS, TESTS / "workloads", os.environ.get("PYTHONPATH", "")]
    compiled = {"PT_HPU_LAZY_MODE": "0", "PT_ENABLE_INT64_SUPPORT": "1"}
    mode = {"PT_HPU_LAZY_MODE": "1"} if arguments else compiled
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, str(HERE / "gaudi_jobs.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **mode},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=patience(800),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    rows: dict[str, Any] = json.loads(line.removeprefix("ROWS "))
    return rows


@pytest.fixture(scope="module")
def rows(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    dataset = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [json.dumps({"content": text, "summary": ""}) for text in ("a", "b b b", "c")]
    dataset.write_text("\n".join(lines) + "\n")
    with ThreadPoolExecutor() as pool:
        compiled = pool.submit(rows_of)
        return rows_of(str(dataset), tiny_llama) | {"compiled": compiled.result()}


# ---------------------------------------------------------------- the bridge's counters


@pytest.mark.parametrize(
    ("kind", "steps", "shapes"), [("text-generation", 6, 2), ("finetuning", 3, 1)]
)
def test_three_passes_compile_everything_before_timing(
    rows: dict[str, Any], kind: str, steps: int, shapes: int
) -> None:
    """As the library itself does: three for each shape."""
    row = rows["counted"][kind]
    assert (row["warmup_steps"], row["warmup_end"]) == (steps, "complete")
    assert (row["shapes"], row["shapes_unmet"]) == (shapes, 0)
    assert (row["timed_compilations"], row["timed_cpu_fallbacks"]) == (0, 0)
    counters = row["details"].get("compiled_in_timed_part", "")
    assert row["timed_parts"] == 1 and "graph_compilation" not in counters
    assert kind == "finetuning" or row["compiled_in_all"] > 0


def test_generation_has_the_settings_of_the_librarys_own_script(rows: dict[str, Any]) -> None:
    """As its text-generation example sets them for bf16 with fused attention, a kept cache and
    buckets: its fast softmax too, which reaches the fused kernel that reads prompts."""
    assert rows["counted"]["config"] == {
        "static_shapes": True,
        "use_cache": True,
        "trim_logits": True,
        "reuse_cache": True,
        "bucket_internal": True,
        "bucket_size": 128,
        "limit_hpu_graphs": False,
        "attn_softmax_bf16": True,
        "use_flash_attention": True,
        "flash_attention_recompute": True,
        "flash_attention_fast_softmax": True,
    }
    row = rows["counted"]["text-generation"]
    assert row["softmax"] == ["None", "fast"]  # Llama's decoding has the plain one
    details = row["details"]
    assert [details[name] for name in ("fast_softmax", "kept_cache", "bucket")] == [
        *("true", "true", "128")
    ]


# ---------------------------------------------------------------- Stable Diffusion


@pytest.mark.parametrize("name", ["usual", "collected", "unguided", "euler", "xl"])
def test_images_are_those_of_stock_diffusers(rows: dict[str, Any], name: str) -> None:
    """In fp32, from the same latents, with captured graphs and without: to a rounded level."""
    assert rows["images"][name]["difference"] < 0.1


def test_weights_in_bf16_paint_nearly_the_same(rows: dict[str, Any]) -> None:
    row = rows["images"]["bf16"]
    assert 0 < row["difference"] < 3 and row["precision"].startswith("bfloat16")


def test_the_unet_is_captured_once_and_replayed(rows: dict[str, Any]) -> None:
    """One shape is one graph; every further step of every batch is a replay, and nothing is
    compiled while the clock runs. The clock is ours: the parts' times are the batch's."""
    for name, row in rows["images"].items():
        captures = name != "collected"
        details = row["details"]
        assert details["hpu_graphs"] == ("yes" if captures else "no")
        assert row["captured"] == (1 if captures else 0)
        assert row["replayed"] == (STEPS * BATCHES - 1 if captures else 0)
        assert row["timed_compilations"] == 0
        assert row["batches"] == [True, True, False, False]
        scheduler = "GaudiEulerDiscreteScheduler" if name == "euler" else "GaudiDDIMScheduler"
        kind = "XL" if name == "xl" else ""
        assert details["pipeline"] == f"GaudiStableDiffusion{kind}Pipeline"
        assert details["scheduler"] == scheduler
        for parts, wall in zip(row["parts"], row["walls"], strict=True):
            assert 0.95 * wall - 0.01 < parts <= wall


# ---------------------------------------------------------------- T5


def test_t5_is_trained_by_the_librarys_trainer_for_pairs(rows: dict[str, Any]) -> None:
    row = rows["t5"]["full"]
    assert row["details"]["trainer"] == "GaudiSeq2SeqTrainer"
    assert row["details"]["architecture"] == "GaudiT5ForConditionalGeneration"
    assert row["warmup"] == [True] * 3 + [False] * 3 and row["items"] == [4] * 6
    assert row["computed_tokens"] == [4 * (48 + 24)] * 6
    losses = row["metrics"]
    assert losses["first_batch_loss_after"] < losses["first_batch_loss_before"]


def test_two_cards_learn_what_one_learns_from_the_same_batch(rows: dict[str, Any]) -> None:
    """With checkpointing, two pairs on each of two cards: the mean of their losses is that of four
    pairs on one card without, at every step. It is by torch's own function, since the library's
    copy of it dies in T5's backward pass."""
    one, (first, second) = rows["t5"]["full"], rows["t5"]["gang"]
    mean = [(a + b) / 2 for a, b in zip(first["loss"], second["loss"], strict=True)]
    assert mean == pytest.approx(one["loss"], rel=1e-5)
    assert first["loss"] != second["loss"] and first["items"] == second["items"] == [2] * 6
    tokens = zip(first["input_tokens"], second["input_tokens"], strict=True)
    assert [a + b for a, b in tokens] == one["input_tokens"]
    assert first["details"]["strategy"] == "ddp" and first["details"]["data_parallel"] == "2"
    assert "use_reentrant=False" in first["details"]["gradient_checkpointing"]


def test_summaries_are_those_of_stock_transformers(rows: dict[str, Any]) -> None:
    written = rows["t5"]["written"]
    assert written["texts"] == rows["t5"]["stock"]["texts"] and len(written["texts"]) == 3
    assert written["details"]["static_shapes"] == "true"
    assert written["computed_tokens"] == [2 * (128 + 12), 128 + 12]
    for row in (written, rows["t5"]["written in bf16"]):
        for encoder_s, wall_s in zip(row["encoder_s"], row["wall_s"], strict=True):
            assert 0 < encoder_s < wall_s
        figures = row["metrics"]
        assert figures["summaries_per_s"] == pytest.approx(3 / sum(row["wall_s"]))
        seconds = figures["encoder_s"] + figures["decoder_s"]
        assert seconds == pytest.approx(sum(row["wall_s"]) / 2)


# ---------------------------------------------------------------- BERT


@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_the_librarys_trainer_learns_what_our_loop_learns(rows: dict[str, Any], mode: str) -> None:
    """Same fresh weights, masks, clipping and schedule: the first loss is equal, and later ones are
    as near as an epsilon of 1e-6 in the library's AdamW beside torch's 1e-8 lets them be. A sample
    is a chunk."""
    row = rows["bert" if mode == "lazy" else "compiled"]["fresh"]
    own = rows["bert"]["own loop"]
    assert row["details"]["trainer"] == "GaudiTrainer"
    assert row["details"]["hpu_mode"] == mode and row["details"]["new_weights"] == "all"
    assert row["loss"][0] == pytest.approx(own["loss"][0], rel=1e-6)
    assert row["loss"] == pytest.approx(own["loss"], rel=3e-3)
    assert row["loss"][-1] < 0.95 * row["loss"][0]
    assert row["items"] == [4] * 6 and row["input_tokens"] == [4 * 64] * 6
    assert row["warmup"] == [True] * 3 + [False] * 3
    assert (row["graphs"] > 0) is (mode == "compile")
    losses = row["metrics"]
    assert losses["first_batch_loss_after"] < losses["first_batch_loss_before"]


def test_autocast_is_mixed_precision(rows: dict[str, Any]) -> None:
    """ "bf16" of the published comparison: fp32 weights under bf16 autocast."""
    exact, mixed = rows["bert"]["fresh"]["loss"], rows["bert"]["mixed"]["loss"]
    assert mixed == pytest.approx(exact, rel=1e-3) and mixed != exact


def test_two_cards_learn_as_one(rows: dict[str, Any]) -> None:
    """By DDP; the library averages the means of the cards, whose masks are not equally many."""
    both = rows["bert"]["gang"]
    means = [sum(losses) / 2 for losses in zip(*(rank["loss"] for rank in both), strict=True)]
    assert means == pytest.approx(rows["bert"]["fresh"]["loss"], rel=1e-2)
    assert [rank["items"] for rank in both] == [[2] * 6] * 2
    assert all(rank["details"]["data_parallel"] == "2" for rank in both)


def test_a_checkpoint_goes_on_with_its_own_weights(rows: dict[str, Any]) -> None:
    row = rows["bert"]["checkpoint"]
    assert "new_weights" not in row["details"]
    assert row["loss"][0] != rows["bert"]["fresh"]["loss"][0]


# ---------------------------------------------------------------- adapters


def test_both_engines_train_the_same_adapter_by_default(rows: dict[str, Any]) -> None:
    """The library's ChatGLM has one layer for query, key and value, and its trainer clips at 1
    unless it is told not to: neither shows."""
    library, own = (rows["adapted"][name] for name in ("optimum-habana", "transformers"))
    assert library["details"]["trainer"] == "GaudiTrainer"
    assert library["trainable"] == own["trainable"]
    assert library["details"]["adapter"] == own["details"]["adapter"]
    assert "max_gradient_norm" not in library["details"]
    assert library["loss"] == pytest.approx(own["loss"], rel=1e-3)
