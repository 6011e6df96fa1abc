"""The real optimum-habana on the CPU: `make test-gaudi`, in an environment of its own.

Without the stand-in for the Habana bridge on the path there is nothing to test here, so the tests
of this directory are not collected: `make test` leaves them to `make test-gaudi`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("habana_frameworks") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    os.environ["NIGHTGRID_CACHE"] = str(directory)
    os.environ["NIGHTGRID_COMPILED"] = str(directory / "compiled")
    return directory


def _llama(directory: Path, spread: float) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from workloads.models.loading import open_model

    source = Path(open_model("tiny-chatglm3").path)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=spread,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"random_weights": True}))
    return str(directory)


@pytest.fixture(scope="session")
def tiny_llama(cache: Path) -> str:
    """Its weights are so large that every part shows in the logits."""
    return _llama(cache / "tiny-llama", 0.15)


@pytest.fixture(scope="session")
def calm_llama(cache: Path) -> str:
    """Its weights are of a usual size, so that rounding to 8 bits stays rounding."""
    return _llama(cache / "calm-llama", 0.06)


@pytest.fixture(scope="session")
def four_bit_llama(calm_llama: str, cache: Path) -> str:
    """A real checkpoint in GPTQ's format, rounded to nearest by AutoRound; in a process without the
    stand-in, which it would take for a card to compute on."""
    pytest.importorskip("auto_round")
    directory = cache / "four-bit-llama"
    code = """
import sys
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer
source, directory = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, torch_dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(source)
nearest = {"iters": 0, "disable_opt_rtn": True}
made = AutoRound(model, tokenizer, bits=4, group_size=32, sym=True, device_map="cpu", **nearest)
made.quantize_and_save(directory, format="auto_gptq")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code, calm_llama, str(directory)]
    subprocess.run(command, env=environment, cwd=cache, check=True, timeout=600)
    (made,) = directory.rglob("config.json")
    config = json.loads(made.read_text())
    made.write_text(json.dumps(config | {"random_weights": True}))
    return str(made.parent)


@pytest.fixture(scope="session")
def original_chatglm3(cache: Path) -> str:
    from workloads.models.loading import open_model

    directory = cache / "chatglm3-as-published"
    shutil.copytree(open_model("tiny-chatglm3", layout="original").path, directory)
    return str(directory)
