# mypy: disable-error-code="no-untyped-def"
"""Several rows times a packed matrix, as a custom operator for torch.compile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workloads.engines.graph.kernels import KINDS, middle, raised
from workloads.engines.graph.layers import WORDS, Matrix


@triton.jit
def expand4(w_ptr, scale_ptr, out_ptr, words, BLOCK: tl.constexpr):
    """Unpack words to values, in column order."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    ws = tl.arange(0, BLOCK)
    known = start + ws < words
    w = tl.load(w_ptr + start + ws, mask=known, other=0)
    scale = 16.0 * tl.load(scale_ptr + start // 8 + ws // 8, mask=known, other=0.0)
    kind = out_ptr.dtype.element_ty
    even = tl.join(
        tl.join(_value(w, 0, scale, kind), _value(w, 4, scale, kind)),
        tl.join(_value(w, 2, scale, kind), _value(w, 6, scale, kind)),
    )
    odd = tl.join(
        tl.join(_value(w, 1, scale, kind), _value(w, 5, scale, kind)),
        tl.join(_value(w, 3, scale, kind), _value(w, 7, scale, kind)),
    )
    # Nibble b2 b1 b0 of a word is at [word, b2, b1, b0].
    parts = tl.join(even, odd).reshape(BLOCK // 4, 4, 8).permute(0, 2, 1)
    at = tl.arange(0, BLOCK * 8)
    tl.store(out_ptr + start * 8 + at, parts.reshape(BLOCK * 8), mask=start * 8 + at < words * 8)


@triton.jit
def _value(w, INDEX: tl.constexpr, scale, kind: tl.constexpr):
    return ((raised(w, INDEX) - middle(INDEX)) * scale).to(kind)


@triton.jit
def multiply_rows(
    x_ptr,  # [x_rows, COLUMNS], columns in the kernel's order
    w_ptr,
    scale_ptr,
    out_ptr,  # [SPLITS, x_rows, ROWS], float32
    x_rows,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of x's rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides COLUMNS: a mask would prevent vector loads
):
    """Several rows times a packed matrix, as partial sums over splits of the columns.

    The matrix is the left operand, whose blocks may be large; values are unpacked in registers."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    ms = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < ROWS
    kind = x_ptr.dtype.element_ty
    PART: tl.constexpr = (COLUMNS // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    begin = split * PART
    end = tl.minimum(begin + PART, COLUMNS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    long_rows = rows.to(tl.int64)[:, None]
    reach = True if ROWS % BLOCK_N == 0 else inside[:, None]
    there = (ms < x_rows)[None, :]
    if KIND == 3:
        WORDS: tl.constexpr = BLOCK_K // 8
        GROUPS: tl.constexpr = BLOCK_K // 64
        js = tl.arange(0, WORDS)
        gs = tl.arange(0, GROUPS)
        w_at = w_ptr + long_rows * (COLUMNS // 8) + js[None, :]
        s_at = scale_ptr + long_rows * (COLUMNS // 64) + gs[None, :]
        x_at = x_ptr + ms[None, :] * COLUMNS + js[:, None]
        for k0 in range(begin, end, BLOCK_K):
            w = tl.load(w_at + k0 // 8, mask=reach)
            scale = 16.0 * tl.load(s_at + k0 // 64, mask=reach)
            scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, 8))
            scale = scale.reshape(BLOCK_N, WORDS)
            for nibble in tl.static_range(8):
                x = tl.load(x_at + nibble * (COLUMNS // 8) + k0 // 8, mask=there, other=0.0)
                values = ((raised(w, nibble) - middle(nibble)) * scale).to(kind)
                total = tl.dot(values, x, total, input_precision="ieee")
    else:
        ks = tl.arange(0, BLOCK_K)
        for k0 in range(begin, end, BLOCK_K):
            w = tl.load(w_ptr + long_rows * COLUMNS + (k0 + ks)[None, :], mask=reach)
            x_at = x_ptr + ms[None, :] * COLUMNS + (k0 + ks)[:, None]
            x = tl.load(x_at, mask=there, other=0.0)
            total = tl.dot(w.to(kind), x, total, input_precision="ieee")
        total *= tl.load(scale_ptr + rows, mask=inside, other=0.0)[:, None]
    at = (split * x_rows + ms[None, :]) * ROWS + rows[:, None]
    tl.store(out_ptr + at, total, mask=inside[:, None] & (ms < x_rows)[None, :])


#: Blocks (matrix rows, columns, warps, stages) by format, the first whose columns divide the
#: matrix's; tuned on an H100 with ChatGLM3-6B. Tensor cores need at least 16 columns.
_IN_BYTES = ((64, 128, 4, 3), (64, 64, 4, 3), (64, 16, 4, 3))
BLOCKS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "int8": _IN_BYTES,
    "fp8": _IN_BYTES,
    "int4": ((64, 256, 4, 3), (128, 128, 4, 3)),
}
_PROGRAMS = 264  # enough to occupy a card


def block_for(kind: str, columns: int) -> tuple[int, int, int, int] | None:
    """The block for a matrix; None if none divides its columns."""
    return next((block for block in BLOCKS[kind] if columns % block[1] == 0), None)


def _layout(rows: int, columns: int, x_rows: int, kind: str) -> tuple[tuple[int, ...], int, int]:
    """The block, its rows of x, and the splits of the columns."""
    block = block_for(kind, columns)
    assert block is not None
    block_m = min(128, max(16, triton.next_power_of_2(x_rows)))
    programs = triton.cdiv(rows, block[0]) * triton.cdiv(x_rows, block_m)
    splits = 1
    while programs * splits < _PROGRAMS and columns // (2 * splits) >= 2 * block[1]:
        splits *= 2
    return block, block_m, splits


@torch.library.custom_op("nightgrid::packed_product", mutates_args=())
def packed_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, rows: int, kind: str
) -> torch.Tensor:
    """Partial products [splits, rows of x, rows], float32."""
    x = x.contiguous()
    x_rows, columns = x.shape
    (block_n, block_k, warps, stages), block_m, splits = _layout(rows, columns, x_rows, kind)
    out = x.new_empty((splits, x_rows, rows), dtype=torch.float32)
    multiply_rows[triton.cdiv(rows, block_n), splits, triton.cdiv(x_rows, block_m)](
        x,
        values,
        scales,
        out,
        x_rows,
        ROWS=rows,
        COLUMNS=columns,
        KIND=KINDS[kind],
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@packed_product.register_fake
def _(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, rows: int, kind: str
) -> torch.Tensor:
    _, _, splits = _layout(rows, x.shape[1], x.shape[0], kind)
    return x.new_empty((splits, x.shape[0], rows), dtype=torch.float32)


def expanded(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Many rows times a matrix of any format, unpacked to memory first."""
    if matrix.kind != "int4":
        weight = _plain(matrix, x.dtype) if matrix.kind else matrix.values
        return torch.nn.functional.linear(x, weight, matrix.bias)
    out = torch.empty((matrix.rows, matrix.columns), dtype=x.dtype, device=x.device)
    words = matrix.values.numel()
    expand4[(triton.cdiv(words, 1024),)](
        matrix.values, matrix.scales, out, words, BLOCK=1024, num_warps=4
    )
    return torch.nn.functional.linear(x, out, matrix.bias)


#: Fused into one pass over the matrix.
_plain = torch.compile(Matrix.plain, dynamic=False)


def product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Rows times a matrix of any format, with its bias."""
    if not matrix.kind or block_for(matrix.kind, matrix.columns) is None:
        return expanded(x, matrix)
    assert matrix.scales is not None
    if matrix.kind == "fp8":
        x = x.unflatten(-1, (-1, 4, WORDS)).transpose(-2, -1).flatten(-3)
    elif matrix.kind == "int4":
        x = x.unflatten(-1, (-1, 8, WORDS)).transpose(-3, -2).flatten(-3)
    parts = packed_product(x, matrix.values, matrix.scales, matrix.rows, matrix.kind)
    found = parts.sum(dim=0)
    if matrix.bias is not None:
        found = found + matrix.bias
    return found.to(x.dtype)
