"""The fp8 operations that the Intel Neural Compressor puts into a model, written out in torch.

Values are really stored in float8; products are those of the values, scaled back.
"""

from typing import Any

import torch

_LIBRARY = torch.library.Library("hpu", "DEF")
_CAST = "bool stochastic_rounding=False, bool is_amax=False, ScalarType? dtype=None"
_A = "Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype"


def _cast_to(
    x: torch.Tensor,
    scale: Any = None,
    stochastic: bool = False,
    is_amax: bool = False,
    dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float() if scale is None else x.float() * scale
    limit = torch.finfo(dtype or torch.float8_e4m3fn).max
    stored = wide.clamp(-limit, limit).to(dtype or torch.float8_e4m3fn)
    return stored, x.abs().amax().float()


def _cast_from(x: torch.Tensor, scale: Any = None, out_dtype: Any = torch.bfloat16) -> torch.Tensor:
    return (x.float() if scale is None else x.float() * scale).to(out_dtype)


def _gemm(
    a: torch.Tensor,
    trans_a: bool,
    b: torch.Tensor,
    trans_b: bool,
    d: Any,
    out_dtype: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    bias: Any = None,
    accumulate: bool = False,
) -> torch.Tensor:
    left = a.float().transpose(-2, -1) if trans_a else a.float()
    right = b.float().transpose(-2, -1) if trans_b else b.float()
    out = left @ right * (1.0 if scale_a is None else scale_a) * (1 if scale_b is None else scale_b)
    return (out if bias is None else out + bias.float()).to(out_dtype)


for _overload, _kind in (("", "Tensor?"), (".scalar", "float?")):
    _LIBRARY.define(
        f"cast_to_fp8_v2{_overload}(Tensor input, {_kind} scale=None, {_CAST}) -> (Tensor, Tensor)"
    )
    _LIBRARY.define(
        f"cast_from_fp8{_overload}(Tensor input, {_kind} scale, ScalarType out_dtype) -> Tensor"
    )
    _LIBRARY.define(
        f"fp8_gemm_v2{_overload}({_A}, {_kind} A_scale=None, {_kind} B_scale=None, "
        "Tensor? bias=None, bool accumulate=False) -> Tensor"
    )
    for _name, _function in (
        ("cast_to_fp8_v2", _cast_to),
        ("cast_from_fp8", _cast_from),
        ("fp8_gemm_v2", _gemm),
    ):
        _LIBRARY.impl(_name + _overload, _function, "CompositeExplicitAutograd")


def fp8_fused_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    d_scale_q: Any = None,
    d_scale_k: Any = None,
    d_scale_v: Any = None,
    q_scale_o: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of fp8 (or, when measuring, 16-bit) inputs; its output, and the largest weight."""

    def wide(x: torch.Tensor, factor: Any) -> torch.Tensor:
        return x.float() if factor is None else x.float() * factor

    mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else None
    out = torch.nn.functional.scaled_dot_product_attention(
        wide(query, d_scale_q),
        wide(key, d_scale_k),
        wide(value, d_scale_v),
        attn_mask=mask if mask is not None else attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    largest = torch.ones(())  # a row of weights sums to 1
    if q_scale_o is not None:
        return _cast_to(out, q_scale_o)[0], largest
    return out.to(query.dtype), largest
