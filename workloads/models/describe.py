"""Describe a model from its config alone: parameters, memory, architecture, prompt.

The model is built on torch's meta device, without storage, in a process with limits: a stranger's
files could make libraries hang or take all memory. In int8 and int4, linear layers take 1
and 1/2 byte per weight (int4 plus a bfloat16 scale per 64; int8's per-row scales are ignored);
embeddings, norms and the output layer stay bfloat16. The key-value cache is per token and sequence.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from workloads.base import BadConfiguration
from workloads.inspection import configuration, process
from workloads.inspection.checkpoints import read_config, read_object
from workloads.inspection.headers import describe_tensors
from workloads.inspection.look import LIBRARY, LOADERS, look
from workloads.models import hub
from workloads.models.catalog import EMBEDDED, ModelEntry, find_model, model_here
from workloads.models.chatglm3 import layout
from workloads.models.loading import open_model
from workloads.models.prompts import Prompt, example_prompt
from workloads.models.rules import ATTENTION_TARGETS
from workloads.registry import TASKS, TaskSpec, kind_of, task_of

#: Values that share one scale in the usual int4 formats.
INT4_GROUP = 64
_LAYER_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One kind of parameter; equal ones of all layers are one entry."""

    name: str  # "model.layers.*.mlp.down_proj.weight"
    shape: tuple[int, ...]
    count: int  # layers that have it
    parameters: int  # in total


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at one precision."""

    precision: str
    weight_bytes: int
    cache_bytes_per_token: int | None  # key-value cache, per token and sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA on some linear layers: rank × (inputs + outputs) parameters each."""

    targets: tuple[str, ...]
    rank: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and choices that a picture of the model shows."""

    name: str
    vocabulary: int = 0
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0  # rotated channels of a head; 0 without rotary embedding
    intermediate: int = 0
    activation: str = ""
    gated: bool = False
    norm: str = ""  # "RMSNorm"
    epsilon: float | None = None
    qkv_bias: bool = False
    tied: bool = False
    positions: int | None = None
    kind: str = "decoder"  # "encoder", "encoder and decoder", or "pipeline" of several models
    relative_positions: bool = False  # learned, by distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Everything that ``nightgrid describe`` shows."""

    model: str
    random_weights: bool
    parameters: int
    architecture: Architecture
    tensors: tuple[Tensor, ...]
    memory: tuple[Memory, ...]
    adapters: tuple[Adapter, ...]
    prompt: Prompt


def describe_model(name: str, *, lora_rank: int = 8) -> Description:
    """Describe an embedded model, a directory or config.json (native or original), or a hub id.

    Pipelines of several models are described by their parts, as their weight files have them.
    Raises DataMissing, or BadConfiguration if no task takes such a model.
    """
    entry = model_here(name)
    if entry is not None and entry.checkpoint.pipeline:
        return _describe_pipeline(entry)
    config, directory = _resolve(name)
    refuse_odd(config, directory)
    place = None if directory is None else str(directory)
    try:
        values = LIBRARY.call(
            f"{__name__}:read_model", name=name, config=config, directory=place, rank=lora_rank
        )
    except process.Ended as error:
        raise BadConfiguration(f"{place or name}: {error}") from error
    if isinstance(values, str):
        raise BadConfiguration(f"{place or name}: {values}")
    return TypeAdapter(Description).validate_python(values)  # JSON has no tuples


def _describe_pipeline(entry: ModelEntry) -> Description:
    name = entry.name
    if entry.kind == "hub" and entry.location == name:
        raise BadConfiguration(
            f"{name} is a pipeline of several models ({entry.checkpoint.architecture}): its parts "
            "are described once it is here"
        )
    directory = Path(open_model(name).path)
    tensors = []
    for part in sorted(path for path in directory.iterdir() if path.is_dir()):
        infos = describe_tensors(sorted(part.glob("*.safetensors"))).values()
        if count := sum(math.prod(info.shape) for info in infos):
            config = read_config(part)
            title = f"{part.name}: {config.get('_class_name') or kind_of(config).architecture}"
            tensors.append(Tensor(name=title, shape=(), count=1, parameters=count))
    total = sum(tensor.parameters for tensor in tensors)
    index = read_object(directory / "model_index.json") or {}
    return Description(
        model=name,
        random_weights=entry.random_weights,
        parameters=total,
        architecture=Architecture(name=str(index.get("_class_name")), kind="pipeline"),
        tensors=tuple(tensors),
        memory=tuple(
            Memory(precision=precision, weight_bytes=each * total, cache_bytes_per_token=None)
            for precision, each in (("fp32", 4), ("bf16", 2))
        ),
        adapters=(),
        prompt=Prompt(layout="plain text, for the text encoder", example=""),
    )


def read_model(
    name: str, config: dict[str, Any], directory: str | None, rank: int
) -> dict[str, Any] | str:
    """Return a ``Description`` as values, or why there is none; for a process."""
    process.stage("config.json")
    try:
        original = layout.is_original(config)
        native = layout.from_original_config(config) if original else config
        model = build_on_meta(native)
    except BadConfiguration as error:
        return str(error)
    linears, architecture = linear_layers(model), _architecture(model)
    # Parameters in the model's order, equal ones of different layers merged.
    groups = Counter(
        (_LAYER_NUMBER.sub("*", key), tuple(parameter.shape))
        for key, parameter in model.named_parameters()
    )
    process.stage("the tokenizer")
    description = Description(
        model=name,
        random_weights=bool(config.get("random_weights")),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=architecture,
        tensors=tuple(
            Tensor(name=key, shape=shape, count=count, parameters=count * math.prod(shape))
            for (key, shape), count in groups.items()
        ),
        memory=_memory(model, linears, architecture),
        adapters=lora_sizes(linears, rank),
        prompt=example_prompt(native, None if directory is None else Path(directory)),
    )
    return asdict(description)


def refuse_odd(config: Mapping[str, Any], directory: Path | None) -> None:
    """Raise BadConfiguration for what would make a library hang or take all memory."""
    found = list(configuration.objections(config))
    if directory is not None and not found:
        task = _task(config).name
        chats = task == "causal-lm"
        seen = look(directory, task=task, read_weights=False, chats=chats, code_allowed=True)
        found = list(seen.objections)
    for one in found[:1]:
        where = directory / one.file if directory is not None else one.file
        raise BadConfiguration(f"{where}: {one.reason}")


def _resolve(name: str) -> tuple[dict[str, Any], Path | None]:
    """Return a model's config, and the directory of its tokenizer if any."""
    path = Path(name).expanduser()
    if path.name == "config.json" and os.path.isfile(path):
        path = path.parent
    if name in EMBEDDED:
        path = Path(open_model(name).path)
    elif not os.path.isfile(path / "config.json"):
        entry = find_model(name)
        if entry.kind == "hub" and entry.location == name:
            return hub.fetch_config(name), None
        path = Path(entry.location)
    return read_config(path), path


def _task(config: Mapping[str, Any]) -> TaskSpec:
    """The task that takes a model; a causal language model's if none is known to."""
    task = task_of(kind_of(config))
    return task if task is not None and task.name in LOADERS else TASKS["causal-lm"]


def build_on_meta(config: Mapping[str, Any]) -> Any:
    """Build a model on the meta device as its task loads it; raises BadConfiguration."""
    import torch
    import transformers

    task = _task(config)
    builder = getattr(transformers, LOADERS[task.name].name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            loaded = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with torch.device("meta"):
                return builder.from_config(loaded)
        except Exception as error:  # arbitrary configs make the library raise anything
            text = " ".join((str(error) or repr(error)).split())
            raise BadConfiguration(
                f"transformers builds no {task.title.partition(' ')[2]} from this config "
                f"({kind_of(config).architecture}): {text:.300}"
            ) from error


def linear_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers but the output layer, which quantisation and LoRA skip, by name."""
    import torch

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's
        if module is not model.get_output_embeddings()
    }


def lora_sizes(linears: Mapping[str, Any], rank: int) -> tuple[Adapter, ...]:
    """Count LoRA's parameters on attention inputs (the default), query and value, all layers."""
    sizes: Counter[str] = Counter()  # last name -> inputs + outputs of its layers
    for name, layer in linears.items():
        sizes[name.rsplit(".", 1)[-1]] += sum(layer.weight.shape)
    default = next((names for names in ATTENTION_TARGETS if set(names) <= set(sizes)), ())
    choices = (default, default[::2] if len(default) == 3 else (), tuple(sorted(sizes)))
    return tuple(
        Adapter(targets=names, rank=rank, parameters=rank * sum(sizes[name] for name in names))
        for names in choices
        if names
    )


def _memory(model: Any, linears: Mapping[str, Any], shape: Architecture) -> tuple[Memory, ...]:
    everything = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(layer.weight.numel() for layer in linears.values())
    rest = 2 * (everything - matrices)
    weights = {
        "fp32": 4 * everything,
        "bf16": 2 * everything,
        "int8": matrices + rest,
        "int4": matrices // 2 + 2 * matrices // INT4_GROUP + rest,
    }
    # A key and a value for each layer of a decoder; an encoder keeps none.
    config = model.config
    decoding = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", 0)
    layers = {"decoder": shape.layers, "encoder": 0}.get(shape.kind, decoding or 0)
    values = 2 * layers * shape.kv_heads * shape.head_dim
    return tuple(
        Memory(
            precision=precision,
            weight_bytes=size,
            cache_bytes_per_token=values * (4 if precision == "fp32" else 2) or None,
        )
        for precision, size in weights.items()
    )


def _architecture(model: Any) -> Architecture:
    """Read the architecture from the config, by the names that transformers' models share."""
    config = model.config

    def first(*names: str, default: Any = None) -> Any:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), default)

    hidden = first("hidden_size", "n_embd", "d_model", "dim", default=0)
    heads = first("num_attention_heads", "n_head", "num_heads", "n_heads", default=0)
    kind = LOADERS[_task(config.to_dict() | {"architectures": [type(model).__name__]}).name].kind
    layers = int(first("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=0))
    if kind == "encoder and decoder":
        layers += int(first("decoder_layers", "num_decoder_layers", default=0))
    head_dim = first("head_dim", "d_kv", default=hidden // heads if heads else 0)
    modules = dict(model.named_modules())
    parameters = {name for name, _ in model.named_parameters()}
    norms = {type(m).__name__ for n, m in modules.items() if "norm" in n.rsplit(".", 1)[-1]}
    epsilon = first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    frequencies = next((m.inv_freq for m in modules.values() if hasattr(m, "inv_freq")), None)
    return Architecture(
        name=type(model).__name__,
        vocabulary=first("vocab_size", default=0),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=first("num_key_value_heads", default=heads),
        head_dim=head_dim,
        rotary_dim=0 if frequencies is None else 2 * frequencies.shape[0],
        intermediate=first("intermediate_size", "n_inner", "ffn_dim", "d_ff", default=4 * hidden),
        activation=str(
            first("hidden_act", "activation_function", "feed_forward_proj", default="?")
        ),
        gated=any("gate" in name for name in parameters),
        norm="RMSNorm" if any("RMSNorm" in norm for norm in norms) else "LayerNorm",
        epsilon=None if epsilon is None else float(epsilon),
        qkv_bias=any(
            re.search(r"(q_proj|c_attn|query_key_value|query|q_lin)\.bias$", n) for n in parameters
        ),
        tied=bool(first("tie_word_embeddings", default=False)),
        positions=first("max_position_embeddings", "n_positions"),
        kind=kind,
        relative_positions=any("relative_attention_bias" in name for name in parameters),
    )
