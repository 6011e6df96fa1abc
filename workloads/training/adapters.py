"""Trained adapters on disk: where they are kept, how they are written, read and put on a model.

An adapter is a directory in peft's layout (``adapter_config.json``, ``adapter_model.safetensors``).
Jobs know it by name, and the name's directory lies under ``NIGHTGRID_ADAPTERS``, else under
``adapters`` in the node's cache. On one machine, and where home directories or the cache are
shared, every later job finds it there. **Nodes that share neither need NIGHTGRID_ADAPTERS set to a
directory on storage that all of them see**; without, only jobs on the node that trained it find it.
An adapter is written aside and renamed, so a name that exists is complete; training it again
replaces it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, DataMissing, Unsupported
from workloads.cache import cache_root
from workloads.models.checkpoint_files import refuse_odd_files
from workloads.models.saved import keep, write_origin

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapters_root() -> Path:
    """The directory of all named adapters on this machine; need not exist."""
    named = os.environ.get("NIGHTGRID_ADAPTERS")
    return Path(named).expanduser() if named else cache_root() / "adapters"


def find_adapter(name: str) -> Path:
    """The directory of an adapter, by its name or as a path.

    Raises:
        DataMissing: there is none, or none that may be read; the message says where.
    """
    root = adapters_root()
    for directory in (root / name, Path(name).expanduser()):
        if (directory / CONFIG).is_file():
            refuse_odd_files(directory)
            return directory
    there = sorted(file.parent.name for file in root.glob(f"*/{CONFIG}"))
    close = difflib.get_close_matches(name, there, n=2, cutoff=0.5)
    known = f"did you mean {' or '.join(close)}?" if close else f"there is: {', '.join(there)}"
    raise DataMissing(
        f"no adapter {name!r} in {root} on this machine, and no directory of that name"
        f"{'; ' + known if there else ''}. A fine-tuning job keeps one with save_adapter: {name}; "
        "nodes without shared storage need NIGHTGRID_ADAPTERS on storage that all of them see"
    )


def save_adapter(model: Any, name: str, origin: Mapping[str, Any]) -> Path:
    """Keep a peft model's adapter under a name; ``origin`` says what it was trained on.

    Raises:
        DataMissing: the directory cannot be written to.
    """

    def fill(directory: Path) -> None:
        # The embeddings are the base model's own; peft would ask a hub whether they changed.
        model.save_pretrained(directory, safe_serialization=True, save_embedding_layers=False)
        write_origin(directory, origin)

    return keep("adapter", adapters_root() / name, fill)


def attach(model: Any, name: str) -> str:
    """Put an adapter on a base model, in place and in the model's own format; what it is.

    It stays apart from the weights (not merged), so that quantised bases keep theirs. One that
    was trained on ChatGLM3's other layout is converted on the way.

    Raises:
        DataMissing: there is no such adapter.
        BadConfiguration: it does not fit this model.
        Unsupported: peft has no such adapter over weights in this precision.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    directory = find_adapter(name)
    try:
        config = PeftConfig.from_pretrained(str(directory))
        state = read_state(directory)
        config, state = _in_layout_of(model.config, config, state)
        wrapped = PeftModel(model, config, autocast_adapter_dtype=False)
        outcome = set_peft_model_state_dict(wrapped, state)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:300]
        if "torchao" in text or isinstance(error, NotImplementedError):
            raise Unsupported(f"adapter {name!r} over a base in this precision: {text}") from error
        raise BadConfiguration(f"adapter {name!r} does not fit this model: {text}") from error
    missing = [key for key in getattr(outcome, "missing_keys", []) if ".lora_" in key]
    unexpected = list(getattr(outcome, "unexpected_keys", None) or [])
    if missing or unexpected:
        example = (unexpected or missing)[0]
        raise BadConfiguration(
            f"adapter {name!r} does not fit this model: {len(unexpected)} of its tensors have no "
            f"place and {len(missing)} places get none (e.g. {example})"
        )
    model.eval()
    targets = ", ".join(sorted(config.target_modules or ()))
    return f"{name}: {str(config.peft_type).rsplit('.', 1)[-1]}, rank {config.r}, on {targets}"


def read_state(directory: Path) -> dict[str, Any]:
    """The tensors of an adapter's directory, by peft's names.

    Raises:
        DataMissing: there is no weight file.
    """
    from safetensors.torch import load_file

    if (directory / WEIGHTS).is_file():
        return dict(load_file(directory / WEIGHTS))
    binary = directory / "adapter_model.bin"
    if not binary.is_file():
        raise DataMissing(f"{directory} has no {WEIGHTS}")
    import torch

    return dict(torch.load(binary, weights_only=True, map_location="cpu"))


def _in_layout_of(
    model_config: Any, config: Any, state: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The adapter for a model of this config; ChatGLM3 has two layouts, other models one."""
    from workloads.training import chatglm3_lora

    wants_original = {"glm": False, "chatglm": True}.get(getattr(model_config, "model_type", ""))
    if wants_original is None or wants_original == chatglm3_lora.is_original(state):
        return config, state
    carry = chatglm3_lora.to_original if wants_original else chatglm3_lora.to_native
    converted = carry(chatglm3_lora.Lora.of(config, state), chatglm3_lora.rows_of(model_config))
    return converted.config(), dict(converted.state)
