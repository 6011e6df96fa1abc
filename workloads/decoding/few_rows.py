"""Several rows times a packed matrix, as an operation that torch.compile leaves as it is."""

from __future__ import annotations

import torch
import triton

from workloads.decoding.kernels import KINDS, many_rows
from workloads.decoding.packing import WORDS, Matrix

#: Rows and columns of the matrix in a block, warps and stages, by format: of these the first of
#: which whole blocks cover the matrix's columns. Measured on an H100 with ChatGLM3-6B.
_IN_BYTES = ((64, 128, 4, 3), (64, 64, 4, 3), (64, 16, 4, 3))
BLOCKS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "int8": _IN_BYTES,
    "fp8": _IN_BYTES,
    "int4": ((64, 256, 4, 3), (128, 128, 4, 3), (64, 64, 4, 3)),
}
#: Programs that keep all of a card's processors at work.
_PROGRAMS = 264


def block_for(kind: str, columns: int) -> tuple[int, int, int, int] | None:
    """The block for a matrix of so many columns; None where there is none."""
    return next((block for block in BLOCKS[kind] if columns % block[1] == 0), None)


def splits_for(rows: int, columns: int, block_n: int, block_k: int, tiles: int) -> int:
    """Into how many parts the columns are cut."""
    splits = 1
    programs = -(-rows // block_n) * tiles
    while programs * splits < _PROGRAMS and columns // (2 * splits) >= 2 * block_k:
        splits *= 2
    return splits


def _layout(rows: int, columns: int, x_rows: int, kind: str) -> tuple[tuple[int, ...], int, int]:
    """The block, the rows of x in it, and the parts of the columns."""
    block = block_for(kind, columns)
    assert block is not None
    block_m = min(128, max(16, triton.next_power_of_2(x_rows)))
    return block, block_m, splits_for(rows, columns, block[0], block[1], -(-x_rows // block_m))


@torch.library.custom_op("nightgrid::packed_product", mutates_args=())
def packed_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, rows: int, kind: str
) -> torch.Tensor:
    """Parts of the product [parts, rows of x, rows], float32."""
    x = x.contiguous()
    x_rows, columns = x.shape
    (block_n, block_k, warps, stages), block_m, splits = _layout(rows, columns, x_rows, kind)
    out = x.new_empty((splits, x_rows, rows), dtype=torch.float32)
    many_rows.multiply_rows[triton.cdiv(rows, block_n), splits, triton.cdiv(x_rows, block_m)](
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
    """Many rows times a matrix of any format, whose values are written out for this product."""
    if not matrix.kind:
        return torch.nn.functional.linear(x, matrix.values, matrix.bias)
    if matrix.kind != "int4":
        return torch.nn.functional.linear(x, _plain(matrix, x.dtype), matrix.bias)
    out = torch.empty((matrix.rows, matrix.columns), dtype=x.dtype, device=x.device)
    words = matrix.values.numel()
    many_rows.expand4[(triton.cdiv(words, 1024),)](
        matrix.values, matrix.scales, out, words, BLOCK=1024, num_warps=4
    )
    return torch.nn.functional.linear(x, out, matrix.bias)


#: One kernel, where torch would pass over the matrix several times.
_plain = torch.compile(Matrix.plain, dynamic=False)


def product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Rows times a matrix of any format, with its bias."""
    if not matrix.kind:
        return torch.nn.functional.linear(x, matrix.values, matrix.bias)
    if block_for(matrix.kind, matrix.columns) is None:
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
