"""The check of a card: quick, and it finds a card that is really slow."""

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
from typing import Any

import pytest

from orchestrator.core.card_check import CardCheck, slow_cards

pytestmark = pytest.mark.slow  # a card in a process of its own

#: Measures itself for each line that it is sent, and says how long that took: the processor stands
#: in for all cards of a node, so that they are equally fast.
CARD = """
import json, sys, time
from workloads.devices import device_for
from workloads.bench.card_check import check_card
import torch
torch.set_num_threads(1)
device = device_for("cpu")
check_card(device)
for _ in sys.stdin:
    began = time.process_time()
    figures = check_card(device)
    print(json.dumps(figures | {"cpu_s": time.process_time() - began}), flush=True)
"""


def measured(card: subprocess.Popen[str]) -> dict[str, float]:
    """The next figures of a card."""
    assert card.stdin is not None and card.stdout is not None
    card.stdin.write("go\n")
    card.stdin.flush()
    return dict(json.loads(card.stdout.readline()))


@contextlib.contextmanager
def throttled(card: subprocess.Popen[str], run_s: float, stop_s: float) -> Iterator[None]:
    """A card that is stopped and goes on again and again, as one does that protects itself from
    heat."""
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set():
            card.send_signal(signal.SIGSTOP)
            time.sleep(stop_s)
            card.send_signal(signal.SIGCONT)
            time.sleep(run_s)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
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
    """It runs for a quarter of the time. A node with one card has no neighbours to compare with."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", CARD], env=alone, **pipes) as card:
        sound = [measured(card) for _ in range(3)]
        with throttled(card, run_s=0.003, stop_s=0.009):
            slow = measured(card)
    assert min(figures["cpu_s"] for figures in sound) < 1.0

    found = slow_cards([check(index, figures) for index, figures in enumerate([*sound, slow])])
    assert [one.card for one in found][:1] == ["cpu-1/CPU3"], (sound, slow)
    assert found[0].than == "the other cards of its node"

    before = [check(0, figures, at=float(night)) for night, figures in enumerate(sound)]
    now = [check(0, slow, at=9.0)]
    assert [one.than for one in slow_cards(now, before)] == ["what it had in earlier runs"]
    assert not slow_cards(now, before[:2])  # too few to tell
