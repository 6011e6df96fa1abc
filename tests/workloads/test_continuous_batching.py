"""Batching sorted and continuous: the same texts, less work, honest counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation_cases import Worker, write_dataset
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from schedule_cases import job

from workloads.api import Result
from workloads.devices.monitoring.host_memory import resident_bytes
from workloads.errors import Unsupported
from workloads.generation import kv_cache
from workloads.generation.admission import Admission, Move
from workloads.generation.continuous_batching import best_tokens, generate
from workloads.generation.kv_cache import KVCache, length_classes
from workloads.generation.packed import pack
from workloads.generation.packed_products import GatedProduct, Int8Linear, LeftLinear, PackedLinear
from workloads.refusal import Asked
from workloads.registry import find_workload, refusals


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "prompts.json")


def texts(result: Result) -> dict[int, tuple[int, int, str | None]]:
    return {i.index: (i.input_tokens, i.output_tokens, i.output_text) for i in result.items}


@pytest.fixture(scope="module")
def plain(worker: Worker, dataset: str) -> Result:
    return worker.run(dataset, batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["sorted", "continuous"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batching_changes_no_text(
    batching: str, batch_size: int, worker: Worker, dataset: str, plain: Result
) -> None:
    """In fp32 each prompt gets what it gets in static batches, and counts as much."""
    result = worker.run(dataset, batch_size=batch_size, batching=batching)
    assert texts(result) == texts(plain)
    for count in ("items", "input_tokens", "output_tokens"):
        assert sum(getattr(s, count) for s in result.samples) == sum(
            getattr(s, count) for s in plain.samples
        )


@pytest.mark.slow
def test_what_memory_held_before_changes_no_text(
    worker: Worker, dataset: str, plain: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of unequal length are attended to up to the longest: what lies beyond the end of the
    others must not be what some earlier tensor left there, here not-a-number."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        result = worker.run(dataset, batch_size=8, batching="continuous")
    finally:
        torch.use_deterministic_algorithms(False)
    assert texts(result) == texts(plain)


@pytest.mark.real
def test_continuous_batching_changes_no_text_of_the_pretrained_model(
    tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second shipped architecture: a Llama with fewer keys than heads."""
    monkeypatch.setenv("NIGHTGRID_CACHE", str(pretrained))
    prompts = write_dataset(tmp_path / "prompts.json", ["Name a colour.", "Hi", "What is 2 + 2?"])
    worker = Worker()
    asked = {"model": "smollm2-135m-instruct", "prompts": 3, "output_tokens": 12, "batch_size": 2}
    plain = worker.run(prompts, **asked)
    assert texts(worker.run(prompts, batching="continuous", **asked)) == texts(plain)
    packed = Worker().run(prompts, batching="continuous", packed_weights=True, **asked)
    assert texts(packed) == texts(plain)


def test_continuous_batching_pads_nothing(worker: Worker, dataset: str, plain: Result) -> None:
    """Each prompt is read once, each token but the last is fed back once, and nothing else."""
    (sample,) = worker.run(dataset, batch_size=3, batching="continuous").samples
    assert sample.computed_tokens == sample.input_tokens + sample.output_tokens - sample.items
    assert sample.computed_tokens < sum(s.computed_tokens for s in plain.samples)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [3, 64])
def test_the_kv_cache_has_no_slot_without_a_prompt(
    slots: int, worker: Worker, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch size beyond the prompts takes no memory for those that are not there."""
    made: list[int] = []

    def noted(slot_count: int, capacity: int) -> KVCache:
        made.append(slot_count)
        return KVCache(slot_count, capacity)

    monkeypatch.setattr(kv_cache, "KVCache", noted)
    result = worker.run(dataset, batch_size=slots, batching="continuous")
    assert max(made) <= slots and sum(made) <= len(result.items) * len(result.samples)


def test_sorting_pads_less(worker: Worker, dataset: str, plain: Result) -> None:
    """Prompts of like length meet."""
    result = worker.run(dataset, batch_size=3, batching="sorted")
    lengths = [item.input_tokens for item in result.items]
    assert lengths == sorted(lengths)
    assert sum(s.computed_tokens for s in result.samples) < sum(
        s.computed_tokens for s in plain.samples
    )


def test_the_times_of_continuous_batching_fit_together(worker: Worker, dataset: str) -> None:
    """Reading comes before the end, and all steps lie within the batch."""
    result = worker.run(dataset, batch_size=3, batching="continuous")
    (sample,) = result.samples
    assert all(item.ttft_s and 0 < item.ttft_s <= item.latency_s for item in result.items)
    assert sample.ttft_s and sum(sample.step_s) <= sample.wall_s
    # Slots are full most of the time: fewer steps than one slot would need, more than if all fit.
    decoded = sample.output_tokens - sample.items
    assert decoded / 3 <= len(sample.step_s) < decoded


def test_the_model_is_left_as_it_was(worker: Worker, dataset: str, plain: Result) -> None:
    """After continuous batching, the same resident model generates in static batches as before."""
    worker.run(dataset, batch_size=8, batching="continuous")
    again = worker.run(dataset, batch_size=3)
    assert texts(again) == texts(plain)
    assert again.details["attention"] == "sdpa"


def test_ignore_eos_gives_every_prompt_its_tokens(worker: Worker, dataset: str) -> None:
    """In fixed-length mode nothing ends early."""
    result = worker.run(
        dataset, batch_size=3, batching="continuous", ignore_eos=True, output_tokens=9
    )
    assert {item.output_tokens for item in result.items} == {9}


@pytest.mark.parametrize("layer", [PackedLinear, LeftLinear])
@pytest.mark.parametrize("rows", [1, 3, 32, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_compute_the_same(
    layer: Callable[[torch.nn.Linear], torch.nn.Module], rows: int, bias: bool
) -> None:
    """Another layout of the same matrix, up to the order of its sums. (Texts of random weights do
    not tell: their best two tokens are nearly as good.)"""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 160, bias=bias)
    inputs = torch.randn(2, rows, 96)
    with torch.no_grad():
        torch.testing.assert_close(layer(linear)(inputs), linear(inputs))


def test_a_matrix_that_is_needed_twice_is_there_once() -> None:
    """Embeddings keep theirs; the last layer, tied to them, multiplies by the same one."""
    model = torch.nn.Sequential(torch.nn.Embedding(160, 96), torch.nn.Linear(96, 160, bias=False))
    model[1].weight = model[0].weight
    untied = torch.nn.Sequential(torch.nn.Linear(96, 160), model)
    assert pack(untied) == "2 layers"
    assert isinstance(untied[0], PackedLinear)
    assert isinstance(model[1], LeftLinear) and model[1].weight is model[0].weight


class Gated(torch.nn.Module):
    """A feed-forward layer as most models write it, or one with its first matrices in one."""

    def __init__(self, activation: torch.nn.Module, together: bool, bias: bool) -> None:
        super().__init__()
        if together:
            self.gate_up_proj = torch.nn.Linear(96, 2 * 160, bias=bias)
        else:
            self.gate_proj = torch.nn.Linear(96, 160, bias=bias)
            self.up_proj = torch.nn.Linear(96, 160, bias=bias)
        self.down_proj = torch.nn.Linear(160, 96, bias=bias)
        self.activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(inputs).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(inputs), self.up_proj(inputs)
        found: torch.Tensor = self.down_proj(self.activation(gate) * up)
        return found


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_gated_layer_in_one_piece_computes_the_same(together: bool, bias: bool) -> None:
    """SwiGLU, with gate and up in one matrix or in two."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Gated(torch.nn.SiLU(), together, bias))
    inputs = torch.randn(2, 7, 96)
    expected = model(inputs)
    assert "1 gated" in pack(model)
    assert isinstance(model[0], GatedProduct)
    torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_gated_layer_with_another_activation_stays_as_it_is() -> None:
    """Names alone do not say what a model computes."""
    model = torch.nn.Sequential(Gated(torch.nn.GELU(), together=False, bias=False))
    inputs = torch.randn(2, 7, 96)
    expected = model(inputs)
    assert pack(model) == "3 layers" and isinstance(model[0], Gated)
    torch.testing.assert_close(model(inputs), expected)


class AnotherGated(Gated):
    """Layers of the same names, computed from other inputs."""

    def forward(self, inputs: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs) * scale


class InAPair(Gated):
    """The same layer, whose output comes with something else."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(inputs), None


@pytest.mark.parametrize("kind", [AnotherGated, InAPair])
def test_a_gated_layer_called_in_another_way_stays_as_it_is(kind: type[Gated]) -> None:
    """A forward that cannot be asked the usual way must not end the load."""
    model = torch.nn.Sequential(kind(torch.nn.SiLU(), together=False, bias=False))
    assert pack(model) == "3 layers" and isinstance(model[0], kind)


def test_plain_matrices_are_freed_while_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and packed matrices together are never many more than the model has."""
    layers = [torch.nn.Linear(96, 96) for _ in range(5)]
    model = torch.nn.Sequential(*layers, *(Gated(torch.nn.SiLU(), False, False) for _ in range(5)))
    plain = [weakref.ref(each) for each in model.parameters() if each.dim() == 2]
    packed, most = 0, 0

    class Counted(PackedLinear):
        def __init__(self, linear: torch.nn.Linear) -> None:
            nonlocal packed, most
            super().__init__(linear)
            packed += 1
            most = max(most, packed + sum(each() is not None for each in plain))

    del layers
    for module in ("packed", "packed_products"):
        monkeypatch.setattr(f"workloads.generation.{module}.PackedLinear", Counted)
    pack(model)
    assert packed == len(plain) == 20
    assert most <= len(plain) + 6  # a gated layer has three matrices; the one before may be held


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_int8_weights_multiply_int8_activations(bias: bool) -> None:
    """Close to the weight-only product, closer where numbers are spread evenly; layers that read
    the same tensor convert it once, and a new tensor anew."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(96, 160, bias=bias) for _ in range(2)).bfloat16()
    quantize_(model, Int8WeightOnlyConfig())
    inputs = [torch.randn(2, 7, 96).bfloat16(), torch.randint(-127, 128, (2, 7, 96)).bfloat16()]
    expected = [[layer(each).float() for layer in model] for each in inputs]
    assert "2 with activations in int8" in pack(model)
    assert all(isinstance(layer, Int8Linear) for layer in model)
    for each, wanted, most in zip(inputs, expected, (0.02, 0.01), strict=True):
        for layer, right in zip(model, wanted, strict=True):
            assert (layer(each).float() - right).norm() < most * right.norm()


def test_a_slot_takes_memory_where_it_is_written() -> None:
    """Attention reads beyond the ends of shorter slots; that must not bring their memory in."""
    like = torch.zeros(1, 4, 1, 64)
    before = resident_bytes()
    cache = KVCache(16, 1 << 14)
    keys, values = (cache.slots(held) for held in cache.layer(0, like, like))  # 256 MiB each
    keys[:, :, :16] = values[:, :, :16] = 1.0
    assert keys.sum() == values.sum() == 16 * 4 * 16 * 64
    assert resident_bytes() - before < 64 << 20


@given(totals=st.lists(st.integers(1, 2000), min_size=1, max_size=40))
@examples(deadline=None, max_examples=40)
def test_a_class_of_lengths_wastes_at_most_a_third(totals: list[int]) -> None:
    """Classes follow lengths, and beyond the first its longest text has half as much more."""
    classes = length_classes(totals, torch.device("cpu"))
    assert [c for _, c in sorted(zip(totals, classes, strict=True))] == sorted(classes)
    for each in set(classes):
        own = [total for total, c in zip(totals, classes, strict=True) if c == each]
        assert max(own) <= max(kv_cache.SHORTEST, 1.5 * min(own) + 1)
    assert set(length_classes(totals, torch.device("meta"))) == {0}


class Echo(torch.nn.Module):
    """A model of one layer of attention, for the counting of memory; continues with token 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("layer_idx", torch.tensor(0))
        self.caches: set[KVCache] = set()

    dtype = torch.float32

    def forward(self, input_ids: torch.Tensor, cache_pass: Any, **others: Any) -> Any:
        rows, positions = input_ids.shape
        heads = torch.ones(rows, 1, positions, 2)
        kv_cache.attend(self, heads, heads, heads, None, cache_pass=cache_pass)
        self.caches.add(cache_pass.cache)
        last = others.get("logits_to_keep")  # in a prefill
        count = (rows, 1) if last is None else (1, len(last))
        return SimpleNamespace(logits=torch.tensor([0.0, 1.0]).expand(*count, 2))


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    slot_count=st.integers(1, 6),
    output_tokens=st.integers(1, 5),
)
@examples(deadline=None, max_examples=20)
def test_no_more_memory_than_slots_of_the_longest_text(
    lengths: list[int], slot_count: int, output_tokens: int
) -> None:
    """An emulated card's limit counts memory that is asked for, be it used or not; texts of
    unlike lengths must not have some for each kind."""
    model = Echo()
    done = generate(
        model,
        [[0] * length for length in lengths],
        slot_count=slot_count,
        output_tokens=output_tokens,
        end_token_ids=frozenset(),
        on_admit=lambda _: None,
        on_step=lambda _: None,
    )
    assert done.tokens == [[1] * output_tokens] * len(lengths)
    (cache,) = model.caches
    one = torch.zeros(1, 1, 1, 2)
    most = slot_count * (max(lengths) + output_tokens)
    assert all(held.numel() <= most * 2 for held in cache.layer(0, one, one))


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8), heads=st.sampled_from([1, 3]))
@examples(deadline=None, max_examples=25)
def test_a_token_attends_to_its_own_text_alone(lengths: list[int], heads: int) -> None:
    """Texts in groups, with free slots between: each row's result is attention over its own keys
    and values."""
    torch.manual_seed(len(lengths))
    ordered = sorted(lengths)
    cache = KVCache(2 * len(ordered), ordered[-1])
    query = torch.randn(len(ordered), 2 * heads, 1, 8)
    key, value = torch.randn(2, len(ordered), heads, 1, 8).unbind()
    held = cache.layer(0, key, value)
    groups: dict[int, tuple[int, list[int]]] = {}
    expected = []
    for row, length in enumerate(ordered):
        first, positions = groups.setdefault(length // 50, (row + len(groups), []))
        past = torch.randn(2, heads, length - 1, 8)
        for part, own in zip(held, past, strict=True):
            cache.slots(part)[first + len(positions), :, : length - 1] = own
        positions.append(length - 1)
        keys, values = (
            torch.cat([own, new[row]], 1)[None] for own, new in zip(past, (key, value), strict=True)
        )
        expected.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[row : row + 1], keys, values, enable_gqa=True
            )
        )
    work = kv_cache.Decode(cache, [*groups.values()], torch.float32, torch.device("cpu"))
    layer = torch.nn.Module()
    layer.register_buffer("layer_idx", torch.tensor(0))
    found, _ = kv_cache.attend(layer, query, key, value, None, cache_pass=work)
    torch.testing.assert_close(found, torch.cat(expected).transpose(1, 2))


@given(
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([64, 100, 192]),
    upright=st.booleans(),
    chance=st.integers(0, 1000),
)
@examples(deadline=None, max_examples=40)
def test_the_best_token_is_the_first_of_the_greatest(
    rows: int, vocabulary: int, upright: bool, chance: int
) -> None:
    """Few different numbers make many ties; rows stand upright or lie."""
    torch.manual_seed(chance)
    shape = (vocabulary, rows) if upright else (rows, vocabulary)
    logits = torch.randint(0, 4, shape).float()
    logits = logits.t() if upright else logits
    assert best_tokens(logits) == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_packed_weights_generate(batching: str, dataset: str, plain: Result) -> None:
    """In a model of their own, every prompt has its text, and most are those of plain weights."""
    result = Worker().run(dataset, batch_size=3, batching=batching, packed_weights=True)
    assert ("machine code" in result.details["packed_weights"]) == (batching == "continuous")
    assert texts(result).keys() == texts(plain).keys()
    same = sum(texts(result)[index] == text for index, text in texts(plain).items())
    assert same >= 0.7 * len(texts(plain))


def test_packed_and_plain_weights_share_no_model() -> None:
    """A warm worker must not give a job a model in which the plain matrices are gone."""
    keys = {job(parameters=(("packed_weights", packed),)).residency_key for packed in (False, True)}
    assert len(keys) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_only_packed_weights_are_loaded_anew_for_continuous_batches(packed: bool) -> None:
    """Which have machine code, and static ones oneDNN; plain weights serve both."""
    keys = {
        job(parameters=(("batching", batching), ("packed_weights", packed))).residency_key
        for batching in ("static", "continuous")
    }
    assert len(keys) == 1 + packed


def test_a_model_that_cannot_use_the_kv_cache_is_refused(dataset: str) -> None:
    """Another attention than the one that is replaced would not be what the row says."""
    with pytest.raises(Unsupported, match="sdpa"):
        Worker().run(dataset, batching="continuous", attention="eager")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "onnxruntime"}, "batches in its own way"),
        ({"device": "hpu"}, "compiles anew"),
        ({"parameters": {"batching": "continuous", "attention": "eager"}}, "attention eager"),
        ({"parameters": {"batching": "continuous", "tensor_parallel": 2}, "cards": 2}, "not built"),
        ({"parameters": {"batching": "continuous", "profile": True}}, "one static batch"),
        ({"parameters": {"packed_weights": True}, "engine": "vllm", "device": "cuda"}, "has no"),
        ({"parameters": {"packed_weights": True}, "device": "cuda"}, "one of CPUs"),
        ({"parameters": {"packed_weights": True}, "precision": "int4"}, "not int4"),
        ({"parameters": {"packed_weights": True, "adapter": "a"}}, "plain matrices"),
    ],
)
def test_the_plan_says_what_is_not_to_be_had(changes: dict[str, object], words: str) -> None:
    """Each refusal names the setting and the reason; a plain job has none."""
    usual: dict[str, object] = {
        "model": "m",
        "dataset": "d",
        "precision": "bf16",
        "device": "cpu",
        "batch_size": 4,
        "cards": 1,
        "parameters": {"batching": "continuous"},
        "engine": "transformers",
    }
    refuse = partial(refusals, find_workload("text-generation"))
    assert not refuse(Asked(**usual))  # type: ignore[arg-type]
    (refusal,) = refuse(Asked(**(usual | changes)))  # type: ignore[arg-type]
    assert (
        refusal.setting in ("batching", "packed_weights", "profile")
        and words in refusal.reason
        and refusal.unsupported
    )


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=30),
    slot_count=st.integers(1, 9),
    chance=st.randoms(use_true_random=False),
)
@examples(deadline=None, max_examples=60)
def test_every_prompt_gets_a_slot_once_and_slots_stay_together(
    lengths: list[int], slot_count: int, chance: Random
) -> None:
    """Whatever ends when: no slot holds two texts, moves follow texts, those of a class stand side
    by side, and all prompts are read."""
    classes = [length // 150 for length in lengths]
    admission = Admission(lengths, slot_count, classes)
    memory: dict[int, int] = {}  # of each slot whose text it holds
    read: list[int] = []

    def carry_out(moves: list[Move]) -> None:
        for text, source, target in moves:
            assert memory.pop(source) == text.index and target not in memory
            memory[target] = text.index

    while not admission.over:
        admitted, moves = admission.admit()
        carry_out(moves)
        for text in admitted:
            assert text.slot not in memory
            memory[text.slot] = text.index
            text.ids.append(0)
            read.append(text.index)
        running = [text for texts in admission.running for text in texts]
        assert running, "nothing runs, and nothing was admitted"
        ended = {text.index for text in running if chance.random() < 0.3}
        moves = admission.remove(lambda text: text.index in ended)  # noqa: B023
        memory = {slot: index for slot, index in memory.items() if index not in ended}
        carry_out(moves)
        own = [texts[0].length_class for texts in admission.running]
        assert own == sorted(set(own))
        for texts in admission.running:
            first = texts[0].slot
            assert [text.slot for text in texts] == list(range(first, first + len(texts)))
            assert {text.length_class for text in texts} == {classes[texts[0].index]}
        assert memory == {text.slot: text.index for texts in admission.running for text in texts}
        assert all(0 <= slot < slot_count for slot in memory)
    assert read == list(range(len(lengths)))
