"""Attention by other packages than PyTorch: names, set-up, and an adapter for xformers.

No card has run xformers: tests check names and signatures of release 0.0.35, read from its wheel,
and the meaning that its documentation gives them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from workloads.base import JobDescription, Refusal, Unsupported, require_package
from workloads.devices import device_spec

if TYPE_CHECKING:
    import torch

#: Package of each implementation that is not PyTorch's.
PACKAGES = {"flash_attention_2": "flash-attn", "xformers": "xformers"}


def refusals(job: JobDescription) -> Iterator[Refusal]:
    """Refuse attention by a package that has no kernels for the device. Pure."""
    attention = str(job.parameters.get("attention", ""))
    if attention in PACKAGES and not device_spec(job.device).can(attention):
        yield Refusal(
            setting="attention",
            reason=f"{attention} has no {job.device} kernels",
            hint="write attention: sdpa",
            unsupported=True,
        )


def make_ready(attention: str) -> None:
    """Make an implementation available to transformers; raises Unsupported without its package."""
    if package := PACKAGES.get(attention):
        require_package(package, f"attention {attention}")
    if attention == "xformers":
        register_xformers()


def refuse_unknown(attention: str, words: Mapping[str, Any]) -> None:
    """Raise Unsupported for attention arguments in ``words`` that would change the result."""
    for name in ("softcap", "sliding_window", "position_bias", "s_aux"):
        if words.get(name) is not None:
            raise Unsupported(f"{attention} does not know {name}, which this model uses")


def register_xformers() -> None:
    """Register xformers as an attention implementation of transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register("xformers", xformers_attention)
    AttentionMaskInterface.register("xformers", eager_mask)  # additive


def xformers_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **words: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers by ``memory_efficient_attention`` of xformers.

    ``query`` is [batch, heads, positions, channels]; ``key`` and ``value`` have key/value heads;
    the mask is additive, [batch, 1, positions, positions], None: by ``is_causal``, or as the layer
    says. Scores are scaled by 1 / sqrt(channels) by default. Returns [batch, positions, heads,
    channels], and no weights.
    """
    # A mask already contains the sliding window.
    refuse_unknown(
        "xformers", words if attention_mask is None else words | {"sliding_window": None}
    )
    operations = importlib.import_module("xformers.ops")
    heads = query.shape[1]
    shared = heads // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias: Any = None
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]].to(query.dtype)
        columns = mask.shape[-1]
        # The kernels require rows aligned to 8 elements.
        wide = mask.new_zeros(*mask.shape[:-1], -(-columns // 8) * 8)
        wide[..., :columns] = mask
        bias = wide[..., :columns].expand(-1, heads, -1, -1)
    elif causal and query.shape[2] > 1:  # a single query is the last position and sees all
        same = query.shape[2] == key.shape[2]
        kind = "LowerTriangularMask" if same else "LowerTriangularFromBottomRightMask"
        bias = getattr(importlib.import_module("xformers.ops.fmha.attn_bias"), kind)()
    output = operations.memory_efficient_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_bias=bias,
        p=dropout,
        scale=scaling,
    )
    return output, None
