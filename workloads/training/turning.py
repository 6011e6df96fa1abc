"""Rotary embeddings by a kernel, in the attention layers of one model.

Attention layers of transformers call a function of their module by its name, which is the same for
all models of a kind. One layer gets a copy of its ``forward`` whose globals have another function
of that name; the module and the class stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from workloads.training.kernels import Pair, near, sample, turned_halves, turned_pairs

#: The function by which attention layers turn queries and keys.
_TURN = "apply_rotary_pos_emb"


def turned_width(model: torch.nn.Module) -> int | None:
    """Elements of a head that a model turns; None: none, or not the same number everywhere."""
    found = {
        2 * frequencies.numel()
        for module in model.modules()
        if isinstance(frequencies := getattr(module, "inv_freq", None), torch.Tensor)
    }
    return found.pop() if len(found) == 1 else None


def forward_by(
    module: torch.nn.Module, turned: int, kernel: Callable[..., Pair]
) -> FunctionType | None:
    """The ``forward`` of an attention layer's class with queries and keys turned by a kernel.

    Args:
        module: a layer.
        turned: elements of a head that are turned.
        kernel: as ``Kernels.turn``.

    Returns:
        A function of the layer and its arguments; None where the module turns nothing, or does so
        in a way of its own.
    """
    forward, head = type(module).forward, getattr(module, "head_dim", None)
    if not isinstance(forward, FunctionType) or _TURN not in forward.__code__.co_names:
        return None
    plain: Any = forward.__globals__.get(_TURN)
    found = _by(kernel, plain, head, turned) if isinstance(head, int) else None
    if found is None:
        return None
    turn = found

    def ours(*tensors: torch.Tensor, **more: Any) -> Any:
        if len(tensors) != 4 or more:
            return plain(*tensors, **more)
        return turn(*tensors)

    copy = FunctionType(
        forward.__code__,
        {**forward.__globals__, _TURN: ours},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _by(
    kernel: Callable[..., Pair], plain: Any, head: int, turned: int
) -> Callable[..., Pair] | None:
    """A function that turns as ``plain`` does, by a kernel; None where the kernel cannot.

    Args:
        kernel: turns halves.
        plain: a model's function.
        head: elements of a head.
        turned: of these are turned.
    """
    if _is(plain, turned_pairs, head, turned):
        return _Pairs(kernel)
    if head == turned or _tried(plain, head, turned) is None:  # it is given what is turned alone
        return kernel if _is(plain, turned_halves, turned, turned) else None
    return None


def _is(plain: Any, formula: Any, width: int, turned: int) -> bool:
    """Tell if a function turns queries and keys of a width by a formula."""
    found = _tried(plain, width, turned)
    expected = _tried(lambda q, k, *by: (formula(q, *by), formula(k, *by)), width, turned)
    if found is None or expected is None:
        return False
    return all(near(one, other) for one, other in zip(found, expected, strict=True))


def _tried(plain: Any, width: int, turned: int) -> Pair | None:
    """A query and a key of a width, turned by a function; None: it does not take them."""
    angles = torch.arange(3.0)[None, :, None] * torch.linspace(0.1, 1, turned // 2)
    cos, sin = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    query, key = (sample((1, heads, 3, width), cos.device) for heads in (4, 2))
    try:
        query, key = plain(query, key, cos, sin)
    except Exception:  # of any kind: a function that takes others
        return None
    return query, key


class _Pairs:
    """Turns pairs of neighbours by a kernel that turns halves.

    Even places go to the first half and odd ones to the second, and stay there: a score is a sum
    over all places of query and key, in whatever order. What is not to be turned is turned by 0.
    """

    def __init__(self, kernel: Callable[..., Pair]) -> None:
        self._kernel = kernel
        self._cosines: torch.Tensor | None = None  # as given, the same for all layers of a pass
        self._widened: Pair | None = None  # for the whole head

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> Pair:
        if self._cosines is not cosines or self._widened is None:
            rest = (query.shape[-1] - cosines.shape[-1]) // 2
            self._widened = _widened(cosines, 1.0, rest), _widened(sines, 0.0, rest)
            self._cosines = cosines
        return self._kernel(_evens_first(query), _evens_first(key), *self._widened)


def _widened(angles: torch.Tensor, fill: float, rest: int) -> torch.Tensor:
    """[rows, positions, turned] as [rows, positions, turned + 2 * rest], halves alike again."""
    half = angles[..., : angles.shape[-1] // 2]
    half = torch.cat((half, half.new_full((*half.shape[:-1], rest), fill)), -1)
    return torch.cat((half, half), -1)


def _evens_first(x: torch.Tensor) -> torch.Tensor:
    """A copy of [rows, heads, positions, width] with even places before odd ones. In memory its
    positions come before its heads, where kernels want them."""
    pairs = x.transpose(1, 2).unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2).transpose(1, 2)
