"""Rows of jobs that a script of this directory runs in a process of its own, under the stand-in."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from patience import patience

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent


def rows_of(script: str, *arguments: str | Path, **variables: str) -> dict[str, Any]:
    """The rows that the script printed, in lazy mode unless the variables say otherwise."""
    folders = [TESTS.parent, TESTS, TESTS / "workloads", os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PT_HPU_LAZY_MODE": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=patience(500),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    rows: dict[str, Any] = json.loads(line.removeprefix("ROWS "))
    return rows


# ---------------------------------------------------------------- in those scripts


def values_of(result: Any) -> dict[str, Any]:
    """A result as JSON has it."""
    samples = ("loss", "items", "input_tokens", "computed_tokens", "warmup", "encoder_s", "wall_s")
    return {
        **{name: [getattr(sample, name) for sample in result.samples] for name in samples},
        "texts": [[item.index, item.output_tokens, item.output_text] for item in result.items],
        "metrics": dict(result.metrics),
        "details": dict(result.details),
    }


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """A channel on which a process forked from this one sends what a function returns."""
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()

    def send() -> None:
        theirs.send(function(*arguments))

    fork.Process(target=send, daemon=True).start()
    theirs.close()
    return mine


def gang(workload: Callable[..., Any], job: Any, context: Any) -> list[dict[str, Any]]:
    """Results of two ranks, in processes forked from this one before it has threads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    channels = [forked(_rank, number, port, workload, job, context) for number in range(2)]
    return [channel.recv() for channel in channels]


def _rank(number: int, port: int, workload: Any, job: Any, context: Any) -> dict[str, Any]:
    from workloads.bench.collective import Rendezvous, joined
    from workloads.devices import device_for

    os.environ |= {"HABANA_VISIBLE_MODULES": "0,1", "HLS_MODULE_ID": str(number)}
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=240)
    device = device_for("hpu")
    with joined(rendezvous=meet, rank=number, world_size=2, device=device) as together:
        return values_of(
            workload(
                job,
                replace(context, rank=number, world_size=2, collective=together, device=device),
            )
        )
