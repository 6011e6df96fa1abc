"""Products in machine code, and the greatest numbers of rows."""

from __future__ import annotations

import pytest
import torch
from native_formats import KERNELS, format_for, in_format

from workloads.generation.native.products import (
    NativeLinear,
    by_pairs,
    code,
    computes,
    format_of,
    greatest,
    sums_fit,
)

pytestmark = pytest.mark.skipif(not computes("fp32"), reason=code().lacking or "needs AVX-512")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 13, 14, 15, 64, 300])
def test_products_of_any_number_of_rows(
    kernel: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of rows meet without a gap, in parts of a cache's size, too."""
    name = format_for(kernel, monkeypatch)
    torch.manual_seed(rows)
    linear = torch.nn.Linear(1000, 96)
    model = torch.nn.ModuleDict({"model": linear})
    (linear,) = in_format(model, name).values()
    inputs = torch.randn(rows, 1000).to(linear.bias.dtype)
    with torch.no_grad():
        expected = linear(inputs).float()
        product = NativeLinear([linear])
        got = product(inputs).float()
    assert product.kernel == kernel
    most = {"fp32": 1e-6, "bf16": 4e-3, "int8": 0.02}[name]
    assert (got - expected).norm() < most * expected.norm()


def test_pairs_are_for_layers_whose_inputs_have_pairs() -> None:
    """And only where the processor multiplies them as fast as single numbers."""
    even, odd = (torch.nn.Linear(inputs, 32, dtype=torch.bfloat16) for inputs in (64, 63))
    library = code().library
    assert library is not None
    assert by_pairs([even]) is bool(library.pairs_are_fast()) and not by_pairs([even, odd])
    assert library.has_pairs() or not library.pairs_are_fast()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_inputs_of_another_format_are_refused(name: str) -> None:
    """They would be read as numbers of another size."""
    if not computes(name):
        pytest.skip(f"{name} is left to oneDNN here")
    model = torch.nn.ModuleDict({"model": torch.nn.Linear(64, 32)})
    (linear,) = in_format(model, name).values()
    with pytest.raises(TypeError, match="float16"):
        NativeLinear([linear])(torch.zeros(2, 64, dtype=torch.float16))


def test_a_product_without_memory_is_an_error() -> None:
    """Rather than the end of the process."""
    product = NativeLinear([torch.nn.Linear(32, 32)])
    product.in_features = 1 << 30  # 2 ** 48 bytes with these rows: more than can be addressed
    with pytest.raises(MemoryError):
        product(torch.zeros(1 << 16, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [4, 1000])
def test_the_first_of_the_greatest_is_found(dtype: torch.dtype, values: int) -> None:
    """As by argmax, with ties, beside what is no number, and where all are the least."""
    torch.manual_seed(values)
    rows = torch.randint(0, values, (9, 333)).to(dtype)
    rows[1, 7] = rows[1, 9] = rows[2, 0] = float("nan")
    rows[3] = float("-inf")
    rows[4, -1] = float("inf")
    found = greatest(rows)
    assert found is not None and found.tolist() == rows.argmax(-1).tolist()
    assert greatest(rows.t()) is None and greatest(rows.half()) is None


def test_what_is_no_number_is_not_hidden_by_int8() -> None:
    """A row with one has none but such; the rows beside it are as they were."""
    if not computes("int8"):
        pytest.skip("int8 is left to oneDNN here")
    model = torch.nn.ModuleDict({"model": torch.nn.Linear(64, 32)})
    (linear,) = in_format(model, "int8").values()
    assert format_of([linear]) == "int8"
    inputs = torch.randn(3, 64).bfloat16()
    inputs[1, 5] = float("nan")
    with torch.no_grad():
        found = NativeLinear([linear])(inputs)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("inputs", "ours"), [(1 << 16, True), ((1 << 16) + 4, False)])
def test_int8_is_refused_where_sums_of_32_bits_overflow(inputs: int, ours: bool) -> None:
    """Each input adds up to 255 * 128; such a layer is left to torch. fp32 has no such limit."""
    linear = torch.nn.Linear(inputs, 32, bias=False, dtype=torch.bfloat16)
    assert sums_fit("int8", [linear]) is ours and sums_fit("fp32", [linear])
    if not computes("int8"):
        pytest.skip("int8 is left to oneDNN here")
    torch.nn.init.ones_(linear.weight)
    (linear,) = in_format(torch.nn.ModuleDict({"model": linear}), "int8").values()
    assert (format_of([linear]) == "int8") is ours
    if ours:
        got = NativeLinear([linear])(torch.ones(1, inputs, dtype=torch.bfloat16))
        assert got.float().sub(inputs).abs().max() < 0.02 * inputs
