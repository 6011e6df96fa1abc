"""The passport of a card: quick, and it finds a card that is really slow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from orchestrator.core.card_check import CardCheck, slow_cards

pytestmark = pytest.mark.slow  # a card in a process of its own, for all of them

#: A card: measures itself for each line that it is sent, and says how long that took.
CARD = """
import json, sys, time
from workloads.devices import device_for
from workloads.bench.card_check import check_card
import torch
torch.set_num_threads(1)
device = device_for("cpu")
check_card(device)
print(json.dumps({}), flush=True)
for _ in sys.stdin:
    began = time.process_time()
    told = check_card(device)
    print(json.dumps(told | {"cpu_s": time.process_time() - began}), flush=True)
"""


class Card:
    """A process on the processor that stands in for a card."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._answer()

    def measure(self) -> dict[str, float]:
        """Its figures now."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    @contextlib.contextmanager
    def throttled(self, run_s: float, stop_s: float) -> Iterator[None]:
        """Stop and continue the process again and again, as a card does that protects itself from
        heat."""
        over = threading.Event()

        def throttle() -> None:
            while not over.is_set():
                self.process.send_signal(signal.SIGSTOP)
                time.sleep(stop_s)
                self.process.send_signal(signal.SIGCONT)
                time.sleep(run_s)

        thread = threading.Thread(target=throttle)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    """One process that stands in for all cards of a node in turn, so that they are equally fast."""
    made = Card()
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(30)


def passport(index: int, figures: dict[str, float], at: float = 0.0) -> CardCheck:
    """The passport of an emulated card of one node."""
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


def test_a_planted_slow_card_is_found(card: Card) -> None:
    told = []
    for index in range(4):
        slow = card.throttled(0.002, 0.010) if index == 2 else contextlib.nullcontext()
        with slow:
            told.append(passport(index, card.measure()))
    found = slow_cards(told)
    assert [each.card for each in found][:1] == ["cpu-1/CPU2"], told
    assert found[0].than == "the other cards of its node"


def test_a_card_that_became_slow_is_found_by_its_own_history(card: Card) -> None:
    before = [passport(0, card.measure(), at=float(night)) for night in range(3)]
    with card.throttled(0.002, 0.010):
        now = [passport(0, card.measure(), at=9.0)]
    assert [each.than for each in slow_cards(now, before)] == ["what it had in earlier runs"]
    assert not slow_cards(now, before[:2])  # too few to tell


def test_it_costs_little(card: Card) -> None:
    assert min(card.measure()["cpu_s"] for _ in range(2)) < 1.0
