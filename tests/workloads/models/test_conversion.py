"""A converted checkpoint computes what the original computes; a bad one is refused clearly."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import chatglm3_reference as reference
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workloads.base import BadConfiguration, DataMissing
from workloads.data.shapes import Turn
from workloads.models.chatglm3.conversion import convert
from workloads.models.prompts import encode_prompt, encode_turns

TOLERANCE = 1e-4  # a wrong epsilon moves these logits by 0.2, a swapped gate by 9


@pytest.fixture(scope="module")
def state():
    return reference.random_state()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 640, (2, 40), generator=torch.Generator().manual_seed(1))


def native_logits(path, ids, attention="sdpa"):
    model = AutoModelForCausalLM.from_pretrained(
        path, torch_dtype=torch.float32, attn_implementation=attention
    ).eval()
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("form", "shards", "index"),
    [("bin", 1, True), ("bin", 4, True), ("safetensors", 3, True), ("bin", 3, False)],
)
def test_logits_equal_the_reference(tmp_path, state, ids, form, shards, index):
    source = reference.write_checkpoint(
        tmp_path / "src", state, form=form, shards=shards, index=index
    )
    convert(source, tmp_path / "dst", shard_bytes=200_000)
    difference = (native_logits(tmp_path / "dst", ids) - reference.logits(state, ids)).abs().max()
    assert difference < TOLERANCE


def test_a_longer_rotary_base_is_carried_over(tmp_path, state, ids):
    """rope_ratio 50, as in the 32k model, becomes rope_theta 500000."""
    config = {**reference.CONFIG, "rope_ratio": 50}
    convert(reference.write_checkpoint(tmp_path / "src", state, config=config), tmp_path / "dst")
    got = native_logits(tmp_path / "dst", ids)
    assert (got - reference.logits(state, ids, config)).abs().max() < TOLERANCE
    assert (got - reference.logits(state, ids)).abs().max() > 100 * TOLERANCE


def test_config_and_index(tmp_path, state):
    half = {name: tensor.half() for name, tensor in state.items()}
    source = reference.write_checkpoint(tmp_path / "src", half, shards=2)
    reference.write_sentencepiece(source)
    done = convert(source, tmp_path / "dst", shard_bytes=100_000)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["eos_token_id"] == [2, 386, 388]  # </s>, <|user|>, <|observation|>
    assert config["torch_dtype"] == "float16"
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(done.weight_files)
    assert len(index["weight_map"]) == 3 + 3 * 11
    assert done.bytes == index["metadata"]["total_size"] == 2 * done.parameters


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, state):
    import sentencepiece

    folder = tmp_path_factory.mktemp("tokenizer")
    source = reference.write_checkpoint(folder / "src", state)
    model_file = reference.write_sentencepiece(source)
    convert(source, folder / "dst")
    own = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    return AutoTokenizer.from_pretrained(folder / "dst"), own


@pytest.mark.parametrize(
    "text",
    ["你好", "类型#裙子 *  版型#显瘦\n", " leading", "stop sop eop", "🙂 ünï", "a\tb", "▁", "</s>"],
)
def test_tokenizer_ids_equal_sentencepiece(tokenizers, text):
    tokenizer, own = tokenizers
    got = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert got == own.encode(text)
    assert tokenizer.decode(got) == own.decode(got)


def test_prompt_layout(tokenizers):
    """[gMASK] <sop> <|user|> newline content <|assistant|>, parts encoded alone."""
    tokenizer, own = tokenizers
    first = own.get_piece_size()
    user, assistant, observation = first + 6, first + 7, first + 8
    earlier = [Turn(role="tool", text="22")]
    assert encode_prompt(tokenizer, None, "你好", earlier) == [
        *(first + 1, first + 3, observation),
        *own.encode("\n"),
        *own.encode("22"),
        user,
        *own.encode("\n"),
        *own.encode("你好"),
        assistant,
    ]


@pytest.mark.parametrize(
    "content", ["<|system|>", "a<|user|>b", "[gMASK]<sop>", "</s>", "<unk><s>", "<|assistant|>\n"]
)
def test_content_cannot_inject_special_tokens(tokenizers, content):
    tokenizer, own = tokenizers
    ids = encode_prompt(tokenizer, None, content)
    inside = ids[3:-1]
    assert not {i for i in inside if i < 3 or i >= own.get_piece_size()}
    assert inside == own.encode("\n") + own.encode(content)


@pytest.mark.parametrize("texts", [("你好 stop",), ("",), ("You may", "天气?", "", "22")])
def test_chat_template_gives_the_same_ids(tokenizers, texts):
    """For other programs: without a stray space where content is empty."""
    tokenizer, _ = tokenizers
    roles = ("system", "user", "assistant", "observation") if len(texts) > 1 else ("user",)
    messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    named = {"observation": "tool"}
    turns = [Turn(role=named.get(m["role"], m["role"]), text=m["content"]) for m in messages]
    assert ids == encode_turns(tokenizer, turns)


def test_chat_template_lists_tools_and_metadata(tokenizers):
    """Tools stand in a system turn, or beside the messages as transformers' own argument."""
    tools = [{"name": "天气", "parameters": {"type": "object"}}]
    system, called = {"role": "system", "content": ""}, {"role": "assistant", "metadata": "天气"}
    for messages, beside in (
        ([{**system, "tools": tools}, called], None),
        ([system, called], tools),
    ):
        rendered = tokenizers[0].apply_chat_template(messages, tools=beside, tokenize=False)
        listed = json.dumps(tools, indent=4, ensure_ascii=False)
        assert rendered == f"[gMASK]<sop><|system|>\n \n{listed}<|assistant|>天气\n"


def refuse(source, destination, kind, words):
    with pytest.raises(kind, match=words):
        convert(source, destination)
    assert not destination.exists()
    assert not list(destination.parent.glob(".*building*"))


@pytest.fixture
def source(tmp_path, state):
    return reference.write_checkpoint(tmp_path / "src", state)


def test_a_missing_shard_is_named(tmp_path, state):
    source = reference.write_checkpoint(tmp_path / "src", state, shards=3)
    (source / "pytorch_model-00002-of-00003.bin").unlink()
    refuse(source, tmp_path / "dst", DataMissing, "lacks 1 of its 3 .*00002-of-00003")
    (source / "pytorch_model.bin.index.json").unlink()
    refuse(source, tmp_path / "dst", DataMissing, r"lacks weight files \[2\] of 3")


def test_a_bin_file_of_old_torch_is_named(tmp_path, source, state):
    file = source / "pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=False)
    refuse(source, tmp_path / "dst", DataMissing, "before torch 1.6")


PREFIX = "transformer.prefix_encoder.embedding.weight"


def without(state, part):
    return {name: tensor for name, tensor in state.items() if part not in name}


def changed(part, change):
    return lambda state: {n: change(t) if part in n else t for n, t in state.items()}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda s: without(s, "layers.1.mlp"), DataMissing, "2 of the 24 tensors"),
        (lambda s: s | {"transformer.extra": torch.ones(1)}, BadConfiguration, "does not have"),
        (lambda s: s | {PREFIX: torch.ones(2, 2)}, BadConfiguration, "P-tuning"),
        (changed("dense", lambda t: t.to(torch.int8)), BadConfiguration, "quantised"),
        (
            changed("output_layer", lambda t: t[:-1]),
            DataMissing,
            "output_layer.weight is 639×64, not 640×64",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, state, change, kind, words):
    source = reference.write_checkpoint(tmp_path / "src", change(state))
    refuse(source, tmp_path / "dst", kind, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "not ChatGLM3"),
        ({"model_type": "glm", "architectures": ["GlmForCausalLM"]}, "native already"),
        ({"quantization_bit": 4}, "quantization_bit = 4"),
        ({"pre_seq_len": 128}, "P-tuning"),
        ({"multi_query_attention": False}, "multi_query_attention"),
    ],
)
def test_wrong_architectures_are_refused(tmp_path, state, change, words):
    config = {**reference.CONFIG, **change}
    source = reference.write_checkpoint(tmp_path / "src", state, config=config)
    refuse(source, tmp_path / "dst", BadConfiguration, words)


def test_a_full_disk_is_foreseen(tmp_path, source, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refuse(source, tmp_path / "dst", BadConfiguration, "free")


def test_an_existing_destination(tmp_path, source):
    convert(source, tmp_path / "dst")
    (tmp_path / "dst" / "old").touch()
    with pytest.raises(BadConfiguration, match="--force"):
        convert(source, tmp_path / "dst")
    convert(source, tmp_path / "dst", force=True)
    assert not (tmp_path / "dst" / "old").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    with pytest.raises(BadConfiguration, match="not a model's directory"):
        convert(source, tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.txt").exists()
    with pytest.raises(BadConfiguration, match="same directory"):
        convert(source, source, force=True)


def test_an_interrupted_conversion_keeps_the_old_model(tmp_path, source):
    def interrupt(done, total):
        raise KeyboardInterrupt

    convert(source, tmp_path / "dst")
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "dst", force=True, progress=interrupt)
    assert (tmp_path / "dst" / "model.safetensors").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]


def test_the_command_says_what_it_wrote(tmp_path, source, nightgrid):
    out = nightgrid("convert", source, tmp_path / "dst").out
    for words in ("174,912 parameters", "model.safetensors", "no tokenizer.model"):
        assert words in out
    assert "--force" in nightgrid("convert", source, tmp_path / "dst", code=1).err
