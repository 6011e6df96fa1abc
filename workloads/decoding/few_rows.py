"""Several rows times a packed matrix, as an operation that torch.compile leaves as it is."""

from __future__ import annotations

import torch
import triton

from workloads.decoding import kernels
from workloads.decoding.packing import WORDS, Matrix

#: Rows and columns of the matrix in a block, warps and stages, by format. Measured on an H100.
BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "int8": (64, 128, 4, 3),
    "fp8": (64, 128, 4, 3),
    "int4": (128, 256, 8, 2),
}
#: Programs that keep all of a card's processors at work.
_PROGRAMS = 264


def block_for(kind: str, columns: int) -> tuple[int, int, int, int]:
    """The block for a matrix of so many columns, which whole blocks must cover."""
    block_n, block_k, warps, stages = BLOCKS[kind]
    while columns % block_k:
        block_k //= 2
    return block_n, block_k, warps, stages


def splits_for(rows: int, columns: int, block_n: int, block_k: int, tiles: int) -> int:
    """Into how many parts the columns are cut."""
    splits = 1
    programs = -(-rows // block_n) * tiles
    while programs * splits < _PROGRAMS and columns // (2 * splits) >= 2 * block_k:
        splits *= 2
    return splits


@torch.library.custom_op("nightgrid::packed_product", mutates_args=())
def packed_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, rows: int, kind: str
) -> torch.Tensor:
    """Parts of the product [parts, rows of x, rows], float32."""
    columns = x.shape[-1]
    x = x.contiguous()
    block_n, block_k, warps, stages = block_for(kind, columns)
    block_m = min(128, max(16, triton.next_power_of_2(x.shape[0])))
    tiles = triton.cdiv(x.shape[0], block_m)
    splits = splits_for(rows, columns, block_n, block_k, tiles)
    out = torch.empty((splits, x.shape[0], rows), dtype=torch.float32, device=x.device)
    kernels.multiply_rows[triton.cdiv(rows, block_n), splits, tiles](
        x,
        values,
        scales,
        out,
        x.shape[0],
        ROWS=rows,
        COLUMNS=columns,
        KIND=kernels.KINDS[kind],
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
    block_n, block_k, _, _ = block_for(kind, x.shape[1])
    block_m = min(128, max(16, triton.next_power_of_2(x.shape[0])))
    splits = splits_for(rows, x.shape[1], block_n, block_k, triton.cdiv(x.shape[0], block_m))
    return x.new_empty((splits, x.shape[0], rows), dtype=torch.float32)


def expanded(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Many rows times a matrix of any format, whose values are written out for this product."""
    if not matrix.kind:
        return torch.nn.functional.linear(x, matrix.values, matrix.bias)
    if matrix.kind != "int4":
        return torch.nn.functional.linear(x, _plain(matrix, x.dtype), matrix.bias)
    out = torch.empty((matrix.rows, matrix.columns), dtype=x.dtype, device=x.device)
    words = matrix.values.numel()
    kernels.expand4[(triton.cdiv(words, 1024),)](
        matrix.values, matrix.scales, out, words, BLOCK=1024, num_warps=4
    )
    return torch.nn.functional.linear(x, out, matrix.bias)


#: One kernel, where torch would pass over the matrix several times.
_plain = torch.compile(Matrix.plain, dynamic=False)


def product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Rows times a matrix of any format, with its bias."""
    if not matrix.kind:
        return torch.nn.functional.linear(x, matrix.values, matrix.bias)
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
