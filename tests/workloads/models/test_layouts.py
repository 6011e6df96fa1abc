"""ChatGLM3 in the layout that an engine loads, whichever the user has."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import chatglm3_reference as reference
import pytest
import torch
from safetensors.torch import load_file

from workloads.models.chatglm3.conversion import in_layout
from workloads.models.chatglm3.layout import layout_of
from workloads.models.loading import load_tokenizer, open_model
from workloads.util.contents import fingerprint


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def original(tmp_path) -> Path:
    directory = reference.write_checkpoint(tmp_path / "original", reference.random_state())
    reference.write_sentencepiece(directory)
    return directory


def test_a_model_that_is_in_the_layout_is_used_where_it_lies(original):
    assert in_layout(original, "original") == original
    assert open_model(str(original), layout="original").path == str(original)
    (original / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert in_layout(original, "native") == original


def test_there_and_back_is_the_same_bit_for_bit(original):
    native = in_layout(original, "native")
    again = in_layout(native, "original")
    wanted = torch.load(original / "pytorch_model.bin", weights_only=True)
    wanted.pop("transformer.rotary_pos_emb.inv_freq")
    found = load_file(again / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config = json.loads((again / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name in reference.CONFIG}
    ends = kept.pop("eos_token_id")  # all of them, where the published config names the first
    assert ends[0] == reference.CONFIG["eos_token_id"] and len(ends) == 3
    assert {"eos_token_id": 2, **kept} == {**reference.CONFIG, "torch_dtype": "float32"}
    assert layout_of(config) == "original"
    third = in_layout(again, "native")
    assert third != native
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (third / name).read_text() == (native / name).read_text()


def test_the_other_layout_is_made_once_and_anew_when_the_model_changes(original):
    first = in_layout(original, "native")
    assert in_layout(original, "native") == first
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "note": 1}))
    assert in_layout(original, "native") != first


def test_both_layouts_encode_alike(original):
    text = "类型#裙子*版型#显瘦 and some English"
    sources = [open_model(str(original), layout=layout) for layout in ("original", "native")]
    first, second = (load_tokenizer(source)(text)["input_ids"] for source in sources)
    assert first == second
    ends = json.loads((Path(sources[0].tokenizer_path) / "generation_config.json").read_text())
    assert ends["eos_token_id"][0] == 2 and len(ends["eos_token_id"]) == 3


@pytest.mark.parametrize("weights", ["model.safetensors", "unet/model.safetensors"])
def test_copies_of_a_model_are_one_model(tmp_path: Path, weights: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / weights).parent.mkdir(parents=True)
    (first / ("model_index.json" if "/" in weights else "config.json")).write_text("{}")
    (first / weights).write_bytes(b"weights")
    shutil.copytree(first, second)
    os.utime(second / weights, (1, 1))
    assert fingerprint(first) == fingerprint(second)
    (second / weights).write_bytes(b"weighty")
    assert fingerprint(first) != fingerprint(second)
