"""Several rows times a packed matrix, as an operation that torch.compile leaves as it is."""

from __future__ import annotations

import torch
import triton

from workloads.decoding import kernels
from workloads.decoding.packing import Matrix

#: Rows and columns of the matrix in a block, warps and stages, by format. Measured on an H100.
BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "int8": (64, 128, 4, 4),
    "fp8": (64, 128, 4, 4),
    "int4": (64, 256, 4, 3),
}
#: Up to so many rows 4 bits are multiplied without matrix units; the same for that kernel.
FEW_ROWS = 8
FEW_BLOCK = (2, 2048, 2)
#: Programs that keep all of a card's processors at work.
_PROGRAMS = 264


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
    if kind == "int4" and x.shape[0] <= FEW_ROWS:
        return _few(x, values, scales, rows)
    block_n, block_k, warps, stages = BLOCKS[kind]
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


def _few(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, rows: int
) -> torch.Tensor:
    block_n, block_k, warps = FEW_BLOCK
    out = torch.empty((1, x.shape[0], rows), dtype=torch.float32, device=x.device)
    kernels.multiply4_few[(triton.cdiv(rows, block_n),)](
        x,
        values,
        scales,
        out,
        x.shape[0],
        ROWS=rows,
        COLUMNS=x.shape[1],
        BLOCK_M=triton.next_power_of_2(x.shape[0]),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
    )
    return out


@packed_product.register_fake
def _(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, rows: int, kind: str
) -> torch.Tensor:
    block_n, block_k, _, _ = BLOCKS[kind]
    block_m = min(128, max(16, triton.next_power_of_2(x.shape[0])))
    splits = splits_for(rows, x.shape[1], block_n, block_k, triton.cdiv(x.shape[0], block_m))
    if kind == "int4" and x.shape[0] <= FEW_ROWS:
        splits = 1
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
    parts = packed_product(x, matrix.values, matrix.scales, matrix.rows, matrix.kind)
    found = parts.sum(dim=0)
    if matrix.bias is not None:
        found = found + matrix.bias
    return found.to(x.dtype)
