"""Rules of plans, by a text model's files: quantisation, tokenizer, positions, LoRA targets."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, JobDescription, Refusal, Unsupported, WorkloadError
from workloads.devices import DeviceSpec, device_spec
from workloads.inspection.checkpoints import protected_files, read_config, weight_files
from workloads.inspection.configuration import takes_quantization, text_part
from workloads.inspection.headers import describe_tensors
from workloads.inspection.look import MODEL, Look, look
from workloads.inspection.tokenizers import has_tokenizer
from workloads.models import hub
from workloads.models.catalog import (
    MADE,
    SMOLLM2,
    ModelEntry,
    find_model,
    known_config,
    model_here,
    positions_of,
    refuse_name,
    whole_number,
)
from workloads.models.chatglm3.layout import is_original
from workloads.models.products import origin_of
from workloads.registry import ENGINES, CheckpointKind

# Quantised checkpoints: the package that reads each kind, and its precision.
#
# GPTQ, AWQ and AutoRound pack 4 bits alike and are read by AutoRound's layers, unpacked for each
# product (GPTQ's and AWQ's libraries conflict with this transformers). On the host its torch layers
# are used: auto-round-lib's kernels (0.16.0) give other results once torch uses fewer threads than
# at their start, which jobs do. compressed-tensors, and fp8 without fp8 products, would be expanded
# at the first product: done at loading instead, so that a row names the right precision.


def _as_auto_round(on_host: bool, quantization: Mapping[str, Any]) -> Any:
    from transformers import AutoRoundConfig

    return AutoRoundConfig(backend="torch" if on_host else "auto")


def _expanded(on_host: bool, quantization: Mapping[str, Any]) -> Any:
    from transformers import CompressedTensorsConfig

    new = "dequantize" in inspect.signature(CompressedTensorsConfig).parameters
    arguments: dict[str, Any] = {"dequantize": True} if new else {"run_compressed": False}  # 4.55
    return CompressedTensorsConfig(**arguments)


def _expanded_fp8(on_host: bool, quantization: Mapping[str, Any]) -> Any:
    import transformers

    kind = transformers.FineGrainedFP8Config
    if "dequantize" not in inspect.signature(kind).parameters:
        raise Unsupported(
            f"transformers {transformers.__version__} expands no fp8 checkpoint to 16 or 32 bits; "
            "releases do whose FineGrainedFP8Config takes `dequantize` (5.23 does)"
        )
    # Keep the checkpoint's other values, which transformers also takes from here.
    return kind.from_dict({**quantization, "dequantize": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Package that reads a kind of checkpoint; "" is transformers alone."""

    module: str = ""
    package: str = ""  # pip name
    install: str = ""
    packed: bool = False  # 4 bits, read by AutoRound's layers
    #: Makes the config for from_pretrained: (loaded on the host, checkpoint's config).
    config: Callable[[bool, Mapping[str, Any]], Any] | None = None
    on_host: bool = True  # also read on the host


_AUTO_ROUND = Reader(
    module="auto_round",
    package="auto-round",
    install="pip install auto-round (Python 3.11 and newer)",
    packed=True,
    config=_as_auto_round,
)
#: By ``quant_method`` of config.json.
READERS = {
    "gptq": _AUTO_ROUND,
    "awq": replace(_AUTO_ROUND, on_host=False),  # AutoRound has no layers in torch for it
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
    "compressed-tensors": Reader(
        module="compressed_tensors",
        package="compressed-tensors",
        install="pip install compressed-tensors",
        config=_expanded,
    ),
    "fp8": Reader(config=_expanded_fp8),
}
#: Kinds in 4 bits.
PACKED = tuple(name for name, reader in READERS.items() if reader.packed)
#: pip name of each reader's package -> (install advice, kinds).
PACKAGES = {
    reader.package: (reader.install, [n for n, r in READERS.items() if r.module == reader.module])
    for reader in READERS.values()
    if reader.package
}
_EXPANDED = ("bf16", "fp16", "fp32")


def bits_of(quantization: Mapping[str, Any]) -> int:
    """Return the bits per weight in a packed checkpoint's ``quantization_config``."""
    return whole_number(quantization.get("bits", quantization.get("w_bit", 4))) or 4


def method_of(config: Mapping[str, Any]) -> str:
    """Return the ``quant_method`` of a checkpoint's config; "" for one that is not quantised."""
    return _quantization(config)[1]


def _quantization(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return ``quantization_config`` and its method; both empty if there is none."""
    written = config.get("quantization_config")
    quantization = written if isinstance(written, Mapping) else {}
    older = any(quantization.get(f"load_in_{bits}bit") for bits in (4, 8))  # they name no method
    method = quantization.get("quant_method") or ("bitsandbytes" if older else "")
    return quantization, str(method)


def unreadable(config: Mapping[str, Any]) -> str:
    """Return why no task loads such a checkpoint, or ""; engines' own loaders check themselves."""
    quantization, method = _quantization(config)
    reader = READERS.get(method)
    if quantization and not method:
        return "its quantization_config has no quant_method"
    if quantization and reader is None and not takes_quantization(quantization):
        return (
            f"transformers skips its quantization_config (quant_method {method:.40}), so its "
            "values would be read without their scales"
        )
    if reader is None or not reader.packed:
        return ""
    if (bits := bits_of(quantization)) != 4:
        return f"it is a {method} checkpoint in {bits} bits, and 4 are read"
    if quantization.get("desc_act") and not quantization.get("static_groups"):
        return "its inputs are reordered (desc_act), which no library reads that runs here"
    return ""


def precisions_of(
    config: Mapping[str, Any], directory: Path, device: DeviceSpec
) -> tuple[str, ...]:
    """Return the precisions of a quantised checkpoint; empty: any, or unknown."""
    quantization, method = _quantization(config)
    if not quantization:
        return ()
    if own := origin_of(directory).get("precision"):
        return (str(own),)
    if method == "bitsandbytes":
        return ("int4",) if quantization.get("load_in_4bit") else ("int8",)
    if method not in READERS:
        return ()
    if READERS[method].packed:
        return ("int4",)
    fp8 = method == "fp8" and device.can("fp8_products")
    return ("fp8", *_EXPANDED) if fp8 else _EXPANDED


def reading_arguments(
    config: Mapping[str, Any], model: str, *, on_host: bool = True
) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` for such a checkpoint; raises Unsupported."""
    quantization, method = _quantization(config)
    if reason := unreadable(config):
        raise Unsupported(f"{model} cannot be read: {reason}")
    if (reader := READERS.get(method)) is None:
        return {}
    if on_host and not reader.on_host:
        raise Unsupported(f"{model} is a {method} checkpoint, which is read on cards only")
    if reader.module and importlib.util.find_spec(reader.module) is None:
        raise Unsupported(
            f"{model} is a {method} checkpoint, which needs the package {reader.module}: "
            f"{reader.install}"
        )
    return {"quantization_config": reader.config(on_host, quantization)} if reader.config else {}


def as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` to load a checkpoint without expanding it."""
    quantization, method = _quantization(config)
    if method != "fp8":
        return {}  # the others are read in one way only
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config.from_dict(dict(quantization))}


# Code in a checkpoint would run on every card with the worker's rights. Grid files travel, so only
# the command line can allow it (``nightgrid run --remote-code MODEL``); workers get a variable.

#: Models that may run their own code, separated by ``os.pathsep``.
VARIABLE = "NIGHTGRID_REMOTE_CODE"


def allowed(model: str) -> bool:
    """Tell if this model may run its own code; a named hub repository covers its pinned commits."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    repository, revision = hub.split(model)
    pinned = hub.COMMIT.fullmatch(revision) and not os.path.exists(model)
    return model in named or bool(pinned and repository in named)


# Decoder parts that depend on a text's length, for engines with their own graph or cache, which
# assume attention to all previous positions and one table of angles.

#: Rotary types whose angles do not depend on the text's length.
_STEADY = {"default", "linear", "llama3", "yarn"}
#: Layer types with limited attention -> config key of the number of positions.
_SEEN = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def narrow_layers(config: Any) -> dict[str, int]:
    """Return layer types with limited attention and their number of positions; 0 if unknown."""
    if isinstance(config, Mapping):
        said = text_part(config)
    else:
        said = config.get_text_config(decoder=True).to_dict()
    types = said.get("layer_types")
    kinds = set(map(str, types)) if isinstance(types, list) else set()
    kinds -= {"full_attention"}
    if said.get("use_sliding_window", True) and said.get("sliding_window"):
        kinds.add("sliding_attention")
    sizes = {kind: said.get(_SEEN.get(kind, "")) for kind in kinds}
    return {kind: whole_number(sizes[kind]) for kind in sorted(kinds)}


def moving_rotation(model: Any) -> str | None:
    """Return a rotary type in the model that depends on the text's length; None if none."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None) or ()
        types = kinds.values() if isinstance(kinds, Mapping) else [kinds] if kinds else []
        if moving := set(types) - _STEADY:
            return min(moving)
    return None


def _has_weights(directory: Path) -> bool:
    """Tell if all weight files are there; the catalog has named those that are not."""
    try:
        return bool(weight_files(directory, protected=True))
    except WorkloadError:
        return False


def saving_refusals(model: str, name: str | None) -> Iterator[Refusal]:
    """Objections to saving what a job makes of ``model`` under a name, if any."""
    if name is None:
        return
    if taken := refuse_name(name):
        yield Refusal(
            setting="save_model", reason=taken, hint="choose a name that nothing else has"
        )
    if is_protected(model):
        yield Refusal(
            setting="save_model",
            reason=f"{model} is protected, and what is saved would lie in the clear",
            hint="leave save_model out, or train from the weights in the clear",
        )


def is_protected(model: str) -> bool:
    """Tell if a local model has encrypted weights."""
    entry = model_here(model)
    return entry is not None and bool(protected_files(Path(entry.location)))


def text_refusals(job: JobDescription, task: str = "causal-lm") -> Iterator[Refusal]:
    """Objections to a job over texts, by the model's files or else its config."""
    if (entry := model_here(job.model)) is None:
        return
    directory = Path(entry.location)
    if not entry.checkpoint.pipeline and os.path.isfile(directory / "config.json"):
        yield from _file_refusals(job, entry, directory)
    yield from look_refusals(job, task)
    if not entry.checkpoint.pipeline:
        yield from _position_refusals(job)


#: Most objections to one model that a plan names.
_MOST_OBJECTIONS = 5


def look_refusals(job: JobDescription, task: str) -> Iterator[Refusal]:
    """Objections of the look at a model's files, under the name of the task that loads it."""
    for objection in _look(job, task).objections[:_MOST_OBJECTIONS]:
        file = f"{objection.file}: " if objection.file else ""
        hint = objection.hint.replace(MODEL, job.model)
        yield Refusal(setting="model", reason=f"{file}{objection.reason}", hint=hint)


def look_notes(job: JobDescription, task: str) -> Iterator[str]:
    """Say of which models the tensors are compared only when they load."""
    if later := _look(job, task).later:
        yield f"the tensors of {job.model} are compared when it loads: {later}"


def _look(job: JobDescription, task: str) -> Look:
    """Look at a model's directory, if it has one here; embedded ones are our own."""
    entry = model_here(job.model)
    if entry is None or entry.kind == "embedded":
        return Look()
    directory = Path(entry.location)
    described = entry.checkpoint.pipeline or os.path.isfile(directory / "config.json")
    if not described or not directory.is_dir():
        return Look()
    engine = ENGINES.get(job.engine)
    begins = job.parameters.get("initial_weights")
    return look(
        directory,
        task=task,
        read_weights=entry.kind != "random" and begins != "fresh" and _has_weights(directory),
        chats=begins is None,
        code_allowed=allowed(job.model),
        own_loader=engine is not None and engine.own_loader,
    )


def no_tokenizer(directory: str, kind: CheckpointKind) -> tuple[str, str]:
    """Return the message for a missing tokenizer, and the remedy."""
    glm = kind.model_type in ("glm", "chatglm")
    return f"{directory} has no tokenizer", (
        "put ChatGLM3's tokenizer.model beside its weights and convert again"
        if glm
        else "put tokenizer.json, or the files it is made of, of the model's own repository there"
    )


def _file_refusals(job: JobDescription, entry: ModelEntry, directory: Path) -> Iterator[Refusal]:
    parameters = job.parameters
    if not has_tokenizer(directory):
        if entry.kind != "random":
            reason, hint = no_tokenizer(entry.location, entry.checkpoint)
            yield Refusal(setting="model", reason=reason, hint=hint)
        elif parameters.get("input_tokens", 0) is None:
            yield Refusal(
                setting="model",
                reason=f"{job.model} has no tokenizer, so prompts have no length of their own",
                hint="set input_tokens, 512 for instance; or name random:DIRECTORY of one that "
                "has the model's tokenizer beside its config.json",
            )
    engine = ENGINES.get(job.engine)
    own = engine is not None and engine.own_loader
    if not own and (reason := unreadable(read_config(directory))):
        yield Refusal(
            setting="model",
            reason=f"{job.model} cannot be read: {reason}",
            hint="name the model that it was made from, or another checkpoint of it",
            unsupported=True,
        )
    if protected_files(directory):
        shared = int(parameters.get("tensor_parallel") or 1) > 1
        if shared or engine is None or not engine.opens_protected:
            reader = "tensor_parallel" if shared else f"the engine {job.engine}"
            yield Refusal(
                setting="model",
                reason=f"{reader} reads weights from files, and those of {job.model} are protected",
                hint="name the model as it was before `nightgrid protect`, or another engine",
                unsupported=True,
            )


def quantised_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Objections to generating with a quantised checkpoint: precision, reference of quality."""
    engine = ENGINES.get(job.engine)
    if (entry := model_here(job.model)) is None:
        return
    directory = Path(entry.location)
    right = precisions_of(known_config(job.model) or {}, directory, device_spec(job.device))
    if right and job.precision not in right and engine is not None and not engine.own_loader:
        yield Refusal(
            setting="precision",
            reason=f"{job.model} is quantised already, and runs in {' or '.join(right)} here",
            hint=f"write precision: {right[0]}",
        )
    compared = job.parameters.get("quality") and not job.parameters.get("quality_of")
    if compared and right and "fp32" not in right:
        yield Refusal(
            setting="quality",
            reason=f"the reference is in fp32, and {job.model} is quantised",
            hint="write quality_of: the model that it was made from",
        )


def _position_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Refuse more tokens in and out than the model has positions, or sees at once."""
    config = known_config(job.model) or {}
    positions, engine = positions_of(config), ENGINES.get(job.engine)
    lengths = {name: job.parameters.get(name) for name in ("input_tokens", "output_tokens")}
    # Serving may have distributions there, which the server judges.
    wanted = {name: value if isinstance(value, int) else 0 for name, value in lengths.items()}
    longest = max(wanted, key=lambda name: wanted[name])
    window = min(narrow_layers(config).values(), default=0)
    if engine is not None and engine.sees_whole_texts and 0 < window < sum(wanted.values()):
        yield Refusal(
            setting=longest,
            reason=f"{sum(wanted.values()):,} tokens in and out are more than the {window:,} that "
            f"layers of the model see, and the engine {engine.name} sees them all",
            hint=f"input_tokens and output_tokens may be {window:,} together",
            unsupported=True,
        )
    if positions is None:
        return
    if config.get("is_encoder_decoder"):  # the encoder reads, the decoder writes
        yield from too_long(longest, wanted[longest], positions)
    elif sum(wanted.values()) > positions:
        yield Refusal(
            setting="input_tokens" if wanted["input_tokens"] else "output_tokens",
            reason=f"{sum(wanted.values()):,} tokens in and out are more than the model's "
            f"{positions:,} positions",
            hint=f"input_tokens and output_tokens may be {positions:,} together",
        )


def too_long(setting: str, tokens: int, positions: int) -> Iterator[Refusal]:
    """Refuse a length beyond the model's positions."""
    if tokens > positions:
        yield Refusal(
            setting=setting,
            reason=f"{tokens:,} tokens are more than the model's {positions:,} positions",
            hint=f"write {setting}: {positions}, or less",
        )


# Linear layers for adapters: by default the attention's inputs, found among the model's own layers
# (peft's table has no ``glm``). Plans use no torch: names come from the checkpoint's headers.

#: Names of the attention's inputs; the first complete set counts.
ATTENTION_TARGETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query_key_value",),
    ("qkv_proj",),
    ("c_attn",),
    ("Wqkv",),
    ("q", "k", "v"),
    ("query", "key", "value"),
)

#: ``targets`` for every linear layer but the output layer.
ALL_LINEAR = "all-linear"


def choose(targets: str | None, layers: Iterable[str]) -> tuple[str, ...]:
    """Return the last name components of the layers that get an adapter.

    ``targets`` are names separated by commas, ``all-linear``, or None for the attention's inputs;
    ``layers`` are names of the linear layers without the output layer. Raises BadConfiguration for
    an unknown name, or without an attention.
    """
    there = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
    if targets == ALL_LINEAR and there:
        return tuple(there)
    if targets is None or targets == ALL_LINEAR:
        for names in ATTENTION_TARGETS:
            if set(names) <= set(there):
                return names
        raise BadConfiguration(
            f"this model has none of the usual attention layers; name targets among "
            f"{', '.join(there) or 'none: it has no linear layers'}"
        )
    wanted = tuple(dict.fromkeys(n.strip() for n in targets.split(",") if n.strip()))
    unknown = [name for name in wanted if name not in there]
    if unknown or not wanted:
        raise BadConfiguration(
            f"targets: no linear layer is named {', '.join(unknown) or repr(targets)}; there is: "
            f"{', '.join(there)}"
        )
    return wanted


def linear_names(model: str) -> frozenset[str] | None:
    """Return last names of a model's linear layers by its files; None if unknown."""
    if model == SMOLLM2:
        llama = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        return frozenset(llama)
    shapes = linear_shapes(model)
    return None if shapes is None else frozenset(name.rsplit(".", 1)[-1] for name in shapes)


def undivided_layer(model: str, size: int) -> tuple[str, int] | None:
    """Return the first linear layer whose inputs are no multiple of a size, and their number."""
    shapes = (linear_shapes(model) or {}).items()
    return next(((name, inputs) for name, (_, inputs) in shapes if inputs % size), None)


def linear_shapes(model: str) -> dict[str, tuple[int, int]] | None:
    """Return (outputs, inputs) of linear layers by the headers; None if unknown.

    These are the matrices ``….layer.weight`` inside layers, without embeddings and heads.
    """
    try:
        entry = find_model(model)
        if entry.name in MADE:
            shapes = importlib.import_module(MADE[entry.name]).native_shapes()
        else:
            directory = Path(entry.location)
            if not os.path.isdir(directory) or is_original(read_config(directory)):
                return None  # on a hub, or not converted to the native layout yet
            weights = [file for file in weight_files(directory) if file.suffix == ".safetensors"]
            shapes = {name: info.shape for name, info in describe_tensors(weights).items()}
    except (WorkloadError, OSError, AttributeError):  # not all embedded models have text layers
        return None
    matrices = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight")
        and len(shape) == 2
        and any(part.isdigit() for part in name.split("."))
        and not name.endswith("_bias.weight")  # a table of relative positions
    }
    return matrices or None
