"""Compare the tensors of a checkpoint with those that a model needs, and explain the difference.

Both sides are names and shapes: of headers and a family's table (``families.py``) before the night,
or of a library's own report after loading. A tensor that is missing would be made up by the
library, so it ends the job unless the task declares it new (``TaskSpec.new_weights``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads.base import DataMissing

#: Parts of names that wrappers leave -> (what left them, how to save without).
_WRAPPERS = {
    "_orig_mod.": ("torch.compile", "save the state_dict of model._orig_mod"),
    "_fsdp_wrapped_module.": ("FSDP", "save a full state_dict"),
    "_checkpoint_wrapped_module.": ("activation checkpointing", "unwrap the layers before saving"),
    "_forward_module.": ("Lightning's Fabric", "save the state_dict of the module inside"),
    "base_model.model.": ("PEFT", "call merge_and_unload() and save_pretrained()"),
    ".base_layer": ("PEFT", "call merge_and_unload() and save_pretrained()"),
    "module.": ("DistributedDataParallel or DeepSpeed", "save the state_dict of model.module"),
    "pretrained_model.": ("TRL's value head", "save the model inside"),
    "language_model.": ("a multimodal model", "name a checkpoint of the text model alone"),
}
#: Tensors that a release of transformers computes and another one stores.
_DISPENSABLE = re.compile(
    r"(rotary\w*\.(inv_freq|cos_cached|sin_cached)|position_ids|masked_bias|\.attn\.bias"
    r"|attention\.bias|_extra_state|num_batches_tracked)$|^_float_tensor$"
)
#: Heads that a masked language model gets anew where its checkpoint is of the encoder alone.
NEW_HEADS = (
    r"^(cls|lm_head|head|decoder|vocab_transform|vocab_layer_norm|vocab_projector)\.",
    r"^(generator_predictions|generator_lm_head|predictions|lm_predictions)\.",
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer|cls|score)\.")
_LAYER = re.compile(r"\.(\d+)\.")
_NAMED = 3
_ONE_MODEL = "take config.json and weights from one and the same model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The tensors in which a checkpoint differs from what a model needs."""

    expected: int  # tensors that the model needs
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    #: Name, shape in the checkpoint, shape that the model needs.
    misshapen: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    new: tuple[str, ...] = ()  # missing, and declared new by the task


def difference(
    expected: Mapping[str, Sequence[int]],
    stored: Mapping[str, Sequence[int]],
    *,
    prefix: str = "",
    tied: Iterable[Collection[str]] = (),
    packed: bool = False,
    new: Sequence[str] = (),
) -> Difference:
    """Compare names and shapes, under transformers' rules for old names, prefixes and ties.

    ``expected`` are the model's and ``stored`` the checkpoint's, which may have or lack the base
    model's name (``prefix``) before all names. Of ``tied`` names one is enough; in ``packed``
    models linear layers may hold other tensors; ``new`` are patterns of names that the task
    declares new.
    """
    renamed = {_renamed(name, expected, prefix): tuple(shape) for name, shape in stored.items()}
    if packed:  # its linear layers are there in any form
        modules = {_module(name) for name in renamed}
        layers = {_module(name) for name, shape in expected.items() if len(shape) == 2} & modules
        renamed = {name: shape for name, shape in renamed.items() if _module(name) not in layers}
        expected = {name: shape for name, shape in expected.items() if _module(name) not in layers}
    shared = {name for names in tied if any(name in renamed for name in names) for name in names}
    return _judged(
        len(expected),
        [name for name in expected if name not in renamed and name not in shared],
        [name for name in renamed if name not in expected],
        [
            (name, renamed[name], tuple(shape))
            for name, shape in expected.items()
            if renamed.get(name, tuple(shape)) != tuple(shape)
        ],
        new,
    )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def reported(report: Mapping[str, Any], expected: int, new: Sequence[str] = ()) -> Difference:
    """Return the difference in the loading report of transformers (``output_loading_info``)."""
    shapes = [
        (str(name), tuple(has), tuple(needs)) for name, has, needs in report["mismatched_keys"]
    ]
    missing = sorted({*report["missing_keys"]} - {name for name, *_ in shapes})
    return _judged(expected, missing, sorted(report["unexpected_keys"]), sorted(shapes), new)


def _judged(
    expected: int,
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshapen: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]],
    new: Sequence[str],
) -> Difference:
    missing = [name for name in missing if not _DISPENSABLE.search(name)]
    allowed = re.compile("|".join(new)) if new else None
    fresh = tuple(name for name in missing if allowed is not None and allowed.search(name))
    return Difference(
        expected=expected,
        missing=tuple(name for name in missing if name not in fresh),
        unexpected=tuple(name for name in unexpected if not _DISPENSABLE.search(name)),
        misshapen=tuple(misshapen),
        new=fresh,
    )


def _renamed(name: str, expected: Mapping[str, Any], prefix: str) -> str:
    """Return the model's name of a stored tensor, as transformers finds it."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    names = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    return next((one for one in names if one in expected), name)


def without_fractions(stored: Mapping[str, tuple[str, Sequence[int]]]) -> tuple[str, ...]:
    """Return the tensors of a model that is not quantised, by type and shape, that hold whole
    numbers: what made them cut their fractions off."""
    return tuple(
        name
        for name, (dtype, shape) in stored.items()
        if dtype.startswith(("int", "uint", "bool"))
        and len(shape) > 1
        and not _DISPENSABLE.search(name)
    )


# ---------------------------------------------------------------- in words


def objection(found: Difference, own: Iterable[str] = ()) -> tuple[str, str]:
    """Return why a checkpoint is refused, and the remedy; both "" if every tensor is there.

    A tensor that nothing reads is no reason, unless it belongs to a module of the model (a bias of
    a layer without one), or to a layer behind the last: then the configuration is another model's.
    ``own`` are the model's names by which to tell; none: not told.
    """
    if found.missing:
        of = f" of the {found.expected:,}" if found.expected else ""
        reason = f"{len(found.missing):,}{of} tensors that its configuration asks for "
        reason += f"{'is' if len(found.missing) == 1 else 'are'} not in it: {_first(found.missing)}"
        if found.unexpected:
            reason += f"; {len(found.unexpected):,} others are: {_first(found.unexpected)}"
        return reason, _remedy(found)
    if found.misshapen:
        name, *shapes = found.misshapen[0]
        has, needs = ("×".join(map(str, shape)) or "a number" for shape in shapes)
        count = len(found.misshapen)
        have = "1 tensor has" if count == 1 else f"{count:,} tensors have"
        reason = f"{have} another shape than its configuration asks for"
        return f"{reason}: {name} is {has}, not {needs}", _ONE_MODEL
    if adapter := [name for name in found.unexpected if "lora_" in name]:
        reason = f"it holds an adapter's tensors, which nothing adds to its own: {_first(adapter)}"
        return reason, "call merge_and_unload() and save_pretrained(), or keep the adapter apart"
    names = set(own)
    modules = {_module(name) for name in names}
    in_any_layer = {_LAYER.sub(".*.", name) for name in names}
    left = [
        name
        for name in found.unexpected
        if _module(name) in modules or _LAYER.sub(".*.", name) in in_any_layer
    ]
    if not left:
        return "", ""
    reason = f"its configuration has no place for {len(left):,} tensors of the model's own layers "
    return f"{reason}({_first(left)}), so it is another model's", _ONE_MODEL


def require_loaded(found: Difference, where: str, own: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the tensors that the task declares new; raises DataMissing if a library made up any
    other, or left out one of the model's ``own`` layers."""
    reason, hint = objection(found, own)
    if reason:
        raise DataMissing(f"{where}: {reason}; {hint}")
    return found.new


def _remedy(found: Difference) -> str:
    """Recognise what a wrapper left in names, heads and layers that are not there."""
    out = "take it out of the names"
    for part, (origin, remedy) in _WRAPPERS.items():
        if _explains(found, [name.replace(part, "") for name in found.unexpected]):
            return f"its names hold {part!r}, left by {origin}: {remedy}, or {out}"
    for count in (1, 2):
        if _explains(found, [name.split(".", count)[-1] for name in found.unexpected]):
            begin = ".".join(found.unexpected[0].split(".", count)[:count])
            return f"its names begin with {begin + '.'!r}: {out}"
    begin = Counter(name.partition(".")[0] for name in found.missing).most_common(1)[0][0]
    if _explains(found, [f"{begin}.{name}" for name in found.unexpected]):
        return f"its names lack {begin + '.'!r} in front: write it before each"
    if any("lora_" in name for name in found.unexpected):
        return "it holds an adapter: name its base model, and the adapter with `adapter:`"
    layers = sorted({int(m[1]) for name in found.missing if (m := _LAYER.search(name))})
    if not found.unexpected and all(_HEAD.search(name) for name in found.missing):
        tied = "if it was saved from a model whose head is its embedding, write "
        return f"{tied}tie_word_embeddings: true in config.json; else save it with its head"
    if layers and layers[0] > 0 and all(_LAYER.search(name) for name in found.missing):
        end = f"its weights end with layer {layers[0] - 1}"
        return f"{end}: correct the number of layers in config.json, or fetch the other files"
    return f"fetch its weights again, or {_ONE_MODEL}"


def _explains(found: Difference, names: Iterable[str]) -> bool:
    """Tell if other names for the unexpected tensors give most of the missing ones."""
    changed = set(names) - set(found.unexpected)
    return bool(changed) and 2 * len(changed & set(found.missing)) >= len(found.missing)


def _first(names: Sequence[str]) -> str:
    more = " …" if len(names) > _NAMED else ""
    return ", ".join(name[:120] for name in names[:_NAMED]) + more
