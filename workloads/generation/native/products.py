"""Products by machine code of our own: weights in panels of 32 outputs, input by input.

fp32 and bf16 multiply by vectors in fp32; of bf16 memory has half. Where the processor adds the
products of two pairs in bf16 as fast as one in fp32, it multiplies those, twice as fast. int8
multiplies bytes, with a scale for each row of activations and each output. On a processor with
tiles for bf16 and int8 (AMX) oneDNN's products are faster than vectors, and these two formats are
left to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from workloads.generation.packed_products import is_int8, is_plain, joined_biases
from workloads.native_code import SOURCES, NativeCode, vector_code

_SOURCE = SOURCES / "decoder_layer.cpp"
#: Outputs of a panel, and of a gate and what it is multiplied by, of which each panel has one half.
PANEL, HALF = 32, 16
#: Most inputs of a product in int8, whose sums have 32 bits: each input adds at most 255 * 128.
MOST_INT8_INPUTS = 1 << 16
#: Formats by their number in the source.
FORMATS = ("fp32", "bf16", "int8")
#: Inputs of an output that lie side by side in a panel, where that is more than one.
_TOGETHER = {"bf16_pairs": 2, "int8": 4}
_OF = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Weights(ctypes.Structure):
    """As in the source."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("panels", "scales", "offsets", "bias")]


def code() -> NativeCode:
    """Our machine code for this node; compiles it where need be."""
    return vector_code(_SOURCE)


def lacking(name: str) -> str:
    """The reason why this node's products in a format are not ours; empty where they are: there,
    and faster than oneDNN's.

    Nothing is compiled for a format that is left to oneDNN. A compiler that is older than the
    processor does not know of its tiles, but torch does.
    """
    if name != "fp32" and torch.cpu.get_capabilities().get("amx_tile"):
        return f"{name} is left to oneDNN, which has this processor's tiles"
    found = code()
    if found.library is None:
        return found.lacking
    return "" if found.library.computes(FORMATS.index(name)) else f"no instructions for {name} here"


def computes(name: str) -> bool:
    """Tell if this node's products in a format are ours."""
    return not lacking(name)


def by_pairs(linear: Sequence[torch.nn.Linear]) -> bool:
    """Tell if these layers' bf16 is multiplied by pairs of inputs: where the instruction for it is
    fast, which its name does not say, so that it is timed once in a process."""
    library = code().library
    even = all(each.in_features % 2 == 0 for each in linear)
    return even and library is not None and bool(library.pairs_are_fast())


def kept_in(linear: Sequence[torch.nn.Linear]) -> str | None:
    """The format in which these layers keep their weights; None if it is none of ``FORMATS``."""
    if all(map(is_int8, linear)):
        return "int8"
    return _OF.get(linear[0].weight.dtype) if all(map(is_plain, linear)) else None


def format_of(linear: Sequence[torch.nn.Linear]) -> str | None:
    """The format in which these layers multiply, if this machine code has it; else None."""
    name = kept_in(linear)
    return name if name is not None and computes(name) and sums_fit(name, linear) else None


def sums_fit(name: str, linear: Sequence[torch.nn.Linear]) -> bool:
    """Tell if these layers' products in a format cannot overflow."""
    return name != "int8" or all(each.in_features <= MOST_INT8_INPUTS for each in linear)


class NativeLinear:
    """Stands in for linear layers that read the same inputs, one after the other.

    Args:
        linear: plain ones, or of torchao's int8; their outputs together are panels.
        in_turns: half a panel of the first and half a panel of the second, in turns.
    """

    def __init__(self, linear: Sequence[torch.nn.Linear], *, in_turns: bool = False) -> None:
        found = format_of(linear)
        assert found is not None
        self.format = found
        #: Of inputs and outputs.
        self.dtype = torch.float32 if found == "fp32" else torch.bfloat16
        #: Name of the product in the source.
        self.kernel = "bf16_pairs" if found == "bf16" and by_pairs(linear) else found
        self._linear = getattr(code().library, f"linear_{self.kernel}")
        self.in_features = linear[0].in_features
        self.out_features = sum(each.out_features for each in linear)
        weights: list[Any] = [each.weight.detach() for each in linear]

        def ordered(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            if not in_turns:
                return torch.cat(list(parts))
            (both,) = parts if len(parts) == 1 else (torch.cat(list(parts)),)
            halves = both.view(2, -1, HALF, *both.shape[1:])
            return halves.transpose(0, 1).reshape(both.shape)

        numbers = ordered([each.qdata if found == "int8" else each for each in weights])
        together = _TOGETHER.get(self.kernel, 1)
        shape = self.out_features // PANEL, PANEL, self.in_features // together, together
        scales = offsets = bias = None
        if found == "int8":
            scales = ordered([each.scale.flatten().float() for each in weights])
            offsets = numbers.sum(1, dtype=torch.int32) * 128
        if (biases := joined_biases(linear)) is not None:
            bias = ordered([biases.float()])
        panels = numbers.view(shape).transpose(1, 2)
        if self.kernel == "bf16":  # a number of each half in 32 bits
            panels = panels.unflatten(2, (2, HALF)).transpose(2, 3)
        panels = panels.contiguous()
        self.panels = panels
        self._held = panels, scales, offsets, bias
        self.weights = Weights(*(None if t is None else t.data_ptr() for t in self._held))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The product of inputs [..., in]: [..., out], in their format.

        Raises:
            TypeError: the inputs have another format.
            MemoryError: there is none for what lies between.
        """
        if inputs.dtype != self.dtype:
            raise TypeError(f"inputs in {inputs.dtype} for a product that takes {self.dtype}")
        inputs = inputs.contiguous()
        found = inputs.new_empty((*inputs.shape[:-1], self.out_features))
        rows = found.numel() // self.out_features
        if self._linear(
            ctypes.byref(self.weights),
            *(rows, self.in_features, self.out_features, torch.get_num_threads()),
            *(ctypes.c_void_p(each.data_ptr()) for each in (inputs, found)),
        ):
            raise MemoryError(f"no memory for a product of {rows} rows")
        return found

    def plus(self, inputs: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The product, each number of it plus one of ``summands``."""
        return self(inputs).add_(summands)


def greatest(rows: torch.Tensor) -> torch.Tensor | None:
    """The first of the greatest numbers of each row, as ``argmax``; None where there is no machine
    code for such rows [rows, numbers]."""
    name = {torch.float32: "greatest_fp32", torch.bfloat16: "greatest_bf16"}.get(rows.dtype)
    library = code().library
    if name is None or library is None or rows.device.type != "cpu" or not rows.is_contiguous():
        return None
    found = torch.empty(len(rows), dtype=torch.int64)
    getattr(library, name)(
        ctypes.c_void_p(rows.data_ptr()),
        *(len(rows), ctypes.c_int64(rows.shape[1]), torch.get_num_threads()),
        ctypes.c_void_p(found.data_ptr()),
    )
    return found


class NativeHead(torch.nn.Module):
    """Stands in for an output layer whose matrix is the embeddings', too; which ``embedding``
    reads from the panels.

    Args:
        linear: plain, without a bias.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product = NativeLinear([linear])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._product(inputs)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The matrix's rows of these ids: [..., in].

        Raises:
            IndexError: an id is below 0 or beyond the last row.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"ids from {ids.min()} to {ids.max()} of {self.out_features} rows")
        panels = self._product.panels
        outputs = torch.arange(PANEL)
        if self._product.kernel == "bf16":
            outputs = outputs % HALF * 2 + outputs // HALF  # where each lies in a panel
            panels = panels.flatten(2)[..., None]
        # [panels, groups of inputs, outputs, inputs of a group]
        return panels[ids // PANEL, :, outputs[ids % PANEL]].flatten(-2)


class NativeEmbedding(torch.nn.Module):
    """Stands in for the embeddings whose matrix an output layer has in panels."""

    def __init__(self, head: NativeHead) -> None:
        super().__init__()
        self._head = [head]  # which is a module of the model's already

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._head[0].rows(ids)


class NativeGated:
    """A gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, gates: Sequence[torch.nn.Linear], down: torch.nn.Linear) -> None:
        self.gates, self.down = NativeLinear(gates, in_turns=True), NativeLinear([down])

    def plus(self, inputs: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The layer's output plus ``summands``."""
        gate, up = self.gates(inputs).unflatten(-1, (-1, 2, HALF)).unbind(-2)
        gated = torch.nn.functional.silu(gate) * up
        return self.down.plus(gated.flatten(-2), summands)
