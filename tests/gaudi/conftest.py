"""The real optimum-habana on the CPU: `make test-gaudi`, in an environment of its own.

Without the stand-in for the Habana bridge on the path there is nothing to test here, so the tests
of this directory are not collected: `make test` leaves them to `make test-gaudi`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

if importlib.util.find_spec("habana_frameworks") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, adapters and references of these tests alone."""
    directory = tmp_path_factory.mktemp("cache")
    os.environ["NIGHTGRID_CACHE"] = str(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_llama(cache: Path) -> str:
    """A Llama of three layers with random weights, large enough that every part shows in logits."""
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
            initializer_range=0.15,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    directory = cache / "tiny-llama"
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"random_weights": True}))
    return str(directory)


@pytest.fixture(scope="session")
def original_chatglm3(cache: Path) -> str:
    """The embedded ChatGLM3 as a user would have it: a directory in the published layout."""
    from workloads.models.loading import open_model

    directory = cache / "chatglm3-as-published"
    shutil.copytree(open_model("tiny-chatglm3", layout="original").path, directory)
    return str(directory)
