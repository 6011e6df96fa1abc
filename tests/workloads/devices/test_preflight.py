"""The checks of a card before its first job."""

from __future__ import annotations

import pytest
import torch

from orchestrator.core.job import Accelerator
from orchestrator.core.outcome import FailureClass
from orchestrator.core.topology import Card
from orchestrator.worker.protocol import WorkerConfig
from orchestrator.worker.worker import CardWorker
from workloads.base import CardFaulty
from workloads.devices.cpu import CpuDevice

CARD = Card(node_id="n1", index=3, accelerator=Accelerator.HPU)


def test_a_sound_device_passes_and_its_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    CpuDevice().preflight()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float32])
def test_no_precision_that_a_card_may_choose_is_a_fault(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = torch.Tensor.__matmul__

    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if not left.is_floating_point():
            return multiply(left, right)
        return multiply(left.to(precision), right.to(precision)).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    CpuDevice().preflight()


@pytest.mark.parametrize("wrong", [1.0, -1.0, float("nan"), float("inf")])
def test_one_wrong_element_is_a_fault(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def broken(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if product.is_floating_point():
            product[17, 5] += wrong
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", broken)
    with pytest.raises(CardFaulty, match="has 1 wrong elements of 65,536"):
        CpuDevice().preflight()


def test_memory_that_changes_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = torch.Tensor.to

    def leaky(tensor: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        moved = carry(tensor, *arguments, **named).clone()
        if moved.dtype is torch.int32:
            moved[123_456] ^= 1 << 9
        return moved

    monkeypatch.setattr(torch.Tensor, "to", leaky)
    with pytest.raises(CardFaulty, match="came back changed"):
        CpuDevice().preflight()


@pytest.mark.parametrize("error", [CardFaulty("wrong"), RuntimeError("unknown error")])
def test_a_worker_on_a_faulty_card_does_not_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:

    def preflight(_: CpuDevice) -> None:
        raise error

    monkeypatch.setattr(CpuDevice, "preflight", preflight)
    config = WorkerConfig(worker_id="w", card=CARD, node_name="n1", emulated=True)
    worker = CardWorker(config)
    with pytest.raises(CardFaulty, match="HPU3") as caught:
        worker.start()
    assert worker.failure(caught.value).failure_class is FailureClass.CARD_FAULTY
