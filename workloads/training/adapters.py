"""Trained adapters on disk: where they are kept, how they are written, read and put on a model.

An adapter is a directory in peft's layout (``adapter_config.json``, ``adapter_model.safetensors``).
Jobs know it by name, and the name's directory lies under ``NIGHTGRID_ADAPTERS``, else under
``adapters`` in the node's cache. On one machine, and where home directories or the cache are
shared, every later job finds it there. **Nodes that share neither need NIGHTGRID_ADAPTERS set to a
directory on storage that all of them see**; without, only jobs on the node that trained it find it.
An adapter is written aside and renamed, so a name that exists is complete; training it again
replaces it.

ChatGLM3 has two layouts. In the original one query, key and value come out of one matrix,
``query_key_value``; the native class has three. LoRA adds B·A to a matrix, A [rank, inputs] and
B [outputs, rank]. From fused to split, all three get A, and each its rows of B: exact. Back, three
pairs of unlike A become one of rank 3r: the A's on top of each other, the B's along a diagonal of
blocks, and alpha three times as large. Where the three A's are equal, as after the first way, the
fused one has its old rank. Only plain LoRA is linear in this way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration, DataMissing, Unsupported
from workloads.models.checkpoints import refuse_odd_files
from workloads.models.products import product_root, save_product

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapters_root() -> Path:
    """The directory of all named adapters on this machine; need not exist."""
    return product_root("adapter")


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

    return save_product("adapter", name, origin, fill)


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

    wants_original = {"glm": False, "chatglm": True}.get(getattr(model_config, "model_type", ""))
    if wants_original is None or wants_original == is_original(state):
        return config, state
    carry = to_original if wants_original else to_native
    converted = carry(Lora.of(config, state), rows_of(model_config))
    return converted.config(), dict(converted.state)


_PREFIX = "base_model.model."
_SPLIT = ("q_proj", "k_proj", "v_proj")
_FUSED = "query_key_value"

#: Linear layers that are one to one: in the original layout, in the native class.
_ONE_TO_ONE = {
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
_ORIGINAL_KEY = re.compile(
    r"(?:base_model\.model\.)?transformer\.encoder\.layers\.(\d+)\.(.+)\.(lora_[AB])\.(?:\w+\.)?weight"
)
_NATIVE_KEY = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(.+)\.(lora_[AB])\.(?:\w+\.)?weight"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A plain LoRA adapter: its tensors by peft's names, and what scales them."""

    state: Mapping[str, torch.Tensor]
    rank: int
    alpha: float
    targets: tuple[str, ...]  # last names of the layers it sits on
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # layers with a rank of their own
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, state: Mapping[str, torch.Tensor]) -> Lora:
        """From a ``peft.LoraConfig`` and the adapter's tensors.

        Raises:
            BadConfiguration: it is not plain LoRA.
        """
        plain = str(config.peft_type).rsplit(".", 1)[-1] == "LORA"
        if not plain or config.use_dora or config.use_rslora or config.bias != "none":
            raise BadConfiguration(
                "only plain LoRA can be carried between ChatGLM3's layouts: no DoRA, no "
                "rank-stabilised scaling, no trained biases"
            )
        return cls(
            state=dict(state),
            rank=config.r,
            alpha=config.lora_alpha,
            targets=tuple(sorted(config.target_modules)),
            rank_pattern=dict(config.rank_pattern),
            alpha_pattern=dict(config.alpha_pattern),
        )

    def config(self) -> Any:
        """The ``peft.LoraConfig`` that goes with ``state``."""
        from peft import LoraConfig, TaskType

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # peft divides it, and takes floats
            target_modules=list(self.targets),
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            task_type=TaskType.CAUSAL_LM,
            inference_mode=True,
        )


def is_original(state: Mapping[str, Any]) -> bool:
    """Tell if an adapter's tensors are named after ChatGLM3's original layout."""
    return any(_ORIGINAL_KEY.fullmatch(name) for name in state)


def rows_of(config: Any) -> tuple[int, int, int]:
    """Rows of query, key and value in a model's config, of either layout."""
    if getattr(config, "model_type", "") == "chatglm":
        size, groups = config.kv_channels, config.multi_query_group_num
    else:
        size, groups = config.head_dim, config.num_key_value_heads
    return config.num_attention_heads * size, groups * size, groups * size


def to_native(lora: Lora, rows: tuple[int, int, int]) -> Lora:
    """From the original layout to the converted model's. Exact.

    Raises:
        BadConfiguration: a tensor has no counterpart, or its rows are another model's.
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in lora.state.items():
        layer, module, part = _parse(_ORIGINAL_KEY, name)
        if module == f"self_attention.{_FUSED}":
            pieces = [tensor] * 3 if part == "lora_A" else _split_rows(name, tensor, rows)
            for projection, piece in zip(_SPLIT, pieces, strict=True):
                state[_native_name(layer, f"self_attn.{projection}", part)] = piece.clone()
        elif module in _ONE_TO_ONE:
            state[_native_name(layer, _ONE_TO_ONE[module], part)] = tensor
        else:
            raise BadConfiguration(f"the adapter's {name} has no place in the native class")
    last = {old.split(".")[-1]: new.split(".")[-1] for old, new in _ONE_TO_ONE.items()}
    return _renamed(lora, state, lambda name: _SPLIT if name == _FUSED else (last[name],))


def to_original(lora: Lora, rows: tuple[int, int, int]) -> Lora:
    """From the converted model's layout to the original one, up to rounding.

    Raises:
        BadConfiguration: query, key and value do not all have an adapter of the same rank.
    """
    import torch

    back = {new: old for old, new in _ONE_TO_ONE.items()}
    state: dict[str, torch.Tensor] = {}
    split: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
    for name, tensor in lora.state.items():
        layer, module, part = _parse(_NATIVE_KEY, name)
        if module in back:
            state[_original_name(layer, back[module], part)] = tensor
        elif module.split(".")[-1] in _SPLIT:
            split.setdefault(layer, {})[module.split(".")[-1], part] = tensor
        else:
            raise BadConfiguration(f"the adapter's {name} has no place in the original layout")
    if any(len(parts) != 6 for parts in split.values()):
        raise BadConfiguration(
            f"the original layout has one matrix for query, key and value, so all of "
            f"{', '.join(_SPLIT)} need an adapter"
        )
    shared = all(
        torch.equal(p["q_proj", "lora_A"], p[other, "lora_A"])
        for p in split.values()
        for other in ("k_proj", "v_proj")
    )
    for layer, parts in split.items():
        downs = [parts[projection, "lora_A"] for projection in _SPLIT]
        ups = [parts[projection, "lora_B"] for projection in _SPLIT]
        if tuple(up.shape[0] for up in ups) != rows:
            raise BadConfiguration(f"layer {layer} of the adapter is of a model of other sizes")
        module = f"self_attention.{_FUSED}"
        state[_original_name(layer, module, "lora_A")] = (
            downs[0].clone() if shared else torch.cat(downs)
        )
        state[_original_name(layer, module, "lora_B")] = (
            torch.cat(ups) if shared else torch.block_diag(*ups)
        )
    last = {new.split(".")[-1]: old.split(".")[-1] for old, new in _ONE_TO_ONE.items()}
    made = _renamed(lora, state, lambda name: (_FUSED,) if name in _SPLIT else (last[name],))
    if shared or not split:
        return made
    return Lora(
        state=made.state,
        rank=made.rank,
        alpha=made.alpha,
        targets=made.targets,
        rank_pattern={**made.rank_pattern, _FUSED: 3 * lora.rank},
        alpha_pattern={**made.alpha_pattern, _FUSED: 3 * lora.alpha},
    )


def _renamed(lora: Lora, state: dict[str, Any], rename: Any) -> Lora:
    if lora.rank_pattern or lora.alpha_pattern:
        raise BadConfiguration(
            "an adapter whose layers have ranks of their own cannot be carried between layouts"
        )
    targets = sorted({new for old in lora.targets for new in rename(old.split(".")[-1])})
    return Lora(state=state, rank=lora.rank, alpha=lora.alpha, targets=tuple(targets))


def _parse(pattern: re.Pattern[str], name: str) -> tuple[str, str, str]:
    match = pattern.fullmatch(name)
    if match is None:
        raise BadConfiguration(f"the adapter holds {name}, which is no LoRA tensor of ChatGLM3")
    return match[1], match[2], match[3]


def _split_rows(
    name: str, tensor: torch.Tensor, rows: tuple[int, int, int]
) -> tuple[torch.Tensor, ...]:
    if tensor.shape[0] != sum(rows):
        raise BadConfiguration(
            f"the adapter's {name} has {tensor.shape[0]} rows, this model's query, key and value "
            f"{sum(rows)} together"
        )
    return tensor.split(list(rows))


def _native_name(layer: str, module: str, part: str) -> str:
    return f"{_PREFIX}model.layers.{layer}.{module}.{part}.weight"


def _original_name(layer: str, module: str, part: str) -> str:
    return f"{_PREFIX}transformer.encoder.layers.{layer}.{module}.{part}.weight"
