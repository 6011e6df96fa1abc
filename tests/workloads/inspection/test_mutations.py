"""Seeded changes of a good checkpoint: none runs with a tensor that was made up."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch
from checkpoint_cases import CONFIG, GENERATION, SETTINGS, TOKENIZER, WEIGHTS
from safetensors.torch import load_file

from workloads.base import WorkloadError
from workloads.inspection.look import look
from workloads.models.loading import load_causal_model, load_tokenizer, open_model

COUNT = 100 if "NIGHTGRID_REHEARSAL" in os.environ else 8
Mutation = Callable[[random.Random, Path], None]


def _drop(random: random.Random, directory: Path) -> None:
    gone = random.sample(sorted(load_file(directory / WEIGHTS)), random.randint(1, 5))
    cases.weights(lambda w: {n: t for n, t in w.items() if n not in gone})(directory)


def _rename(random: random.Random, directory: Path) -> None:
    old, new = random.choice(
        [("model.", "modle."), ("self_attn", "attn"), ("q_proj", "query"), ("", "net.")]
    )
    share = random.choice([1.0, 0.5])
    cases.renamed(lambda n: n.replace(old, new, 1) if random.random() < share else n)(directory)


def _reshape(random: random.Random, directory: Path) -> None:
    name = random.choice(sorted(load_file(directory / WEIGHTS)))
    change = random.choice(
        [lambda t: t.T, lambda t: t[:-1], lambda t: t[None], lambda t: t * 0 + 1]
    )
    cases.weights(lambda w: {**w, name: change(w[name]).contiguous()})(directory)


def _resize(random: random.Random, directory: Path) -> None:
    key = random.choice(
        [
            *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
            *("num_key_value_heads", "vocab_size", "head_dim", "tie_word_embeddings"),
        ]
    )
    value = random.choice([1, 2, 3, 8, 16, 64, 321, True, None, "4", -1, 10**12])
    cases.values(CONFIG, **{key: value})(directory)


def _another_family(random: random.Random, directory: Path) -> None:
    family = random.choice(["qwen2", "qwen3", "gemma2", "olmo2", "phi3", "gpt2", "mixtral", "bert"])
    cases.values(CONFIG, model_type=family, architectures=["AnyForCausalLM"])(directory)


def _damage(random: random.Random, directory: Path) -> None:
    name = random.choice([WEIGHTS, CONFIG, TOKENIZER, SETTINGS, GENERATION])
    data = bytearray((directory / name).read_bytes())
    for _ in range(random.randint(1, 4)):
        data[random.randrange(min(len(data), 900))] = random.randrange(256)
    if random.random() < 0.4:
        data = data[: random.randrange(len(data))]
    (directory / name).write_bytes(bytes(data))


def _odd_values(random: random.Random, directory: Path) -> None:
    name = random.choice([CONFIG, TOKENIZER, SETTINGS, GENERATION])
    content = json.loads((directory / name).read_text())
    for key in random.sample(sorted(content), min(2, len(content))):
        content[key] = random.choice([None, [], {}, "x", -1, 10**15, True, [["a"]], {"b": 1}])
    (directory / name).write_text(json.dumps(content))


HARMFUL: list[Mutation] = [_drop, _rename, _reshape, _resize, _another_family, _damage, _odd_values]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.make_good(tmp_path_factory.mktemp("models") / "good")


def run(directory: Path) -> Any:
    """The model as a job loads it, after the plan has looked; raises as they do."""
    objections = look(directory, task="causal-lm", chats=True).objections
    if objections:
        raise WorkloadError(objections[0].reason)
    source = open_model(str(directory))
    load_tokenizer(source)
    model = load_causal_model(source, dtype=torch.float32)
    assert not source.random_weights and model.new_weights == ()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_no_change_makes_up_a_tensor(seed: int, good: Path, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    mutation = random_.choice(HARMFUL)
    directory = cases.copied(good, tmp_path / "m", lambda d: mutation(random_, d))
    try:
        model = run(directory)
    except WorkloadError:
        return
    stored = cases.read_state(directory)
    for name, tensor in model.state_dict().items():
        bare = name if name in stored else name.removeprefix("model.")
        assert torch.equal(tensor, stored[bare].to(tensor.dtype)), (mutation, name)
