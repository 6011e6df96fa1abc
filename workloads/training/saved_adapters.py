"""Trained adapters on disk, and their conversion between ChatGLM3's layouts.

An adapter is a named directory in peft's layout under ``NIGHTGRID_ADAPTERS``, else ``adapters`` in
the node's cache. **Nodes without shared homes or cache need NIGHTGRID_ADAPTERS on shared storage**,
or only the node that trained an adapter has it. It is written aside and renamed, so a name that
exists is complete; training it again replaces it.

ChatGLM3's original layout fuses query, key and value into ``query_key_value``; the native class has
three matrices. LoRA adds B·A, A [rank, inputs], B [outputs, rank]. Splitting copies A and divides
B's rows: exact. Fusing stacks the three A's, puts the B's on a block diagonal and triples rank and
alpha; if the A's are equal, it keeps the rank. Only plain LoRA is linear in this way. Training on
the original layout splits the fused layer (``split_fused``): every engine trains the same adapter.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from workloads.base import BadConfiguration, DataMissing, Unsupported
from workloads.inspection.checkpoints import read_object, refuse_odd_files
from workloads.inspection.headers import OldFormat, read_header
from workloads.models.products import no_product, product_root, save_product

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BINARY = "adapter_model.bin"
#: peft's kinds that put trained tokens before a prompt, for which a model must be wrapped.
_PROMPTS = frozenset(
    ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
)


def find_adapter(name: str) -> Path:
    """Return an adapter's directory by name or path; DataMissing if none is readable, Unsupported
    for a kind that does not change a model's layers."""
    places = (product_root("adapter") / name, Path(name).expanduser())
    for directory in places:
        if (directory / CONFIG).is_file():
            refuse_odd_files(directory, directory.stat().st_mtime_ns)
            kind = (read_object(directory / CONFIG) or {}).get("peft_type")
            if kind in _PROMPTS:
                raise Unsupported(
                    f"{directory} holds a {kind} adapter: a prompt, which changes no layer"
                )
            with contextlib.suppress(OldFormat):  # which torch reads
                read_header(_weights(directory))
            return directory
    for directory in places:
        if directory.is_dir():
            raise DataMissing(f"{directory} has no {CONFIG}, so it is not an adapter's directory")
    raise no_product("adapter", name, CONFIG)


def _weights(directory: Path) -> Path:
    """Return an adapter's weight file; raises DataMissing."""
    for file in (directory / WEIGHTS, directory / _BINARY):
        if file.is_file():
            return file
    raise DataMissing(f"{directory} has no {WEIGHTS}")


def save_adapter(model: Any, name: str, origin: Mapping[str, Any]) -> Path:
    """Save a peft model's adapter with its ``origin``; DataMissing if not writable."""

    def fill(directory: Path) -> None:
        # Embeddings are the base model's; peft would query a hub about changes.
        model.save_pretrained(directory, safe_serialization=True, save_embedding_layers=False)
        if any(f"{_FUSED}.{part}_proj." in n for n in read_state(directory) for part in "qkv"):
            _rename_split(directory)

    return save_product("adapter", name, origin, fill)


def split_fused(model: Any, targets: str | None) -> None:
    """Replace ChatGLM3's fused query-key-value layers by three, in place, which get an adapter each
    as in the native layout. Other models, and models whose ``targets`` name the fused layer, stay
    as they are."""
    import torch

    fused = _FUSED.rpartition(".")[2]
    if getattr(model.config, "model_type", "") != "chatglm" or fused in (targets or ""):
        return

    class Split(torch.nn.Module):
        """Query, key and value [..., rows], one after the other, by a matrix each."""

        def __init__(self, whole: torch.nn.Linear) -> None:
            super().__init__()
            pieces = zip(
                (name.rpartition(".")[2] for name in _LAYERS[_FUSED]),
                whole.weight.split(rows),
                whole.bias.split(rows) if whole.bias is not None else (None,) * len(rows),
                strict=True,
            )
            for name, weight, bias in pieces:
                sizes = whole.in_features, len(weight)  # on meta, no random number is drawn
                layer = torch.nn.Linear(*sizes, bias=bias is not None, device="meta")
                layer.weight = torch.nn.Parameter(weight.detach())
                if bias is not None:
                    layer.bias = torch.nn.Parameter(bias.detach())
                self.add_module(name, layer)

        @property
        def weight(self) -> torch.Tensor:
            """The query's matrix, of whose device and dtype the model asks."""
            query: Any = self.get_submodule("q_proj")
            return getattr(query, "base_layer", query).weight  # type: ignore[no-any-return]

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(hidden) for layer in self.children()], dim=-1)

    rows = list(rows_of(model.config))
    for name, module in list(model.named_modules()):
        if name.endswith(f".{_FUSED}") and isinstance(module, torch.nn.Linear):
            model.get_submodule(name.rpartition(".")[0]).add_module(fused, Split(module))


def _rename_split(directory: Path) -> None:
    """Give an adapter over split layers the native layout's names, in its files."""
    import json

    from safetensors.torch import save_file

    native: dict[str, torch.Tensor] = {}
    for name, tensor in read_state(directory).items():
        match = _key(_ORIGINAL).fullmatch(name)
        assert match is not None, name
        module = match[2].removeprefix(f"{_FUSED}.")
        renamed = f"self_attn.{module}" if module != match[2] else _LAYERS[module][0]
        native[_name(_NATIVE, match[1], renamed, match[3])] = tensor
    save_file(native, directory / WEIGHTS, metadata={"format": "pt"})
    file = directory / CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    config["target_modules"] = sorted({name.split(".")[-3] for name in native})
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def attach(model: Any, name: str) -> str:
    """Attach an adapter to a base model in place, unmerged, in the model's format; describe it.

    An adapter of ChatGLM3's other layout is converted. BadConfiguration if it does not fit this
    model; Unsupported if peft has no such adapter over weights in this precision.
    """
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    directory = find_adapter(name)
    try:
        config = PeftConfig.from_pretrained(str(directory))
        state = read_state(directory)
        kind = getattr(model.config, "model_type", "")
        if kind in ("glm", "chatglm") and is_original(state) != (kind == "chatglm"):
            carry = to_original if kind == "chatglm" else to_native
            config, state = carry(config, state, rows_of(model.config))
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
    named = getattr(config, "target_modules", None) or ()
    targets = named if isinstance(named, str) else ", ".join(sorted(named))
    rank = f", rank {config.r}" if hasattr(config, "r") else ""  # IA3, for one, has none
    return f"{name}: {str(config.peft_type).rsplit('.', 1)[-1]}{rank}, on {targets}"


def read_state(directory: Path) -> dict[str, Any]:
    """Read an adapter's tensors by peft's names; DataMissing without a weight file."""
    from safetensors.torch import load_file

    weights = _weights(directory)
    if weights.name == WEIGHTS:
        return dict(load_file(weights))
    import torch

    return dict(torch.load(weights, weights_only=True, map_location="cpu"))


#: A ``peft.LoraConfig``, and tensors by peft's names.
Adapter: TypeAlias = "tuple[Any, dict[str, torch.Tensor]]"


#: Layers in the original layout -> those in the native class.
_LAYERS = {
    "self_attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.dense": ("self_attn.o_proj",),
    "mlp.dense_h_to_4h": ("mlp.gate_up_proj",),
    "mlp.dense_4h_to_h": ("mlp.down_proj",),
}
_FUSED = "self_attention.query_key_value"
#: Modules that hold the layers, in the original layout and in the native class.
_ORIGINAL, _NATIVE = "transformer.encoder", "model"


def _tensors(
    config: Any, state: Mapping[str, torch.Tensor], root: str
) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Yield (layer number, module, A or B, tensor); BadConfiguration if not plain LoRA of one rank
    over ChatGLM3."""
    plain = str(config.peft_type).rsplit(".", 1)[-1] == "LORA"
    if not plain or config.use_dora or config.use_rslora or config.bias != "none":
        raise BadConfiguration(
            "only plain LoRA can be carried between ChatGLM3's layouts: no DoRA, no "
            "rank-stabilised scaling, no trained biases"
        )
    if config.rank_pattern or config.alpha_pattern:
        raise BadConfiguration(
            "an adapter whose layers have ranks of their own cannot be carried between layouts"
        )
    key = _key(root)
    for name, tensor in state.items():
        match = key.fullmatch(name)
        if match is None:
            raise BadConfiguration(f"the adapter holds {name}, which is no LoRA tensor of ChatGLM3")
        yield match[1], match[2], match[3], tensor


def _carried(config: Any, state: dict[str, torch.Tensor], **changes: Any) -> Adapter:
    """The carried tensors with their config, whose targets are the tensors' layers."""
    config = copy.copy(config)
    config.target_modules = {name.split(".")[-3] for name in state}
    for name, value in changes.items():
        setattr(config, name, value)
    return config, state


def _key(root: str) -> re.Pattern[str]:
    parts = r"\.layers\.(\d+)\.(.+)\.(lora_[AB])\.(?:\w+\.)?weight"
    return re.compile(r"(?:base_model\.model\.)?" + re.escape(root) + parts)


def _name(root: str, layer: str, module: str, part: str) -> str:
    return f"base_model.model.{root}.layers.{layer}.{module}.{part}.weight"


def is_original(state: Mapping[str, Any]) -> bool:
    """Tell if an adapter's tensors are named after ChatGLM3's original layout."""
    return any(map(_key(_ORIGINAL).fullmatch, state))


def rows_of(config: Any) -> tuple[int, int, int]:
    """Rows of query, key and value in a model's config, of either layout."""
    if getattr(config, "model_type", "") == "chatglm":
        size, groups = config.kv_channels, config.multi_query_group_num
    else:
        size, groups = config.head_dim, config.num_key_value_heads
    return config.num_attention_heads * size, groups * size, groups * size


def to_native(config: Any, state: Mapping[str, Any], rows: tuple[int, int, int]) -> Adapter:
    """Convert to the native layout, exactly; BadConfiguration if a tensor does not fit."""
    native: dict[str, torch.Tensor] = {}
    for layer, module, part, tensor in _tensors(config, state, _ORIGINAL):
        if module not in _LAYERS:
            raise BadConfiguration(f"the adapter's {module} has no place in the native class")
        pieces: Sequence[torch.Tensor] = [tensor] * len(_LAYERS[module])
        if module == _FUSED and part == "lora_B":
            if tensor.shape[0] != sum(rows):
                raise BadConfiguration(
                    f"{module} of the adapter has {tensor.shape[0]} rows, this model's query, key "
                    f"and value {sum(rows)} together"
                )
            pieces = tensor.split(list(rows))
        for name, piece in zip(_LAYERS[module], pieces, strict=True):
            native[_name(_NATIVE, layer, name, part)] = piece.clone()
    return _carried(config, native)


def to_original(config: Any, state: Mapping[str, Any], rows: tuple[int, int, int]) -> Adapter:
    """Convert to the original layout, up to rounding; BadConfiguration if Q, K, V ranks differ."""
    import torch

    originals = {native: module for module, names in _LAYERS.items() for native in names}
    original: dict[str, torch.Tensor] = {}
    split: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
    for layer, module, part, tensor in _tensors(config, state, _NATIVE):
        if module not in originals:
            raise BadConfiguration(f"the adapter's {module} has no place in the original layout")
        if originals[module] == _FUSED:
            split.setdefault(layer, {})[module, part] = tensor
        else:
            original[_name(_ORIGINAL, layer, originals[module], part)] = tensor
    if any(len(parts) != 6 for parts in split.values()):
        raise BadConfiguration(
            "the original layout has one matrix for query, key and value, so all of q_proj, "
            "k_proj, v_proj need an adapter"
        )
    downs, ups = (
        {layer: [parts[name, part] for name in _LAYERS[_FUSED]] for layer, parts in split.items()}
        for part in ("lora_A", "lora_B")
    )
    shared = all(torch.equal(some[0], one) for some in downs.values() for one in some[1:])
    for layer in split:
        if tuple(up.shape[0] for up in ups[layer]) != rows:
            raise BadConfiguration(f"layer {layer} of the adapter is of a model of other sizes")
        down = downs[layer][0].clone() if shared else torch.cat(downs[layer])
        up = torch.cat(ups[layer]) if shared else torch.block_diag(*ups[layer])
        original[_name(_ORIGINAL, layer, _FUSED, "lora_A")] = down
        original[_name(_ORIGINAL, layer, _FUSED, "lora_B")] = up
    if shared or not split:
        return _carried(config, original)
    target = _FUSED.rpartition(".")[2]
    ranks, alphas = {target: 3 * config.r}, {target: 3 * config.lora_alpha}
    return _carried(config, original, rank_pattern=ranks, alpha_pattern=alphas)
