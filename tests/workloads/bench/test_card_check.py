"""The passport of a card: quick, and it finds a card that is really slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from orchestrator.core.card_check import CardCheck, slow_cards

pytestmark = pytest.mark.slow  # a card in a process of its own

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
    figures = check_card(device)
    print(json.dumps(figures | {"cpu_s": time.process_time() - began}), flush=True)
"""


class Card:
    """A process on the processor that stands in for all cards of a node, so that they are equally
    fast."""

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
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def measure_throttled(self, run_s: float, stop_s: float) -> dict[str, float]:
        """Its figures while it is stopped and continued again and again, as a card does that
        protects itself from heat."""
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
            return self.measure()
        finally:
            over.set()
            thread.join()


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


def test_a_planted_slow_card_is_found_beside_others_and_by_its_own_history() -> None:
    """It runs for a sixth of the time. A node with one card has no neighbours to compare with."""
    card = Card()
    sound, slow = [card.measure() for _ in range(3)], card.measure_throttled(0.002, 0.010)
    assert card.process.stdin is not None
    card.process.stdin.close()
    card.process.wait(30)
    assert min(figures["cpu_s"] for figures in sound) < 1.0

    found = slow_cards([check(index, figures) for index, figures in enumerate([*sound, slow])])
    assert [one.card for one in found][:1] == ["cpu-1/CPU3"], (sound, slow)
    assert found[0].than == "the other cards of its node"

    before = [check(0, figures, at=float(night)) for night, figures in enumerate(sound)]
    now = [check(0, slow, at=9.0)]
    assert [one.than for one in slow_cards(now, before)] == ["what it had in earlier runs"]
    assert not slow_cards(now, before[:2])  # too few to tell
