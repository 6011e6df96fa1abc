"""Attention of packed samples by machine code gives what double precision does, both ways."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from workloads import native_code
from workloads.errors import Unsupported
from workloads.training import apart
from workloads.training.sample_attention import SampleAttention, code

pytestmark = pytest.mark.skipif(code().library is None, reason=code().lacking)
_MADE = "workloads.native_code.native_code"


def heads_of(positions: int, width: int, *counts: int) -> list[torch.Tensor]:
    """Heads [1, heads, positions, width] as a product leaves them, one of each count of heads."""
    torch.manual_seed(positions)
    return [torch.randn(1, positions, count, width).transpose(1, 2) for count in counts]


def in_machine_code() -> bool:
    """Tell if attention in fp32 is machine code now."""
    heads = heads_of(9, 8, 2, 2, 2)
    return apart.machine_code_for(*heads, places=torch.arange(9), scaling=1.0) is not None


def in_double(
    heads: list[torch.Tensor], lengths: list[int], scaling: float, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Attention, and the gradients of query, key and value, in double precision."""
    exact = [each.double().requires_grad_() for each in heads]
    alone = [
        scaled_dot_product_attention(*own, is_causal=True, scale=scaling, enable_gqa=True)
        for own in zip(*(each.split(lengths, dim=2) for each in exact), strict=True)
    ]
    whole = torch.cat(alone, dim=2).transpose(1, 2)
    return [whole.detach(), *torch.autograd.grad(whole, exact, gradient.double())]


@pytest.mark.parametrize("width", [1, 16, 33, 64, 128])
@pytest.mark.parametrize(("heads", "kept"), [(1, 1), (6, 2), (9, 3)])
def test_it_computes_what_double_precision_does(width: int, heads: int, kept: int) -> None:
    """Of samples below, of and above a panel, whose heads share keys and values or do not."""
    lengths = [1, 31, 32, 33, 2, 100]
    positions, scaling = sum(lengths), 0.3
    given = heads_of(positions, width, heads, kept, kept)
    gradient = torch.randn(1, positions, heads, width)
    ours = SampleAttention(lengths, scaling)
    attended, sums = ours.forward(*given)
    into = [torch.empty_like(each) for each in given]
    ours.backward(gradient, *given, attended, sums, into)
    expected = in_double(given, lengths, scaling, gradient)
    for found, exact in zip([attended, *into], expected, strict=True):
        assert (found - exact).norm() <= 2e-6 * exact.norm() + 1e-6


def test_sums_are_those_of_torch() -> None:
    """So that either may go on with what the other began."""
    query, key, value = heads_of(50, 16, 2, 2, 2)
    _, sums = SampleAttention([50], 0.25).forward(query, key, value)
    _, expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=0.25
    )
    torch.testing.assert_close(sums, expected.transpose(1, 2))


def test_heads_may_lie_anywhere() -> None:
    """Also with a gradient that is one number, and numbers of a head that are no neighbours."""
    plain = heads_of(40, 16, 2, 2, 2)
    odd = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in plain]
    gradient = torch.ones(()).expand(1, 40, 2, 16)
    ours = SampleAttention([25, 15], 0.25)
    found = []
    for given in (plain, odd):
        attended, sums = ours.forward(*given)
        into = [torch.empty_like(each) for each in plain]
        ours.backward(gradient, *given, attended, sums, into)
        found.append([attended, sums, *into])
    for one, other in pairwise(found):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_few_samples_on_many_threads_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shares out all heads of a sample; the output is the same, with shared heads too."""
    apart.register(native=True)
    query, key, value = heads_of(20, 8, 16, 1, 1)
    places, leaf = torch.arange(20)[None], query.clone().requires_grad_()
    found: list[Any] = []
    for threads in (4, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda given=threads: given)
        ours = apart.machine_code_for(query, key, value, places.flatten(), 0.5)
        assert (ours is not None) is (threads == 4)
        attended, _ = apart.attend(
            torch.nn.Module(), leaf, key, value, None, position_ids=places, scaling=0.5
        )
        found.append((attended, *torch.autograd.grad(attended.square().sum(), leaf)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_attention_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than the end of the process."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 << 30)
    with pytest.raises(MemoryError):
        SampleAttention([512], 1.0).forward(*heads_of(512, 64, 1, 1, 1))


def test_a_row_says_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code, how long it was compiled, or why there is none."""
    made = native_code.NativeCode(library=code().library, compile_s=3.5)
    lacking = native_code.NativeCode(lacking="no compiler g++ on this node")
    assert apart.register(native=False) == "apart"
    monkeypatch.setattr(_MADE, lambda _: made)
    assert apart.register(native=True).endswith(
        "in fp32 by machine code, compiled once in this process in 3.5 s"
    )
    monkeypatch.setattr(_MADE, lambda _: lacking)
    assert "without machine code (no compiler" in apart.register(native=True)
    assert not in_machine_code()


def test_code_that_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node's compiler made is compared with torch's attention first."""

    def wrong(_: Any, *heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return heads[0].transpose(1, 2).contiguous(), torch.zeros(1, heads[0].shape[2], 4)

    monkeypatch.setattr(SampleAttention, "forward", wrong)
    assert "it computed something else" in apart.register(native=True)
    assert not in_machine_code()


def test_heads_of_unlike_formats_are_torchs_matter() -> None:
    """Which refuses them; they would be read as numbers of another size."""
    apart.register(native=True)
    query, key, value = heads_of(20, 8, 2, 2, 2)
    places = torch.arange(20)[None]
    with pytest.raises(RuntimeError):
        apart.attend(torch.nn.Module(), query, key.bfloat16(), value, None, position_ids=places)


@pytest.mark.parametrize("places", [[1, 2, 0, 1], [2, 3, 4]])
def test_positions_within_a_sample_are_refused(places: list[int]) -> None:
    """Nothing would be known of the first ones."""
    heads = heads_of(len(places), 8, 2, 2, 2)
    with pytest.raises(Unsupported, match="do not begin with 0"):
        apart.attend(torch.nn.Module(), *heads, None, position_ids=torch.tensor([places]))
