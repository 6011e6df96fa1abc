"""Decoder layers in machine code: what torch's operations compute, over slots."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_packed_layers import continued, small

from workloads import native_code
from workloads.errors import Unsupported
from workloads.generation import continuous_batching, kv_cache
from workloads.generation.admission import Admission
from workloads.generation.native import decoder_layer
from workloads.generation.native.products import NativeLinear, code, computes, format_of, greatest
from workloads.generation.packed import pack

_MADE = "workloads.generation.native.products.native_code"
pytestmark = pytest.mark.skipif(not computes("fp32"), reason=code().lacking or "needs AVX-512")
_PROMPTS = [[1, 5, 3, 2, 9, 4, 7], [6], [7, 8, 9]]


def in_format(model: Any, name: str) -> Any:
    """The model in fp32, bf16, or bf16 with layers in int8."""
    if name == "fp32":
        return model
    model = model.bfloat16()
    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model, Int8WeightOnlyConfig())
    return model


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


@pytest.mark.parametrize(("name", "most"), [("fp32", 1e-5), ("bf16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Glm"])
def test_machine_code_computes_the_same(kind: str, name: str, most: float) -> None:
    """Halves turned and neighbours turned, all of a head or a part of it, biases or none; prompts
    read together, and texts continued in slots of any order."""
    if not computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
    plain, packed = in_format(small(kind), name), in_format(small(kind), name)
    told = pack(packed, continuous=True)
    assert f"2 in one call of machine code in {name} in continuous batches" in told
    expected, got = over_slots(plain), over_slots(packed)
    assert (got - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_embeddings_read_the_output_layers_panels(name: str) -> None:
    """A matrix that both need is there once, and both get its numbers."""
    if not computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
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


@pytest.mark.parametrize(("name", "most"), [("bf16", 0.02), ("int8", 0.05)])
@pytest.mark.parametrize(("width", "heads"), [(16, (16, 2)), (64, (3, 1)), (128, (4, 1))])
def test_heads_of_any_size_attend_in_16_bits(
    width: int, heads: tuple[int, int], name: str, most: float
) -> None:
    """Over keys and values of half the size."""
    if not computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
    sizes = {"head_dim": width, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sizes["hidden_size"] = 96
    plain, packed = (in_format(small("Llama", **sizes), name) for _ in range(2))
    assert "2 in one call of machine code" in pack(packed, continuous=True)
    expected, got = over_slots(plain), over_slots(packed)
    assert (got - expected).norm() < most * expected.norm()


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


def test_bf16_is_left_to_a_processors_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the compiler knows of none; and the row tells why."""
    with_tiles = torch.cpu.get_capabilities() | {"amx_tile": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: with_tiles)
    told = pack(small("Llama").bfloat16(), continuous=True)
    assert "none in machine code (it is not for this format" in told
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


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 13, 14, 15, 64, 300])
def test_products_of_any_number_of_rows(name: str, rows: int) -> None:
    """Blocks of rows meet without a gap, in parts of a cache's size, too."""
    if not computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
    torch.manual_seed(rows)
    linear = torch.nn.Linear(1152, 96)
    model = torch.nn.ModuleDict({"model": linear})
    (linear,) = in_format(model, name).values()
    inputs = torch.randn(rows, 1152).to(linear.bias.dtype)
    with torch.no_grad():
        expected = linear(inputs).float()
        got = NativeLinear([linear])(inputs).float()
    most = {"fp32": 1e-6, "bf16": 4e-3, "int8": 0.02}[name]
    assert (got - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_inputs_of_another_format_are_refused(name: str) -> None:
    """They would be read as numbers of another size."""
    if not computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
    model = torch.nn.ModuleDict({"model": torch.nn.Linear(64, 32)})
    (linear,) = in_format(model, name).values()
    with pytest.raises(TypeError, match="float16"):
        NativeLinear([linear])(torch.zeros(2, 64, dtype=torch.float16))


def test_a_product_without_memory_is_an_error() -> None:
    """Rather than the end of the process."""
    product = NativeLinear([torch.nn.Linear(32, 32)])
    product.in_features = 1 << 30  # 2 ** 48 bytes with these rows: more than can be addressed
    with pytest.raises(MemoryError):
        product(torch.zeros(1 << 16, 32))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [4, 1000])
def test_the_first_of_the_greatest_is_found(dtype: torch.dtype, values: int) -> None:
    """As by argmax, with ties, beside what is no number, and where all are the least."""
    torch.manual_seed(values)
    rows = torch.randint(0, values, (9, 333)).to(dtype)
    rows[1, 7] = rows[1, 9] = rows[2, 0] = float("nan")
    rows[3] = float("-inf")
    rows[4, -1] = float("inf")
    found = greatest(rows)
    assert found is not None and found.tolist() == rows.argmax(-1).tolist()
    assert greatest(rows.t()) is None and greatest(rows.half()) is None


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


def test_what_is_no_number_is_not_hidden_by_int8() -> None:
    """A row with one has none but such; the rows beside it are as they were."""
    if not computes("int8"):
        pytest.skip("int8 is left to oneDNN here")
    model = torch.nn.ModuleDict({"model": torch.nn.Linear(64, 32)})
    (linear,) = in_format(model, "int8").values()
    assert format_of([linear]) == "int8"
    inputs = torch.randn(3, 64).bfloat16()
    inputs[1, 5] = float("nan")
    with torch.no_grad():
        found = NativeLinear([linear])(inputs)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
