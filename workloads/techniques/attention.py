"""Attention implementation: who computes softmax(QKᵀ)V, and what of it is ever written out.

*Eager* attention writes the whole score matrix, positions × positions for every head, which grows
with the square of the length. *sdpa*, PyTorch's scaled_dot_product_attention, picks a kernel that
works in tiles and keeps none of it. *flash_attention_2* (package flash-attn) and *xformers* bring
such kernels of their own, for NVIDIA cards. All of them compute the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from workloads.errors import Unsupported
from workloads.refusal import Asked, Refusal
from workloads.settings import setting
from workloads.techniques.base import Loading, Technique, Training

if TYPE_CHECKING:
    import torch

#: The package behind each implementation that is not PyTorch's.
_PACKAGES = {"flash_attention_2": "flash-attn", "xformers": "xformers"}

#: xformers wants the rows of a bias to begin at multiples of so many elements.
_ALIGNMENT = 8


class Attention(Technique):
    """Choice of the implementation of attention."""

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "attention implementation"
    order: ClassVar[int] = 90

    attention: Literal["sdpa", "eager", "flash_attention_2", "xformers"] = setting(
        "sdpa",
        role="choice",
        loads=True,
        always_in_id=True,
        description="Attention implementation: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, flash_attention_2 and xformers the kernels of those packages "
        "(CUDA only).",
    )

    def refusals(self, asked: Asked) -> Iterable[Refusal]:
        if self.attention not in _PACKAGES:
            return
        if not asked.on.can(self.attention):
            yield Refusal(
                setting="attention",
                reason=f"{self.attention} has no {asked.device} kernels",
                hint="write attention: sdpa",
                unsupported=True,
            )
        half = asked.precision != "fp32" or asked.parameters.get("autocast", "none") != "none"
        if self.attention == "flash_attention_2" and not half:
            yield Refusal(
                setting="attention",
                reason="flash_attention_2 computes in fp16 and bf16 only, and this job in fp32",
                hint="write precision: bf16, or autocast: bf16",
            )

    def before_load(self, loading: Loading) -> None:
        package = _PACKAGES.get(self.attention)
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise Unsupported(
                f"attention {self.attention} needs the package '{package}', which is not "
                f"installed here; install it with: pip install {package}"
            )
        if self.attention == "xformers":
            register_xformers()
        loading.model_arguments["attn_implementation"] = self.attention
        loading.checks.append(self._check)

    def _check(self, model: Any, tokenizer: Any) -> None:
        from workloads.models.loading import check_attention

        check_attention(model, self.attention)

    def on_model(self, training: Training) -> None:
        training.details["attention"] = self.attention


def register_xformers() -> None:
    """Make xformers an attention implementation of transformers, under that name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register("xformers", xformers_attention)
    AttentionMaskInterface.register("xformers", eager_mask)  # what is added to the scores


def xformers_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function by ``memory_efficient_attention`` of xformers.

    Args:
        module: the attention layer.
        query: [batch, heads, positions, channels].
        key: [batch, key/value heads, positions, channels]; repeated where heads share them.
        value: like ``key``.
        attention_mask: added to the scores, [batch, 1, positions, positions]; None: causal, unless
            the layer attends in both directions.
        scaling: of the scores; None: one over the root of the channels.
        dropout: rate in training.

    Returns:
        [batch, positions, heads, channels], and no weights.
    """
    operations = importlib.import_module("xformers.ops")
    heads = query.shape[1]
    shared = heads // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    causal = getattr(module, "is_causal", True)
    bias: Any = operations.LowerTriangularMask() if causal else None
    if attention_mask is not None:
        bias = _aligned(attention_mask[..., : key.shape[2]].to(query.dtype), heads)
    output = operations.memory_efficient_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_bias=bias,
        p=dropout,
        scale=scaling,
    )
    return output, None


def _aligned(mask: torch.Tensor, heads: int) -> torch.Tensor:
    """The mask for all heads, in memory whose rows begin where the kernels want them."""
    columns = mask.shape[-1]
    wide = mask.new_zeros(*mask.shape[:-1], -(-columns // _ALIGNMENT) * _ALIGNMENT)
    wide[..., :columns] = mask
    return wide[..., :columns].expand(-1, heads, -1, -1)


SPEC = Attention
