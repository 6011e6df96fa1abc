"""The engine graph on a CPU, where a launch is the step itself; a card adds ``Device.record``."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from generation_cases import Worker, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from workloads.base import Result, Unsupported
from workloads.devices import device_for
from workloads.devices.base import Device
from workloads.engines.graph import decoder, layers
from workloads.engines.graph import engine as graph
from workloads.engines.graph.engine import ContinuousBatch, GraphEngine
from workloads.engines.loaded import ContinuousGeneration, Generation
from workloads.engines.passes import ContinuousPass, Prompt, count_output_tokens
from workloads.engines.torch_models import graph_limits

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_ENDS = (5, 17)


def make(kind: str = "llama", **changes) -> torch.nn.Module:
    """A model with random weights whose best tokens are far enough apart."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **(_SIZES | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1.0 if parameter.dim() > 1 else 0.1).div_(8.0)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    model.generation_config = GenerationConfig(pad_token_id=0)  # generate adds its ends to ours
    return model


def generator(
    model: torch.nn.Module, card: Device | None = None, *, kind: str = "", compiled: bool = False
) -> decoder.Generator:
    read = layers.read_decoder(model, positions=512, kind=kind)
    card = card or device_for("cpu")
    return decoder.Generator(read, card, pad=0, ends=len(_ENDS), compiled=compiled)


def written(mine: decoder.Generator, prompts, steps, ends=(), **more):
    return mine.generate(mine.prepare(prompts), Generation(output_tokens=steps, ends=ends, **more))


def engine_of(mine: decoder.Generator) -> GraphEngine:
    used = {"generator": mine, "tokenizer": SimpleNamespace(decode=lambda ids, **_: str(ids))}
    others = {each.name: None for each in fields(GraphEngine)}
    return GraphEngine(**others | used | {"end_token_ids": frozenset(_ENDS)})


def continuously(mine: decoder.Generator, prompts, places, steps, ends=(), **calls):
    generation = ContinuousGeneration(slots=places, output_tokens=steps, ends=ends, **calls)
    return engine_of(mine).generate_continuously(prompts, generation)


class Card(type(device_for("cpu"))):
    """A card whose launches are the work itself, and whose compiler runs the graphs that torch
    cuts."""

    compile_backend = "aot_eager"
    records = False

    def __init__(self, records: bool = False) -> None:
        super().__init__()
        self.recorded: list = []
        self.records = records

    def record(self, work):
        self.recorded.append(work)
        return super().record(work)


#: Of a property over batches.
BATCHES = {
    "prompts": st.lists(
        st.lists(st.integers(1, 95), min_size=1, max_size=40), min_size=1, max_size=9
    ),
    "steps": st.integers(1, 21),
    "ends": st.sampled_from([(), _ENDS]),
}
FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def plain(model, prompts, steps, ends) -> list[list[int]]:
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=steps,
                do_sample=False,
                eos_token_id=list(ends) or None,
                pad_token_id=0,
            ),
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.fixture(scope="module")
def pair():
    return make(), generator(make())


@pytest.mark.slow
@FEW
@given(**BATCHES)
def test_tokens_are_those_of_plain_generate(pair, prompts, steps, ends) -> None:
    """Also where rows idle, slots are used again and a batch is smaller than the one before."""
    model, mine = pair
    calls: list[int] = []
    tokens, _, _ = written(mine, prompts, steps, ends, on_step=lambda: calls.append(1))
    texts = [row[: count_output_tokens(row, ends)] for row in tokens.tolist()]
    assert texts == plain(model, prompts, steps, ends)
    assert len(calls) == 2  # the first tokens, and the end


@pytest.mark.slow
@FEW
@given(**BATCHES, places=st.integers(1, 5), records=st.booleans())
def test_slots_that_take_the_next_prompt_change_no_text(
    pair, prompts, steps, ends, places, records
) -> None:
    """Never more texts than places; each token is told once, after its text was admitted."""
    model, mine = pair
    mine.device = Card(records)
    open_texts, told = set(), [0] * len(prompts)

    def on_admit(indices) -> None:
        open_texts.update(indices)
        assert len(open_texts) <= places

    def on_step(indices) -> None:
        assert set(indices) <= open_texts
        for index in indices:
            told[index] += 1
            if told[index] == len(expected[index]):
                open_texts.remove(index)

    expected = plain(model, prompts, steps, ends)
    found = continuously(mine, prompts, places, steps, ends, on_admit=on_admit, on_step=on_step)
    assert found.tokens == expected
    assert told == [len(text) for text in expected] and not open_texts


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_every_shape_has_a_graph(batching) -> None:
    """Beyond torch's own limit of graphs too, here none but one; afterwards that holds again."""
    mine = generator(make(num_hidden_layers=1), Card(), compiled=True)
    name, _ = limits = tuple(graph_limits())
    torch.compiler.reset()
    try:
        with torch._dynamo.config.patch(dict.fromkeys(limits, 1)):
            for rows in (2, 1):
                if batching == "static":
                    written(mine, [[3, 4]] * rows, 2)
                else:
                    continuously(mine, [[3, 4]] * rows, rows, 2)
            assert getattr(torch._dynamo.config, name) == 1
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("records", [False, True])
def test_only_steps_launched_one_by_one_have_times(records) -> None:
    """Tokens of a launch are told all at once: between their moments lies no time of a step."""
    seconds = itertools.count()
    generation = ContinuousPass(
        engine_of(generator(make(), Card(records))),
        [Prompt(index=index, ids=(3, 4 + index)) for index in range(3)],
        2,
        output_tokens=11,
        ignore_eos=True,
        keep_texts=3,
        clock=lambda: float(next(seconds)),
        synchronize=lambda: None,
    )
    found = generation.run_batch(0, 0)()
    assert found.output_tokens == 33 and found.ttft_s == 1.0
    assert len(found.step_s) == (0 if records else 2 * 10)  # of two texts, then of the third
    items, _ = generation.texts.of(0, lambda: 0.0)
    assert [(item.output_tokens, item.ttft_s) for item in items] == [(11, 1.0)] * 3
    assert {item.latency_s for item in items} == {11.0}


def test_reading_is_recorded_for_short_prompts_only(pair) -> None:
    """In multiples of 64 tokens, up to 2,048 of all prompts; and only where the slots have room."""
    model, _ = pair
    card = Card(records=True)
    mine = generator(make(), card)
    cases = ((2, 255, 1), (2, 3, 1), (2, 64, 0), (2, 65, 1), (16, 128, 1), (17, 128, 0))
    for rows, length, more in cases:
        prompts = [[1 + (row + at) % 90 for at in range(length)] for row in range(rows)]
        before = len(card.recorded)
        tokens, _, _ = written(mine, prompts, 1)
        assert len(card.recorded) - before == more, (rows, length)
        assert tokens.tolist() == [plain(model, prompts[:1], 1, ())[0], *tokens.tolist()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "glm", "glm4"])
def test_other_decoders_are_read_alike(kind) -> None:
    """Biases of queries, keys and values; norms of single heads, and before sums; half of a head
    turned, by neighbours (ChatGLM3). The same as torch compiles it, over the same buffers."""
    prompts = [[3, 4, 5, 6], [7, 8]]
    expected = plain(make(kind), prompts, 9, ())
    for mine in (generator(make(kind), Card(), compiled=True), generator(make(kind))):
        assert written(mine, prompts, 9)[0].tolist() == expected


def test_logits_of_each_step_are_the_model_s(pair) -> None:
    model, mine = pair
    prompt = [9, 8, 7]
    tokens, logits, steps = written(mine, [prompt], 6, keep_logits=True)
    assert len(logits) == steps == 6
    whole = model(torch.tensor([prompt + tokens[0].tolist()])).logits[0, 2:-1]
    assert torch.allclose(torch.stack(logits)[:, 0], whole, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_a_packed_matrix_gives_the_tokens_of_the_values_it_stands_for(kind) -> None:
    prompts = [[3, 4, 5, 6], [7, 8]]
    plain, packed = generator(make("qwen2")), generator(make("qwen2"), kind=kind)
    unpacked = []
    for layer in packed.decoder.layers:
        stored = {name: getattr(layer, name) for name in ("qkv", "out", "gate_up", "down")}
        values = {n: layers.plain(m.plain(torch.float32), m.bias) for n, m in stored.items()}
        unpacked.append(replace(layer, **values))
    plain.decoder = replace(packed.decoder, layers=tuple(unpacked))
    assert torch.equal(written(plain, prompts, 9)[0], written(packed, prompts, 9)[0])


@given(
    kind=st.sampled_from(["int8", "fp8", "int4"]),
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_packing_keeps_values_to_their_format_s_precision(kind, rows, groups, seed) -> None:
    """Half a step of int8 and (on average) of int4 around each value, a sixteenth of it in fp8."""
    weight = torch.randn(rows, groups * layers.GROUP, generator=torch.Generator().manual_seed(seed))
    matrix = layers.pack(weight, None, kind)
    back = matrix.plain(torch.float32)
    if kind == "int8":
        assert ((back - weight).abs() <= weight.abs().amax(1, True) / 254 + 1e-6).all()
    elif kind == "fp8":
        assert ((back - weight).abs() <= weight.abs() / 15 + weight.abs().max() * 2**-17).all()
    else:
        grouped = weight.view(rows, -1, layers.GROUP)
        error = (back.view_as(grouped) - grouped).square().mean(-1)
        step = grouped.abs().amax(-1, True) / 7
        assert error.mean() <= step.square().mean() / 12 * 1.5
        whole = ((grouped / step).round() * step - grouped).square().mean(-1)  # the whole range
        assert (error <= whole * 1.0001).all() and (rows * groups < 8 or (error < whole).any())
    bits = {"int8": 8, "fp8": 8, "int4": 4}[kind]
    assert matrix.values.numel() * matrix.values.element_size() == weight.numel() * bits // 8


@given(position=st.integers(1, 3000), steps=st.integers(0, 600), spare=st.integers(1, 300))
@settings(deadline=None)
def test_launches_do_every_step_once_within_their_positions(position, steps, spare) -> None:
    capacity = position + steps + spare
    at = position
    for length, count in decoder.launches(position, steps, capacity):
        assert count in (1, decoder.STEPS)
        assert at + count <= length <= capacity
        at += count
    assert at == position + steps


@given(texts=st.integers(1, 3000))
def test_a_recorded_step_has_few_idle_rows(texts) -> None:
    """At least as many rows as texts, and no more than half as many again from four texts on."""
    rows = decoder.rows_for(texts)
    assert rows >= texts and (texts < 4 or rows <= 1.5 * texts + 1)


def test_a_model_that_computes_something_else_is_refused() -> None:
    doubled = make()
    doubled.model.layers[0].mlp.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(Unsupported, match="does something that the engine graph does not know"):
        layers.read_decoder(doubled, positions=512)
    with pytest.raises(Unsupported, match="has the activation gelu"):
        layers.read_decoder(make(hidden_act="gelu"), positions=512)


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4)])
def test_quantised_weights_are_as_large_as_they_say(precision, bits) -> None:
    """Linear layers in so many bits and their scales, the rest in bf16."""
    job = request("advertisegen-synthetic", engine="graph", precision=precision)
    weights = graph.load(job, device_for("cpu")).weights
    packed = round(weights.quantized_share * weights.parameter_count)
    least = packed * bits // 8 + 2 * (weights.parameter_count - packed)
    assert least < weights.weight_bytes < 1.1 * least
    assert "weights only" in weights.detail


# Batches of a workload: static, sorted and continuous.


def texts(result: Result) -> dict[int, tuple[int, int, str | None]]:
    return {i.index: (i.input_tokens, i.output_tokens, i.output_text) for i in result.items}


@pytest.fixture(scope="module")
def static(worker: Worker, dataset: str) -> Result:
    return worker.run(dataset, batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batching", "engine"), [("sorted", "transformers"), ("continuous", "graph")]
)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batching_changes_no_text(batching, engine, batch_size, worker, dataset, static) -> None:
    result = worker.run(dataset, batch_size=batch_size, batching=batching, engine=engine)
    assert texts(result) == texts(static)
    lengths = [item.input_tokens for item in result.items]
    assert (lengths == sorted(lengths)) == (batching == "sorted")  # so that less is padded
    for count in ("items", "input_tokens", "output_tokens"):
        assert sum(getattr(s, count) for s in result.samples) == sum(
            getattr(s, count) for s in static.samples
        )


def test_a_batch_takes_texts_that_fit_until_it_is_closed(pair) -> None:
    """The server's tests show requests that come while others run."""
    generation = ContinuousGeneration(slots=2, output_tokens=9)
    batch = ContinuousBatch(pair[1], generation, positions=20, on_end=lambda text: None)
    with pytest.raises(ValueError, match="20 positions"):
        batch.submit([1] * 15, 6)
    batch.close()
    with pytest.raises(ValueError, match="no more requests"):
        batch.submit([1], 1)
