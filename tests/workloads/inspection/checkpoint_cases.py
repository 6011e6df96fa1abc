"""A tiny Llama's directory as ``save_pretrained`` leaves it, and changes that people made to it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workloads.models import random_weights

Change = Callable[[Path], object]
ROWS = 320
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 2747293\n"
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
GENERATION, SETTINGS, TEMPLATE = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def make_good(directory: Path) -> Path:
    """Two layers, a head of its own, a tokenizer of bytes and a chat template."""
    directory.mkdir()
    random_weights.build(random_weights.DIRECTORY / "llama-3.1-8b", directory)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    (directory / TEMPLATE).write_text(template)
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def copied(good: Path, to: Path, *changes: Change) -> Path:
    shutil.copytree(good, to)
    for change in changes:
        change(to)
    return to


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def apply(directory: Path) -> None:
        state = {name: t.clone() for name, t in change(load_file(directory / WEIGHTS)).items()}
        save_file(state, directory / WEIGHTS, metadata={"format": "pt"})

    return apply


def renamed(rename: Callable[[str], str]) -> Change:
    return weights(lambda state: {rename(name): tensor for name, tensor in state.items()})


def prefixed(prefix: str) -> Change:
    return renamed(lambda name: prefix + name)


def lacking(part: str) -> Change:
    return weights(lambda state: {name: t for name, t in state.items() if part not in name})


def added(name: str, tensor: torch.Tensor) -> Change:
    return weights(lambda state: state | {name: tensor})


def mapped(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return weights(lambda state: {name: change(tensor) for name, tensor in state.items()})


def bytewise(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


def values(name: str, **change: object) -> Change:
    """Change keys of a JSON file; ``...`` takes one out."""

    def apply(directory: Path) -> None:
        file = directory / name
        content = json.loads(file.read_text()) if file.exists() else {}
        content.update(change)
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return apply


def rope(**parameters: object) -> Change:
    """Write rotary scaling as older releases do."""
    return values(CONFIG, rope_parameters=..., rope_theta=10000.0, rope_scaling=parameters)


def written(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def truncated(name: str, share: float = 0.5) -> Change:
    return bytewise(name, lambda data: data[: int(len(data) * share)])


def header(change: Callable[[dict[str, Any]], str]) -> Change:
    """Change the header of the weights, and leave their values as they are."""

    def apply(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        text = change(json.loads(data[8 : 8 + length])).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return bytewise(WEIGHTS, apply)


def sharded(directory: Path) -> None:
    state = load_file(directory / WEIGHTS)
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, own in parts.items():
        save_file({n: state[n] for n in own}, directory / file, metadata={"format": "pt"})
    (directory / WEIGHTS).unlink()
    weight_map = {name: file for file, own in parts.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def as_bin(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


def without(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def overlapping(entries: dict[str, Any]) -> str:
    """Let the second tensor begin within the first."""
    first, second = [name for name in entries if name != "__metadata__"][:2]
    entries[second]["data_offsets"] = entries[first]["data_offsets"]
    return json.dumps(entries)


def read_state(directory: Path) -> dict[str, torch.Tensor]:
    if (directory / "pytorch_model.bin").exists():
        state: dict[str, torch.Tensor] = torch.load(directory / "pytorch_model.bin")
        return state
    files = [directory / WEIGHTS] if (directory / WEIGHTS).exists() else directory.glob("*-of-*")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def without_metadata(directory: Path) -> None:
    """Write the weights as MLX does, without saying for which library."""
    save_file(load_file(directory / WEIGHTS), directory / WEIGHTS)
