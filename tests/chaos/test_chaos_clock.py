"""The clock of the chaos tests: steps are seen at once, durations are as long as ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos_clock import STEP_S, stepped_clock

PROGRAM = """
import datetime, queue, sys, threading, time

def told():
    print(round(time.time()), round(datetime.datetime.now().timestamp()), flush=True)

for line in sys.stdin:
    began = time.monotonic()
    told()
    time.sleep(0.1)
    threading.Event().wait(0.1)
    try:
        queue.Queue().get(timeout=0.1)
    except queue.Empty:
        pass
    threading.Lock().acquire(timeout=0.1)
    print(round(time.monotonic() - began, 3), flush=True)
"""


def test_the_wall_clock_steps_and_waits_take_their_time(tmp_path: Path) -> None:
    """Two hours forth and back; sleeping, waiting for events, queues and locks in between."""
    clock = stepped_clock(tmp_path)
    if clock is None:
        pytest.skip("no C compiler: clocks cannot be stepped")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | clock.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    for offset in (0, STEP_S, -STEP_S, 0):
        clock.step(offset)
        process.stdin.write("\n")
        process.stdin.flush()
        for told in process.stdout.readline().split():
            assert abs(int(told) - offset - time.time()) < 60
        assert 0.25 < float(process.stdout.readline()) < 60
    process.stdin.close()
    assert process.wait(30) == 0
