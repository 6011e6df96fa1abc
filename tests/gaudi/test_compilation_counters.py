"""The bridge's counters around the timed part, with the real optimum-habana under the stand-in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rows_of import rows_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def rows(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Generation and training, where nothing, one timed part, and every one compiles."""
    dataset = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [json.dumps({"content": text, "summary": ""}) for text in ("a", "b b b", "c")]
    dataset.write_text("\n".join(lines) + "\n")
    return rows_of("counted_jobs.py", dataset, tiny_llama)


@pytest.mark.parametrize(("kind", "steps", "shapes"), [("generation", 6, 2), ("training", 3, 1)])
def test_three_passes_compile_everything_before_timing(
    rows: dict[str, Any], kind: str, steps: int, shapes: int
) -> None:
    """As the library itself does: three for each shape, and none is compiled while the clock
    runs. Generation compiles, as the counters show, in its first passes."""
    row = rows[f"{kind} 0"]
    assert (row["warmup_steps"], row["warmup_end"]) == (steps, "complete")
    assert (row["shapes"], row["shapes_unmet"]) == (shapes, 0)
    assert (row["timed_compilations"], row["timed_cpu_fallbacks"]) == (0, 0)
    assert row["timed_parts"] == 1 and not row["compiled"].count("graph_compilation")
    assert kind == "training" or row["compiled_in_all"] > 0


@pytest.mark.parametrize("kind", ["generation", "training"])
def test_a_timed_part_that_compiled_is_repeated(rows: dict[str, Any], kind: str) -> None:
    """Compiled once, it is clean the second time; training learns what it would have learned."""
    once, never = rows[f"{kind} 1"], rows[f"{kind} 0"]
    assert (once["timed_parts"], once["timed_compilations"]) == (2, 0)
    assert once["timed"] == never["timed"] and once["warmup_steps"] > never["warmup_steps"]
    assert once["loss"] == never["loss"]


@pytest.mark.parametrize("kind", ["generation", "training"])
def test_what_always_compiles_is_told_with_all_counters(rows: dict[str, Any], kind: str) -> None:
    """The row has the number of graphs, of operations left to the host, and the details."""
    row = rows[f"{kind} 9"]
    assert row["timed_parts"] == 2 and row["timed_compilations"] == row["timed_cpu_fallbacks"] > 0
    number = row["timed_compilations"]
    assert f"graph_compilation_number {number}" in row["compiled"]
    assert f"graph_compilation_us {1_500_000 * number:g}" in row["compiled"]
    assert f"recipe_cache_misses {number}" in row["compiled"]


def test_generation_has_the_settings_of_the_librarys_own_script(rows: dict[str, Any]) -> None:
    """As its text-generation example sets them for bf16 with fused attention, a kept cache and
    buckets: its fast softmax too, which reaches the fused kernel that reads prompts."""
    assert rows["config"] == {
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
    assert rows["generation 0"]["softmax"] == ["None", "fast"]  # Llama's decoding has the plain one
    said = rows["generation 0"]["details"]
    assert (said["fast_softmax"], said["kept_cache"], said["bucket"]) == ("true", "true", "128")
