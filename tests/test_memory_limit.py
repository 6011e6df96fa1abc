"""An emulated card's memory really runs out, as an exception and not as a death.

Each case runs in a process of its own, since a limit acts on the whole process.
"""

import subprocess
import sys

import pytest

HEAD = """
import torch
from orchestrator.worker.memory_limit import MemoryLimit, private_bytes
torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)
limit = MemoryLimit.above_baseline(100_000_000)
def fill(make):
    kept = []
    while True:
        kept.append(make())
"""


def run(body: str) -> str:
    """Run ``body`` after the head in a fresh interpreter; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + body], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "make", ["torch.ones(1_000_000)", "torch.ones(1000)", "bytearray(100)", "torch.ones(10**9)"]
)
def test_exhausting_the_limit_raises_and_the_process_lives_on(make: str) -> None:
    """Large, small and Python allocations all end in an exception that means memory, and after
    it the process allocates freely."""
    body = f"""
try:
    with limit.in_force():
        fill(lambda: {make})
except (RuntimeError, MemoryError) as error:
    from orchestrator.worker.failure_record import describe
    from workloads.devices import device_for
    failure = describe(error, device=device_for("cpu"), memory_bytes=100_000_000, node_name="n")
    print(failure.failure_class, len(torch.ones(50_000_000)))
"""
    assert run(body).split() == ["out_of_memory", "50000000"]


def test_what_fits_is_not_refused() -> None:
    """Nine tenths of the card can be used, again and again."""
    body = """
for _ in range(3):
    with limit.in_force():
        print(torch.ones(22_500_000).sum().item())
"""
    assert run(body).split() == ["22500000.0"] * 3
