"""Causal attention of packed samples by machine code of our own, for training on a CPU in fp32.

Torch's attention multiplies small tiles one by one, which for samples of a few hundred positions
leaves most of a processor idle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from workloads.native_code import SOURCES, NativeCode, vector_code

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
    return vector_code(_SOURCE)


class SampleAttention:
    """Attention of samples that lie one behind the other.

    Args:
        lengths: positions of each sample.
        scaling: of the scores.
    """

    def __init__(self, lengths: Sequence[int], scaling: float) -> None:
        firsts = [0, *accumulate(lengths)]
        # The longest first: what is left over at the end is then short.
        order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
        self._firsts = torch.tensor([firsts[sample] for sample in order])
        self._lengths = torch.tensor([lengths[sample] for sample in order])
        self._scaling = scaling
        self._library: Any = code().library

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to each sample, and find the logarithms of the scores' sums.

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
        self._run("attend", [query, key, value], sums, [attended.transpose(1, 2)])
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
        read = [query, key, value, gradient.transpose(1, 2), attended.transpose(1, 2)]
        self._run("attend_backward", read, sums.contiguous(), into)

    def _run(
        self,
        name: str,
        read: Sequence[torch.Tensor],
        sums: torch.Tensor,
        written: Sequence[torch.Tensor],
    ) -> None:
        """Call the machine code with heads that are read, query and key first, and written."""
        query, key = read[:2]
        samples = _Samples(
            *(self._firsts.data_ptr(), self._lengths.data_ptr(), len(self._lengths)),
            *(query.shape[1], key.shape[1], query.shape[3], torch.get_num_threads()),
            self._scaling,
        )
        # In a variable until the call is over: heads that had to be copied.
        read = [each if each.stride(3) == 1 else each.contiguous() for each in read]
        if getattr(self._library, name)(
            ctypes.byref(samples),
            *map(_heads, read),
            _pointer(sums.data_ptr()),
            *map(_heads, written),
        ):
            raise MemoryError(f"no memory for attention of {query.shape[2]} positions")


def _heads(of: torch.Tensor) -> Any:
    return ctypes.byref(_Heads(of.data_ptr(), of.stride(1), of.stride(2)))
