"""`nightgrid describe`: figures that can be checked elsewhere, from a config alone."""

from __future__ import annotations

import io
import json
import math
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import chatglm3_reference as reference
import pytest
from odd_models import LLAMA, ODD, write_odd
from patience import patience

from workloads.base import BadConfiguration, DataMissing
from workloads.devices.monitor.host import resident_bytes
from workloads.inspection.headers import describe_tensors
from workloads.inspection.look import LIBRARY, READER
from workloads.models.describe import describe_model
from workloads.models.drawing import draw_slide, draw_svg, draw_text, picture_of
from workloads.models.loading import open_model

CHATGLM3_6B = {
    **reference.CONFIG,
    "hidden_size": 4096,
    "num_layers": 28,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "ffn_hidden_size": 13696,
    "padded_vocab_size": 65024,
    "seq_length": 8192,
}


@pytest.fixture(scope="module")
def six_billion(tmp_path_factory):
    """ChatGLM3-6B described from its published config.json, no weights beside it."""
    folder = tmp_path_factory.mktemp("six")
    (folder / "config.json").write_text(json.dumps(CHATGLM3_6B))
    return describe_model(str(folder / "config.json"))


def test_chatglm3_6b_has_its_published_size(six_billion):
    """6,243,584,000 parameters, which the layer table adds up to; the cache holds 2 × 28 layers ×
    2 heads × 128 values."""
    assert six_billion.parameters == 6_243_584_000
    assert sum(tensor.parameters for tensor in six_billion.tensors) == 6_243_584_000
    assert not six_billion.random_weights
    memory = {m.precision: m for m in six_billion.memory}
    assert memory["fp32"].weight_bytes == 4 * 6_243_584_000
    assert memory["bf16"].weight_bytes == 2 * 6_243_584_000
    assert memory["bf16"].cache_bytes_per_token == 2 * 28 * 2 * 128 * 2
    sizes = [memory[p].weight_bytes for p in ("fp32", "bf16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    shape = six_billion.architecture
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim) == (32, 2, 128, 64)
    assert (shape.gated, shape.qkv_bias, shape.tied, shape.epsilon) == (True, True, False, 1e-5)
    assert six_billion.prompt.layout.startswith("[gMASK] <sop>") and six_billion.prompt.note


def test_lora_size_equals_peft():
    from peft import LoraConfig, get_peft_model

    from workloads.models.describe import build_on_meta
    from workloads.models.embedded import tiny_chatglm3

    model = build_on_meta(tiny_chatglm3.config())
    (first, *_) = describe_model("tiny-chatglm3", lora_rank=5).adapters
    adapted = get_peft_model(model, LoraConfig(r=5, target_modules=list(first.targets)))
    assert first.parameters == adapted.get_nb_trainable_parameters()[0]


def test_other_architectures(tmp_path):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = describe_model(str(tmp_path))
    assert found.parameters == 124_439_808  # GPT-2's published 124M
    assert found.adapters[0].targets == ("c_attn",)
    assert found.adapters[0].parameters == 12 * 8 * (768 + 3 * 768)
    shape = found.architecture
    assert (shape.rotary_dim, shape.tied, shape.gated, shape.norm) == (0, True, False, "LayerNorm")
    lines = draw_text(picture_of(found))
    assert {len(line) for line in lines if line[0] in "┌│└╔║╚"} == {76}
    assert "shares the embedding's weights" in "\n".join(lines)


def test_an_original_checkpoint_with_its_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(reference.CONFIG))
    reference.write_sentencepiece(tmp_path)
    prompt = describe_model(str(tmp_path)).prompt
    assert prompt.tokens[:3] == ("[gMASK]", "<sop>", "<|user|>")
    assert prompt.ids[:3] == (381, 383, 386)
    assert prompt.note == ""


def test_the_command_for_people(nightgrid):
    out = nightgrid("describe", "tiny-chatglm3", "--lora-rank", "4").out
    for words in ("random weights", "3,075,008 parameters", "decoder layer × 4", "int4", "14,336"):
        assert words in out
    assert "<|user|>" in out and out.count("⊕") == 2


def test_the_command_for_machines(tmp_path, nightgrid):
    file = tmp_path / "model.svg"
    found = nightgrid("describe", "tiny-chatglm3", "--json", "--svg", file).json
    assert found["parameters"] == 3_075_008
    assert found["random_weights"] is True
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    texts = " ".join(e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "6 query heads share 2 key/value heads of 32" in texts
    assert "http" not in file.read_text().replace("http://www.w3.org/2000/svg", "")


def test_what_cannot_be_described(tmp_path, nightgrid):
    with pytest.raises(DataMissing, match="no directory"):
        describe_model(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(BadConfiguration, match="no causal language model"):
        describe_model(str(tmp_path))
    error = nightgrid("describe", "tiny-chatglm3", "--lora-rank", "0", code=2).err
    assert "whole number from 1" in error


#: A merge whose parts are not in the vocabulary: the library refuses it, nothing before does.
MERGED = {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["epsilon", "depth", "loop", "doubled"])
def test_a_strangers_directory_is_refused_with_file_and_reason(kind, tmp_path, capfd, monkeypatch):
    """The plan's look does it, whose test has the other kinds; ``make rehearsal`` describes all."""
    if kind == "loop":
        monkeypatch.setattr(READER, "seconds", 2.0)
    write_odd(tmp_path, kind)
    own = resident_bytes()
    began = time.monotonic()
    with pytest.raises((BadConfiguration, DataMissing), match=ODD[kind][1]) as refusal:
        describe_model(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)
    assert time.monotonic() - began < 10 + patience(10)  # the libraries are imported beforehand
    assert resident_bytes() - own < 2**28 and "Traceback" not in capfd.readouterr().err


def test_a_tokenizer_that_cannot_be_read_is_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tokenizer = {"version": "1.0", "added_tokens": [], "model": MERGED}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    prompt = describe_model(str(tmp_path)).prompt
    assert prompt.layout == "unknown" and "cannot be read" in prompt.note


def test_the_slide_has_the_picture_and_lies_within_its_edges(six_billion, tmp_path, nightgrid):
    pptx = pytest.importorskip("pptx")
    nightgrid("describe", "tiny-chatglm3", "--pptx", tmp_path / "tiny.pptx")
    assert len(pptx.Presentation(tmp_path / "tiny.pptx").slides) == 1
    picture = picture_of(six_billion)
    (slide,) = pptx.Presentation(io.BytesIO(draw_slide(picture, "six"))).slides
    texts = [shape for shape in slide.shapes if shape.has_text_frame]
    svg = ElementTree.fromstring(draw_svg(picture, "six"))
    lines = [str(element.text) for element in svg.iter() if element.tag.endswith("}text")]
    words = [shape.text_frame.text for shape in texts if shape.text_frame.text]
    assert sorted(words) == sorted(line for line in lines if line != "+")  # there a shape
    paragraphs = [paragraph for shape in texts for paragraph in shape.text_frame.paragraphs]
    assert min(run.font.size.pt for paragraph in paragraphs for run in paragraph.runs) >= 14
    boxes = [shape for shape in slide.shapes if shape not in texts or not shape.text_frame.text]
    assert all(shape.left > 0 and shape.left + shape.width < 12_192_000 for shape in boxes)
    assert all(shape.top > 0 and shape.top + shape.height < 6_858_000 for shape in slide.shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "caption", "cached"),
    [
        ("tiny-bert", "BertForMaskedLM", "encoder layer × 2", False),
        ("tiny-t5", "T5ForConditionalGeneration", "encoder and decoder layer × 4", True),
        ("tiny-stable-diffusion", "StableDiffusionPipeline", "unet", False),
    ],
)
def test_other_models_than_decoders_are_described(model, name, caption, cached, nightgrid) -> None:
    """Their parameters are those of the files."""
    stored = sum(
        math.prod(info.shape)
        for file in Path(open_model(model).path).rglob("*.safetensors")
        for info in describe_tensors([file]).values()
    )
    found = describe_model(model)
    assert (found.architecture.name, found.parameters) == (name, stored)
    assert bool(found.memory[0].cache_bytes_per_token) is cached
    assert caption in nightgrid("describe", model).out


@pytest.mark.slow
def test_a_library_that_takes_too_long_over_a_model_is_ended(tmp_path, monkeypatch) -> None:
    """The last test here, since the next one would start the process anew."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2_000}))
    monkeypatch.setattr(LIBRARY, "seconds", 0.5)
    with pytest.raises(BadConfiguration, match=f"{tmp_path}: config.json: reading took more than"):
        describe_model(str(tmp_path))
