"""Causal attention of packed samples by machine code of our own, for training on a CPU in fp32.

Torch's attention multiplies small tiles one by one, which for samples of a few hundred positions
leaves most of a processor idle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from workloads.native_code import SOURCES, NativeCode, native_code

_SOURCE = SOURCES / "sample_attention.cpp"
_int, _long, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Heads(ctypes.Structure):
    _fields_ = [("at", _pointer), ("head", _long), ("position", _long)]


class _Samples(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("firsts", "lengths")),
        *((name, _int) for name in ("count", "heads", "kept", "width", "threads")),
        ("scaling", ctypes.c_float),
    ]


def code() -> NativeCode:
    """The machine code for this node; compiles it where need be."""
    if not torch.cpu.get_capabilities().get("avx512_f"):
        return NativeCode(lacking="this processor has no AVX-512")
    return native_code(_SOURCE)


class SampleAttention:
    """Attention of samples that lie one behind the other.

    Args:
        lengths: positions of each sample.
        scaling: of the scores.
    """

    def __init__(self, lengths: Sequence[int], scaling: float) -> None:
        ends = torch.tensor(lengths).cumsum(0)
        firsts = ends - torch.tensor(lengths)
        # The longest first: what is left over at the end is then short.
        order = torch.tensor(lengths).argsort(descending=True)
        self._firsts, self._lengths = firsts[order], torch.tensor(lengths)[order]
        self._scaling = scaling
        self._library: Any = code().library

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is attended to, and the logarithms of the scores' sums.

        Args:
            query: [1, heads, positions, width] in fp32.
            key: as ``query``, with as many heads as the model keeps.
            value: as ``key``.

        Returns:
            [1, positions, heads, width] and [1, positions, heads].

        Raises:
            MemoryError: there is none for what lies between.
        """
        _, heads, positions, width = query.shape
        attended = query.new_empty(1, positions, heads, width)
        sums = query.new_empty(1, positions, heads)
        self._run("attend", query, key, [query, key, value], [attended.transpose(1, 2), sums])
        return attended, sums

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attended: torch.Tensor,
        sums: torch.Tensor,
        into: Sequence[torch.Tensor],
    ) -> None:
        """Put the gradients of query, key and value ``into`` tensors like them.

        Args:
            gradient: of what was attended to.
            query: as in ``forward``.
            key: likewise.
            value: likewise.
            attended: what ``forward`` gave.
            sums: likewise.
            into: [1, heads or kept heads, positions, width] each.

        Raises:
            MemoryError: there is none for what lies between.
        """
        read = [gradient.transpose(1, 2), query, key, value, attended.transpose(1, 2)]
        self._run("attend_backward", query, key, read, [sums, *into])

    def _run(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        read: Sequence[torch.Tensor],
        more: Sequence[torch.Tensor],
    ) -> None:
        """Call the machine code with heads that are read, and further arguments."""
        samples = _Samples(
            *(self._firsts.data_ptr(), self._lengths.data_ptr(), len(self._lengths)),
            *(query.shape[1], key.shape[1], query.shape[3], torch.get_num_threads()),
            self._scaling,
        )
        # Kept until the call is over: heads that had to be copied.
        read = [each if each.stride(3) == 1 else each.contiguous() for each in read]
        given = [
            ctypes.byref(_Heads(each.data_ptr(), each.stride(1), each.stride(2)))
            if each.dim() == 4
            else _pointer(each.data_ptr())
            for each in (*read, *more)
        ]
        if getattr(self._library, name)(ctypes.byref(samples), *given):
            raise MemoryError(f"no memory for attention of {query.shape[2]} positions")
