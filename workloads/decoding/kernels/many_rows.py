# mypy: disable-error-code="no-untyped-def"
"""A packed matrix times several rows, and its values written out."""

from __future__ import annotations

import triton
import triton.language as tl

from workloads.decoding.kernels.numbers import middle, raised


@triton.jit
def expand4(w_ptr, scale_ptr, out_ptr, words, BLOCK: tl.constexpr):
    """The values of packed words, in the order of columns."""
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
    # Nibble b2 b1 b0 of a word stands at [word, b2, b1, b0].
    parts = tl.join(even, odd).reshape(BLOCK // 4, 4, 8).permute(0, 2, 1)
    at = tl.arange(0, BLOCK * 8)
    tl.store(out_ptr + start * 8 + at, parts.reshape(BLOCK * 8), mask=start * 8 + at < words * 8)


@triton.jit
def _value(w, INDEX: tl.constexpr, scale, kind: tl.constexpr):
    return ((raised(w, INDEX) - middle(INDEX)) * scale).to(kind)


@triton.jit
def multiply_rows(
    x_ptr,  # [x_rows, COLUMNS], columns in the order in which the kernel meets them
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
    BLOCK_K: tl.constexpr,  # a divisor of COLUMNS: a mask would make its loads single numbers
):
    """Several rows times a packed matrix; each program takes a part of the columns, and the
    parts are yet to be added.

    The matrix stands at the left of the product, where blocks may be large, and the few rows at
    its right. Values become the rows' type in registers."""
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
