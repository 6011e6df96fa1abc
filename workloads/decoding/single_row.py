"""A step of a single row as Triton kernels on the slots' tensors; see ``kernels``."""

from __future__ import annotations

from typing import Any

import torch
import triton

from workloads.decoding import kernels
from workloads.decoding.description import Decoder
from workloads.decoding.packing import Matrix
from workloads.decoding.slots import Slots

#: Rows and columns of a program's block and its warps, by format and by whether a gate is taken.
#: Measured on an H100 with ChatGLM3-6B.
BLOCKS: dict[tuple[str, bool], tuple[int, int, int]] = {
    ("", False): (4, 1024, 4),
    ("", True): (4, 1024, 4),
    ("int8", False): (8, 1024, 4),
    ("int8", True): (4, 1024, 4),
    ("fp8", False): (8, 1024, 4),
    ("fp8", True): (4, 1024, 4),
    ("int4", False): (8, 2048, 2),
    ("int4", True): (8, 2048, 2),
}
#: Positions of a block of attention, and those up to which it is not split.
_BLOCK_T = 64
_WHOLE = 256


class SingleRow:
    """Called, it does one step."""

    def __init__(
        self, decoder: Decoder, state: Slots, *, pad: int, length: int, early: bool
    ) -> None:
        self._decoder = decoder
        self._state = state
        self._pad = pad
        self._early = early
        self._splits = max(1, triton.next_power_of_2(length) // _WHOLE)
        layer = decoder.layers[0]
        card, dtype = decoder.embedding.device, decoder.dtype

        def row(size: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(size, dtype=kind, device=card)

        self._qkv = row(layer.qkv.rows)
        self._attended = row(layer.out.columns)
        self._gated = row(layer.down.columns)
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
            BLOCK=8192,
            num_warps=16,
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
        block_n, block_k, warps = BLOCKS[matrix.kind, gated]
        rows = matrix.rows // 2 if gated else matrix.rows
        self._launch(
            kernels.multiply4 if matrix.kind == "int4" else kernels.multiply,
            (triton.cdiv(rows, block_n),),
            x,
            matrix.values,
            matrix.scales,
            matrix.bias,
            residual,
            gain,
            out,
            self._decoder.eps,
            ROWS=rows,
            COLUMNS=matrix.columns,
            KIND=kernels.KINDS[matrix.kind],
            NORM=gain is not None,
            GATED=gated,
            BIAS=matrix.bias is not None,
            RESIDUAL=residual is not None,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
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
            BLOCK_G=max(16, triton.next_power_of_2(decoder.group)),
            BLOCK_D=max(16, block_d),
            BLOCK_T=_BLOCK_T,
            num_warps=4,
            num_stages=2,
        )
        if self._splits > 1:
            self._launch(
                kernels.join,
                (decoder.heads,),
                self._partial,
                self._attended,
                WIDTH=decoder.width,
                SPLITS=self._splits,
                BLOCK_D=block_d,
                num_warps=4,
            )

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        if self._early:
            named["launch_pdl"] = True
        kernel[grid](*given, EARLY=self._early, **named)
