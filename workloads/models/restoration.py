"""A converted ChatGLM3 back into its original layout, for a library that is fast on that one.

``conversion.py`` the other way round: names as published, and query, key and value rows in one
matrix again. Values are copied bit for bit, one tensor at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, DataMissing
from workloads.models import chatglm3
from workloads.models.chatglm3 import Sizes
from workloads.models.checkpoint_files import architecture_of, read_config
from workloads.models.conversion import SHARD_BYTES
from workloads.models.shards import Shard, ShardWriter, inspect, open_shard, source_files

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def restore_into(source: Path, directory: Path) -> None:
    """Write the original layout of the converted model in ``source`` into an empty directory.

    Raises:
        DataMissing: weights are missing or truncated.
        BadConfiguration: it is another model's.
    """
    config = read_config(source)
    if architecture_of(config) != "GlmForCausalLM":
        raise BadConfiguration(f"{source} is {architecture_of(config)}, not a converted ChatGLM3")
    sizes = native_sizes(config)
    tensors = _Tensors(source)
    writer = ShardWriter(directory, SHARD_BYTES)
    for name in chatglm3.original_shapes(sizes):
        parts = [tensors.read(part.name) for part in chatglm3.native_parts(name, sizes)]
        writer.add(name, _joined(parts))
    writer.finish()
    text = json.dumps(original_config(config, sizes), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    copy_tokenizer(source, directory)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """The tokenizer is the same in both layouts."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def native_sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes in a config.json of the native class.

    Raises:
        BadConfiguration: a field is missing.
    """
    try:
        return Sizes(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config["head_dim"]),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
        )
    except KeyError as error:
        raise BadConfiguration(f"config.json has no {error.args[0]!r}") from None


def original_config(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The config.json of the original layout: the published one's fields, with these sizes."""
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    restored: dict[str, Any] = {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "hidden_size": sizes.hidden,
        "num_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "kv_channels": sizes.head_dim,
        "multi_query_attention": True,
        "multi_query_group_num": sizes.kv_heads,
        "ffn_hidden_size": sizes.intermediate,
        "padded_vocab_size": sizes.vocabulary,
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": float(theta or 10000.0) / 10000.0,
        "original_rope": True,
        "seq_length": int(config["max_position_embeddings"]),
        "rmsnorm": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
        "fp32_residual_connection": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": False,
        "eos_token_id": config.get("eos_token_id", chatglm3.END_ID),
        "pad_token_id": chatglm3.UNKNOWN_ID,
        "torch_dtype": config.get("torch_dtype") or config.get("dtype") or "float16",
    }
    if config.get("random_weights"):
        restored["random_weights"] = True
    return restored


class _Tensors:
    """All tensors of a checkpoint, by name."""

    def __init__(self, source: Path) -> None:
        self._found = inspect(source_files(source))
        self._open: dict[Path, Shard] = {}
        self._source = source

    def read(self, name: str) -> torch.Tensor:
        """One tensor; it may be a view into the mapped file."""
        if name not in self._found:
            raise DataMissing(f"{self._source} lacks the tensor {name}")
        file = self._found[name].file
        if file not in self._open:
            self._open[file] = open_shard(file)
        return self._open[file].tensor(name)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(parts) if len(parts) > 1 else parts[0].clone()
