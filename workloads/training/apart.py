"""Attention of packed samples, each by itself.

A row of packed samples under one mask computes every pair of positions and throws away those of
different samples. Here each sample is a call of its own, causal and without a mask: as many
products as the samples alone would need. That is many small calls, which suit a CPU. There they
are one operation for autograd and ``torch.compile``, whatever the samples' number and lengths; in
fp32 by machine code of ours, where the node has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workloads.attention_words import refuse_unknown
from workloads.errors import Unsupported
from workloads.training.kernels import near
from workloads.training.sample_attention import SampleAttention, code

#: Of the attention function, for transformers.
NAME = "nightgrid_apart"

_aten: Any = torch.ops.aten

#: Whether there is machine code for attention in fp32 here, once ``register`` has looked.
_in_code = False
#: How many threads of torch's one of it stands for, at least.
_THREADS_OF_TORCH = 4


def register(*, native: bool) -> str:
    """Make the function known to transformers under its name.

    Args:
        native: the device's work may be done by machine code that the node compiles.

    Returns:
        What computes it, for the row.
    """
    global _in_code
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    _in_code = False
    if not native:
        return "apart"
    found = code()
    if found.library is None:
        return f"apart, without machine code ({found.lacking})"
    by_torch, _in_code = _sample_results(), True
    if not all(map(near, _sample_results(), by_torch)):
        _in_code = False
        return "apart, without machine code (it computed something else)"
    return ", ".join(filter(None, ("apart", "in fp32 by machine code", found.compiled)))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Called by the model's layers; samples begin where ``position_ids`` [rows, positions] is 0.

    Args:
        module: the layer.
        query: [rows, heads, positions, width].
        key: as ``query``, with as many heads as the model keeps.
        value: as ``key``.
        attention_mask: none; positions say which sample a token is of.
        scaling: of the scores.
        dropout: of the weights.
        position_ids: handed through by the model.
        others: what else a model says, refused where it would change the result.

    Returns:
        [rows, positions, heads, width], and None for the weights.
    """
    if position_ids is None or attention_mask is not None:
        raise Unsupported("packed_attention apart: this model tells its attention no positions")
    refuse_unknown("packed_attention apart", others)
    rows, heads, positions, width = query.shape
    flat = [_in_one_row(tensor) for tensor in (query, key, value)]
    places = position_ids.expand(rows, -1).flatten()
    if query.device.type == "cpu" and not dropout and value.shape[3] == width:
        if torch.is_autocast_enabled("cpu"):  # knows torch's own operators only
            flat = [each.to(torch.get_autocast_dtype("cpu")) for each in flat]
        whole = _attended(*flat, places, width**-0.5 if scaling is None else scaling)[0]
    else:
        lengths = _lengths(places)
        found = [
            scaled_dot_product_attention(
                own_query,
                own_key,
                own_value,
                is_causal=True,
                scale=scaling,
                dropout_p=dropout,
                enable_gqa=heads != key.shape[1],
            )
            for own_query, own_key, own_value in zip(
                *(tensor.split(lengths, dim=2) for tensor in flat), strict=True
            )
        ]
        whole = torch.cat(found, dim=2).transpose(1, 2)
    return whole.reshape(rows, positions, heads, value.shape[3]), None


@torch.library.custom_op("nightgrid::attend_apart", mutates_args=())
def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [1, heads, positions, width] each, of which keys and values may have fewer heads: what is
    attended to, [1, positions, heads, width], and the logarithms of the scores' sums,
    [1, positions, heads]."""
    if ours := machine_code_for(query, key, value, places, scaling):
        return ours.forward(query, key, value)
    _, heads, positions, width = query.shape
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    attended = query.new_empty(1, positions, heads, width)
    sums = query.new_empty(1, positions, heads, dtype=torch.float32)
    with _in_fp32():
        for own in _samples(places):
            found = _aten._scaled_dot_product_flash_attention_for_cpu(
                *(each[:, :, own] for each in (query, key, value)), 0.0, True, scale=scaling
            )
            attended[:, own], sums[:, own] = (each.transpose(1, 2) for each in found)
    return attended, sums


@torch.library.custom_op("nightgrid::attend_apart_backward", mutates_args=())
def _attended_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    sums: torch.Tensor,
    places: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value."""
    of_inputs = tuple(
        each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key, value)
    )
    if ours := machine_code_for(query, key, value, places, scaling):
        ours.backward(gradient, query, key, value, attended, sums, of_inputs)
        return of_inputs  # type: ignore[return-value]
    by_heads = [each.transpose(1, 2) for each in (gradient, attended, sums)]
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    with _in_fp32():
        for own in _samples(places):
            of_output, output, own_sums = (each[:, :, own] for each in by_heads)
            found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_output,
                *(each[:, :, own] for each in (query, key, value)),
                *(output, own_sums, 0.0, True),
                scale=scaling,
            )
            for into, made in zip(of_inputs, found, strict=True):
                into[:, :, own] = made.unflatten(1, (into.shape[1], -1)).sum(2)
    return of_inputs  # type: ignore[return-value]


@_attended.register_fake
def _(query: Any, key: Any, value: Any, places: Any, scaling: float) -> Any:
    _, heads, positions, width = query.shape
    return (
        query.new_empty(1, positions, heads, width),
        query.new_empty(1, positions, heads, dtype=torch.float32),
    )


@_attended_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
    return tuple(
        each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key, value)
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors[:3], *output, tensors[3])


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    return (*_attended_backward(gradient, *ctx.saved_tensors, ctx.scaling), None, None)


_attended.register_autograd(_backward, setup_context=_remember)


def _sample_results() -> list[torch.Tensor]:
    """Attention of two samples and its gradients, as they are computed now."""
    numbers = torch.arange(1, 1 + 8 * 45 * 16).sin().view(1, 45, 8, 16).transpose(1, 2)
    heads, places = numbers.split((4, 2, 2), dim=1), torch.arange(45) % 40
    attended, sums = _attended(*heads, places, 0.25)
    return [attended, *_attended_backward(attended.cos(), *heads, attended, sums, places, 0.25)]


def machine_code_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    places: torch.Tensor,
    scaling: float,
) -> SampleAttention | None:
    """Machine code for these heads; None where there is none, or torch is faster: it shares out
    all heads of a sample among threads, ours the samples and the heads that are kept."""
    if not _in_code or any(each.dtype != torch.float32 for each in (query, key, value)):
        return None
    lengths, (heads, kept) = _lengths(places), (each.shape[1] for each in (query, key))
    pieces = len(lengths) * kept
    if _THREADS_OF_TORCH * pieces < min(heads, torch.get_num_threads()):
        return None
    return SampleAttention(lengths, scaling)


@contextlib.contextmanager
def _in_fp32() -> Iterator[None]:
    """Multiply exactly: where ``matmul_precision`` has oneDNN take bf16, its products of small
    tiles are several times slower than those in fp32."""
    products: Any = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9
    if products is None:
        yield
        return
    before, products.fp32_precision = products.fp32_precision, "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def _samples(places: torch.Tensor) -> Iterator[slice]:
    """The positions of each sample."""
    end = 0
    for length in _lengths(places):
        yield slice(end, end := end + length)


def _lengths(places: torch.Tensor) -> list[int]:
    """Tokens of each sample, row after row.

    Raises:
        Unsupported: the first of them is within a sample.
    """
    starts: list[int] = (places == 0).nonzero().flatten().tolist()
    if starts[:1] != [0]:
        raise Unsupported("packed_attention apart: positions do not begin with 0")
    ends = [*starts[1:], places.numel()]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, heads, positions, width] as [1, heads, rows * positions, width]."""
    return tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)
