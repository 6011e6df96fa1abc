"""Checkpoints from strangers: they hold tensors or are refused, and their code is not run."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_cases import request
from odd_models import LLAMA
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from workloads.base import BadConfiguration, DataMissing
from workloads.devices import device_for
from workloads.engines.transformers.generation import load as load_engine
from workloads.models import loading as remote_code
from workloads.models.loading import load_tokenizer, open_model
from workloads.training.checkpoints import Checkpoints, read_newest
from workloads.training.loop import load_base
from workloads.training.saved_adapters import read_state
from workloads.training.technique import Loading

#: A model of a class that only its own file defines.
OWN_CODE = """\
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import PretrainedConfig, LlamaForCausalLM, LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "nightgrid-test-own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


class Evil:
    """Unpickling this makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def model_directory(directory: Path, **config: Any) -> Path:
    source = Path(open_model("tiny-chatglm3").path)
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    (directory / "config.json").write_text(json.dumps(LLAMA | config))
    return directory


def load(directory: Path) -> Any:
    return load_engine(request("unused", model=str(directory)), device_for("cpu"))


@pytest.mark.parametrize("trained", [False, True], ids=["generation", "finetuning"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path, trained: bool) -> None:
    directory = model_directory(tmp_path / "model")
    mark = tmp_path / "mark"
    torch.save({"model.norm.weight": Evil(mark)}, directory / "pytorch_model.bin")
    with pytest.raises((pickle.UnpicklingError, DataMissing, RuntimeError, ValueError)):
        if trained:
            loading = Loading(
                device=device_for("cpu"), model_arguments={}, tokenizer_arguments={}, checks=[]
            )
            load_base("finetuning", str(directory), "fp32", loading)
        else:
            load(directory)
    assert not mark.exists()


def test_what_training_wrote_is_refused_when_it_would_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"x": Evil(mark)}, tmp_path / "adapter_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        read_state(tmp_path)
    torch.save({"step": 1, "optimizer": Evil(mark)}, tmp_path / "step-00000001.rank-0.pt")
    with pytest.raises(pickle.UnpicklingError):
        read_newest(Checkpoints(directory=tmp_path, rank=0))
    assert not mark.exists()


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that comes with code, which leaves a mark when it is run; weights are there."""
    monkeypatch.delenv(remote_code.VARIABLE, raising=False)
    mark = tmp_path / "mark"
    directory = model_directory(
        tmp_path / "own",
        model_type="nightgrid-test-own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    (directory / "own.py").write_text(OWN_CODE.format(mark=str(mark)))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_code_of_a_model_is_not_run(own_model: Path) -> None:
    for named in ([], ["another/model"], [str(own_model) + "x"]):
        with (
            remote_code.permitted(named),
            pytest.raises(BadConfiguration, match=f"--remote-code {own_model}"),
        ):
            load(own_model)
    assert not (own_model.parent / "mark").exists()


@pytest.mark.slow
def test_describing_a_model_runs_no_code_of_it(own_model: Path, nightgrid) -> None:
    """Not even by asking at the terminal, which transformers would do."""
    error = nightgrid("describe", own_model, code=1).err
    assert not (own_model.parent / "mark").exists()
    assert "transformers builds no causal language model" in error


def test_code_of_a_model_that_was_named_is_run(own_model: Path) -> None:
    with remote_code.permitted(["another/model", str(own_model)]):
        engine = load(own_model)
    assert (own_model.parent / "mark").exists()
    assert engine.details["architecture"] == "OwnModel"
    assert engine.details["remote_code"] == "allowed"
    assert not remote_code.allowed(str(own_model))


def test_a_tokenizer_runs_no_code(own_model: Path) -> None:
    config = json.loads((own_model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.T", None]}}
    (own_model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfiguration, match="--remote-code"):
        load_tokenizer(open_model(str(own_model)))
    assert not (own_model.parent / "mark").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\0" * 10,
        b"\xff\xfe{}",
        b"5",
        b'{"architectures": [5], "model_type": {}}',
        b'{"model_type": "llama", "hidden_size": "big"}',
        b'{"model_type": "llama", "hidden_size": -1, "num_attention_heads": 0}',
        b'{"model_type": "../../etc", "auto_map": 7}',
        b'{"model_type": "llama", "layer_types": 7, "text_config": 5, "quantization_config": [1]}',
    ],
    ids=range(8),
)
def test_a_model_whose_config_is_anything_is_refused(tmp_path, content, nightgrid) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes(content)
    (directory / "model.safetensors").write_bytes(b"")
    error = nightgrid("describe", directory, code=1).err
    assert str(directory) in error or "transformers" in error
    grid = tmp_path / "g.yaml"
    grid.write_text(
        "name: g\nexperiments:\n"
        f"  - {{name: e, workload: text-generation, model: {directory}, accelerator: CPU}}\n"
    )
    assert nightgrid("plan", grid, "--results", tmp_path / "r", code=None).code in (0, 2)
