"""Decoder layers in machine code: what torch's operations compute, over slots."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_formats import KERNELS, format_for, in_format
from test_packed_layers import continued, small

from workloads import native_code
from workloads.errors import Unsupported
from workloads.generation import continuous_batching, kv_cache
from workloads.generation.admission import Admission
from workloads.generation.native import decoder_layer
from workloads.generation.native.products import code, computes
from workloads.generation.packed import pack

_MADE = "workloads.native_code.native_code"
pytestmark = pytest.mark.skipif(not computes("fp32"), reason=code().lacking or "needs AVX-512")
_PROMPTS = [[1, 5, 3, 2, 9, 4, 7], [6], [7, 8, 9]]


def over_slots(model: Any, steps: int = 3) -> torch.Tensor:
    """Logits of the prompts' last tokens, then of further tokens that are the same for all
    models: [1 + steps, prompts, vocabulary]."""
    cache = kv_cache.KVCache(4, 16)
    slots, found = [2, 0, 1], []
    with continuous_batching.attention_over_kv_cache(model), torch.inference_mode():
        ids = [token for prompt in _PROMPTS for token in prompt]
        starts = [0, 7, 8]
        segments = [
            kv_cache.Segment(slot, start, len(prompt))
            for slot, start, prompt in zip(slots, starts, _PROMPTS, strict=True)
        ]
        read = model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.cat([torch.arange(len(prompt)) for prompt in _PROMPTS])[None],
            use_cache=False,
            cache_pass=kv_cache.Prefill(cache, segments),
        ).logits[0]
        found.append(read[[6, 7, 10]])
        for step in range(steps):
            lengths = [len(prompt) + step for prompt in _PROMPTS]
            groups = [(0, [lengths[1], lengths[2]]), (2, [lengths[0]])]
            work = kv_cache.Decode(cache, groups, model.dtype, torch.device("cpu"))
            logits = model(
                input_ids=torch.tensor([[3 + step], [4], [5]]),
                position_ids=work.positions[:, None],
                use_cache=False,
                cache_pass=work,
            ).logits[:, 0]
            found.append(logits[[2, 0, 1]])
    return torch.stack(found).float()


#: How far layers in each format may be off, as a share of what they compute.
_MOST = {"fp32": 1e-5, "bf16": 0.02, "int8": 0.05}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Glm"])
def test_machine_code_computes_the_same(
    kind: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves turned and neighbours turned, all of a head or a part of it, biases or none; prompts
    read together, and texts continued in slots of any order."""
    name = format_for(kernel, monkeypatch)
    plain, packed = in_format(small(kind), name), in_format(small(kind), name)
    told = pack(packed, continuous=True)
    assert f"2 in one call of machine code in {name} in continuous batches" in told
    assert ("multiplied by pairs" in told) is (kernel == "bf16_pairs")
    expected, got = over_slots(plain), over_slots(packed)
    assert (got - expected).norm() < _MOST[name] * expected.norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_embeddings_read_the_output_layers_panels(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that both need is there once, and both get its numbers."""
    name = format_for(kernel, monkeypatch)
    plain, packed = (in_format(small("Llama", tie_word_embeddings=True), name) for _ in range(2))
    matrix = packed.lm_head.weight
    assert matrix is packed.get_input_embeddings().weight
    held, ids = weakref.ref(matrix), torch.tensor([[1, 63, 32, 31], [0, 16, 15, 47]])
    del matrix
    told = pack(packed, continuous=True)
    assert told.startswith("15 layers") and held() is None
    with torch.inference_mode():
        expected, got = (each.get_input_embeddings()(ids) for each in (plain, packed))
        assert got.equal(expected)
        for beyond in (-1, 64):
            with pytest.raises(IndexError):
                packed.get_input_embeddings()(torch.tensor([0, beyond]))
        inputs = torch.randn(3, 64).to(expected.dtype)
        torch.testing.assert_close(
            *(each.lm_head(inputs).float() for each in (packed, plain)), rtol=1e-2, atol=1e-2
        )
    if name == "fp32":
        asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
        assert packed.generate(ids, **asked).equal(plain.generate(ids, **asked))


@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (2, 2), (16, 2)])
@pytest.mark.parametrize("width", [16, 64, 128])
def test_heads_of_any_size_attend(width: int, heads: tuple[int, int]) -> None:
    """Also of those sizes that have loops of their own."""
    sizes = {"head_dim": width, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    plain, packed = small("Llama", **sizes), small("Llama", **sizes)
    assert "2 in one call of machine code" in pack(packed, continuous=True)
    torch.testing.assert_close(over_slots(packed), over_slots(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["bf16", "bf16_pairs", "int8"])
@pytest.mark.parametrize(("width", "heads"), [(16, (16, 2)), (64, (3, 1)), (128, (4, 1))])
def test_heads_of_any_size_attend_in_16_bits(
    width: int, heads: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over keys and values of half the size."""
    name = format_for(kernel, monkeypatch)
    sizes = {"head_dim": width, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sizes["hidden_size"] = 96
    plain, packed = (in_format(small("Llama", **sizes), name) for _ in range(2))
    assert "2 in one call of machine code" in pack(packed, continuous=True)
    expected, got = over_slots(plain), over_slots(packed)
    assert (got - expected).norm() < _MOST[name] * expected.norm()


def read_prompts(model: Any, lengths: list[int]) -> torch.Tensor:
    """Logits of all tokens of prompts that are read in one pass: [tokens, vocabulary]."""
    cache = kv_cache.KVCache(len(lengths), max(lengths))
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    segments = [
        kv_cache.Segment(slot, start, length)
        for slot, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    ids = torch.arange(sum(lengths)) * 7 % 61
    with continuous_batching.attention_over_kv_cache(model), torch.inference_mode():
        found = model(
            input_ids=ids[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            cache_pass=kv_cache.Prefill(cache, segments),
        ).logits
    return found[0].float()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kernel", "most"), [("fp32", 1e-5), ("bf16", 0.04), ("bf16_pairs", 0.04)])
@pytest.mark.parametrize(("width", "heads"), [(16, (6, 2)), (48, (16, 1)), (64, (2, 2))])
def test_prompts_are_attended_to_in_blocks(
    width: int,
    heads: tuple[int, int],
    kernel: str,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one row up to more than are attended to at a time; each token sees those before it, and
    none of another prompt."""
    name = format_for(kernel, monkeypatch)
    sizes = {"head_dim": width, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sizes |= {"hidden_size": 96, "max_position_embeddings": 512}
    plain, packed = (in_format(small("Llama", **sizes), name) for _ in range(2))
    assert "2 in one call of machine code" in pack(packed, continuous=True)
    lengths = [1, 2, 31, 32, 129, 150, 5]
    expected, got = read_prompts(plain, lengths), read_prompts(packed, lengths)
    off = (got - expected).norm(dim=1)
    assert bool((off < most * expected.norm(dim=1)).all())


def test_a_long_prompt_is_read_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention row by row would cost more; the texts are the same."""
    plain, packed = small("Llama"), small("Llama")
    pack(packed, continuous=True)
    expected = continued(plain)
    assert continued(packed) == expected
    monkeypatch.setattr(decoder_layer, "LONGEST_PROMPT", 2)
    assert continued(packed) == expected


def test_a_node_without_machine_code_packs_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the row tells why."""
    lacking = native_code.NativeCode(lacking="no compiler g++ on this node")
    monkeypatch.setattr(_MADE, lambda _: lacking)
    plain, packed = small("Llama"), small("Llama")
    told = pack(packed, continuous=True)
    assert "2 decoder layers in few calls" in told
    assert "none in machine code (no compiler g++ on this node)" in told
    assert continued(packed) == continued(plain)


def never_compiled(_: object) -> native_code.NativeCode:
    pytest.fail("nothing was to be compiled")


def test_static_batches_stay_with_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is compiled for them."""
    monkeypatch.setattr(_MADE, never_compiled)
    told = pack(small("Llama"))
    assert "2 gated feed-forward layers in one piece" in told
    assert "2 decoder layers in few calls" in told and "machine code" not in told


def test_nothing_is_compiled_for_a_processor_without_avx512(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the row tells why."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setattr(_MADE, never_compiled)
    told = pack(small("Llama"), continuous=True)
    assert "none in machine code (this processor has no AVX-512)" in told


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_nothing_is_compiled_for_what_is_left_to_tiles(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the proof of a layer either; and the row tells why."""
    with_tiles = torch.cpu.get_capabilities() | {"amx_tile": True, "avx512_vnni": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: with_tiles)
    monkeypatch.setattr(_MADE, never_compiled)
    told = pack(in_format(small("Llama"), name), continuous=True)
    assert "2 decoder layers in few calls" in told
    assert f"none in machine code ({name} is left to oneDNN" in told


def test_tiles_leave_fp32_to_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """They multiply no fp32."""
    with_tiles = torch.cpu.get_capabilities() | {"amx_tile": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: with_tiles)
    assert "2 in one call of machine code in fp32" in pack(small("Llama"), continuous=True)


def test_a_row_says_how_long_compiling_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process that did it; others found the code."""
    kept, made = replace(code(), compile_s=0.0), replace(code(), compile_s=3.52)
    monkeypatch.setattr(_MADE, lambda _: kept)
    assert "compiled" not in pack(small("Llama"), continuous=True)
    monkeypatch.setattr(_MADE, lambda _: made)
    told = pack(small("Llama"), continuous=True)
    assert told.endswith(" in continuous batches, compiled once in this process in 3.5 s")


def test_a_cache_is_gone_with_its_texts() -> None:
    """Layers that remember where it lies do not hold it."""
    model = small("Llama")
    pack(model, continuous=True)
    made: list[weakref.ref[Any]] = []

    class Watched(kv_cache.KVCache):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            made.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "KVCache", Watched)
        continued(model)
        continued(model)
    gc.collect()
    assert len(made) == 2 and not any(each() for each in made)


def test_words_that_change_attention_are_refused() -> None:
    """As by attention over the KV cache itself."""
    model = small("Llama")
    pack(model, continuous=True)
    cache = kv_cache.KVCache(1, 4)
    with (
        continuous_batching.attention_over_kv_cache(model),
        torch.inference_mode(),
        pytest.raises(Unsupported, match="softcap"),
    ):
        model(
            input_ids=torch.tensor([[1, 2]]),
            use_cache=False,
            softcap=1.0,
            cache_pass=kv_cache.Prefill(cache, [kv_cache.Segment(0, 0, 2)]),
        )


@pytest.mark.parametrize("segment", [(0, 5), (1, 2)])
def test_a_pass_beyond_its_cache_is_left_to_torch(segment: tuple[int, int]) -> None:
    """Which says what is wrong, and writes to no other memory."""
    slot, length = segment
    work = kv_cache.Prefill(kv_cache.KVCache(1, 4), [kv_cache.Segment(slot, 0, length)])
    angles = (torch.ones(1, length, 16),) * 2
    assert decoder_layer.Passes()(work, angles, torch.float32)[0] is None


def test_a_pass_with_other_angles_is_made_anew() -> None:
    """Layers may turn unlike one another."""
    passes, angles = decoder_layer.Passes(), [(torch.full((1, 2, 16), x),) * 2 for x in (0.5, 1.0)]
    work = kv_cache.Prefill(kv_cache.KVCache(1, 4), [kv_cache.Segment(0, 0, 2)])
    first, same, other = (passes(work, angles[at], torch.float32)[0] for at in (0, 0, 1))
    assert first is not None and first is same and first is not other


def test_texts_that_are_attended_to_by_rows_are_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """They make no room for one another; texts of a model without machine code do."""
    seen: list[set[int]] = []

    class Watched(Admission):
        def __init__(self, lengths: Any, slot_count: int, classes: Any) -> None:
            seen.append(set(classes))
            super().__init__(lengths, slot_count, classes)

    monkeypatch.setattr(continuous_batching, "Admission", Watched)
    monkeypatch.setattr(kv_cache, "SHORTEST", 6)
    plain, packed = small("Llama"), small("Llama")
    pack(packed, continuous=True)
    assert continued(packed) == continued(plain)
    assert seen[0] == {0} and len(seen[1]) > 1
