"""A step of a single row as Triton kernels on the slots' tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from workloads.engines.graph import kernels
from workloads.engines.graph.kernels import KINDS
from workloads.engines.graph.layers import Decoder, Matrix

if TYPE_CHECKING:
    from workloads.engines.graph.decoder import Slots

_WIDE = 8192  # columns from which a matrix is wide
#: (format, gated, wide) -> (rows, columns, warps, registers per thread); tuned on an H100 with
#: ChatGLM3-6B.
BLOCKS: dict[tuple[str, bool, bool], tuple[int, int, int, int | None]] = {
    ("", False, False): (2, 2048, 8, None),
    ("", False, True): (4, 2048, 8, None),
    ("", True, False): (2, 1024, 4, None),
    ("int8", False, False): (4, 1024, 4, None),
    ("int8", False, True): (4, 1024, 4, None),
    ("int8", True, False): (2, 2048, 8, None),
    ("fp8", False, False): (4, 2048, 4, None),
    ("fp8", False, True): (4, 2048, 4, None),
    ("fp8", True, False): (4, 4096, 8, None),
    ("int4", False, False): (8, 4096, 4, None),
    ("int4", False, True): (4, 2048, 2, 128),
    ("int4", True, False): (8, 4096, 4, None),
}


def block_for(matrix: Matrix, gated: bool) -> tuple[int, int, int, int | None]:
    """The block of a matrix; gated ones use the narrow block."""
    return BLOCKS[matrix.kind, gated, matrix.columns >= _WIDE and not gated]


_SPLITS = 16  # most programs that share attention's positions
_BLOCK_T = 32  # positions of a block


class SingleRow:
    """A callable that does one step."""

    def __init__(
        self, decoder: Decoder, state: Slots, *, pad: int, length: int, early: bool
    ) -> None:
        self._decoder = decoder
        self._state = state
        self._pad = pad
        self._early = early
        self._splits = min(_SPLITS, triton.cdiv(length, _BLOCK_T))
        blocks = triton.cdiv(length, _BLOCK_T * self._splits)
        self._length = blocks * _BLOCK_T  # of a split
        layer = decoder.layers[0]
        card, dtype = decoder.embedding.device, decoder.dtype

        def row(size: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(size, dtype=kind, device=card)

        self._qkv = row(layer.qkv.rows)
        self._attended = row(layer.out.columns)
        self._gated = row(layer.down.columns)
        self._arrived = torch.zeros(decoder.kv_heads, dtype=torch.int32, device=card)
        self._partial = row(decoder.heads * self._splits * (decoder.width + 2), torch.float32)

    def __call__(self) -> None:
        decoder, state = self._decoder, self._state
        hidden = state.hidden
        for layer, keys, values in zip(decoder.layers, state.keys, state.values, strict=True):
            self._multiply(hidden, layer.qkv, self._qkv, gain=layer.before)
            self._attend(layer.q_gain, layer.k_gain, keys, values)
            self._multiply(self._attended, layer.out, hidden, residual=hidden)
            self._multiply(hidden, layer.gate_up, self._gated, gain=layer.between, gated=True)
            self._multiply(self._gated, layer.down, hidden, residual=hidden)
        self._multiply(hidden, decoder.head, state.logits, gain=decoder.norm)
        self._launch(
            kernels.choose,
            (state.rows,),
            state.logits,
            state.token,
            state.position,
            state.done,
            state.cursor,
            state.chosen,
            state.ends,
            decoder.embedding,
            hidden,
            self._pad,
            state.capacity - 1,
            ROWS=state.chosen.shape[1],
            ENDS=state.ends.numel(),
            VOCABULARY=decoder.head.rows,
            HIDDEN=decoder.embedding.shape[1],
            BLOCK=16384,
            num_warps=32,
        )

    def _multiply(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        out: torch.Tensor,
        *,
        gain: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        block_n, block_k, warps, registers = block_for(matrix, gated)
        rows = matrix.rows // 2 if gated else matrix.rows
        words = matrix.kind in ("fp8", "int4")
        self._launch(
            kernels.multiply_words if words else kernels.multiply,
            (triton.cdiv(rows, block_n),),
            x,
            matrix.values.view(torch.int32) if words else matrix.values,
            matrix.scales,
            matrix.bias,
            residual,
            gain,
            out,
            self._decoder.eps,
            ROWS=rows,
            COLUMNS=matrix.columns,
            KIND=KINDS[matrix.kind],
            NORM=gain is not None,
            GATED=gated,
            BIAS=matrix.bias is not None,
            RESIDUAL=residual is not None,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            maxnreg=registers,
        )

    def _attend(
        self,
        q_gain: torch.Tensor | None,
        k_gain: torch.Tensor | None,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        decoder, state = self._decoder, self._state
        block_d = triton.next_power_of_2(decoder.width)
        self._launch(
            kernels.attend,
            (state.rows, decoder.kv_heads, self._splits),
            self._qkv,
            decoder.cos,
            decoder.sin,
            state.position,
            q_gain,
            k_gain,
            keys,
            values,
            self._attended,
            self._partial,
            self._arrived,
            decoder.eps,
            decoder.scaling,
            HEADS=decoder.heads,
            KV_HEADS=decoder.kv_heads,
            WIDTH=decoder.width,
            ROTARY=decoder.rotary,
            PAIRS=decoder.pairs,
            HEAD_NORM=q_gain is not None,
            CAPACITY=state.capacity,
            SPLITS=self._splits,
            LENGTH=self._length,
            BLOCK_G=max(16, triton.next_power_of_2(decoder.group)),
            BLOCK_D=max(16, block_d),
            BLOCK_T=_BLOCK_T,
            num_warps=4,
            num_stages=2,
        )

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        if self._early:
            named["launch_pdl"] = True
        kernel[grid](*given, EARLY=self._early, **named)
