"""The check of a card: quick, and it finds a card that is really slow."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from orchestrator.core.card_check import CardCheck, slow_cards
from workloads.bench.card_check import PIECE_S, check_card
from workloads.devices.cpu import CpuDevice

pytestmark = pytest.mark.slow


class Throttled(CpuDevice):
    """It stands still for three quarters of the time, as a card that protects itself from heat."""

    def synchronize(self) -> None:
        time.sleep(3 * PIECE_S)


def check(index: int, figures: dict[str, float], at: float = 0.0) -> CardCheck:
    return CardCheck(
        run="night",
        taken_at=at,
        node="cpu-1",
        card_index=index,
        accelerator="CPU",
        device_name="a processor",
        emulated=True,
        matmul_flops=figures["matmul_flops"],
        copy_bytes_per_s=figures["copy_bytes_per_s"],
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A second thread on a shared core would make a sound card look slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_slow_card_is_found_beside_others_and_by_its_own_history() -> None:
    """The processor stands in for all cards of a node, so that they are equally fast. A node with
    one card has no neighbours to compare with."""
    check_card(CpuDevice())  # loads what it needs
    began = time.process_time()
    sound = [check_card(CpuDevice()) for _ in range(3)]
    assert time.process_time() - began < 3.0
    slow = check_card(Throttled())

    found = slow_cards([check(index, figures) for index, figures in enumerate([*sound, slow])])
    assert [one.card for one in found][:1] == ["cpu-1/CPU3"], (sound, slow)
    assert found[0].than == "the other cards of its node"

    before = [check(0, figures, at=float(night)) for night, figures in enumerate(sound)]
    now = [check(0, slow, at=9.0)]
    assert [one.than for one in slow_cards(now, before)] == ["what it had in earlier runs"]
    assert not slow_cards(now, before[:2])  # too few to tell
