"""BERT pretraining by optimum-habana in one process under the stand-in, and as a gang of two.

Prints what each job measured as JSON: fresh weights and a checkpoint's, in fp32 and under bf16
autocast; two cards; and the same job by Nightgrid's own loop on the same card. The mode of the
process is the argument: lazy or compile.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from dataclasses import replace
from typing import Any

from finetuning_cases import PRETRAINING
from finetuning_cases import request as asked
from generation_cases import Worker

from workloads import finetuning
from workloads.base import MeasureSettings, Request, Result
from workloads.bench.collective import Rendezvous, joined
from workloads.devices import device_for
from workloads.devices.base import torch_compilations
from workloads.engines.optimum_habana import library


def job(mode: str, *, batch_size: int = 4, **given: Any) -> Request:
    """Three steps after three of warm-up; the schedule is that of ten."""
    engine = given.pop("engine", "optimum-habana")
    fields = PRETRAINING | {"learning_rate": 2e-3, "schedule_steps": 10} | given
    return replace(
        asked(**fields, batch_size=batch_size),
        engine=engine,
        measure=MeasureSettings(warmup=3, time_limit_s=600),
        settings={"hpu_mode": mode} if engine != "transformers" else {},
    )


def told(result: Result) -> dict[str, Any]:
    return {
        "losses": [sample.loss for sample in result.samples],
        "items": [sample.items for sample in result.samples],
        "read": [sample.input_tokens for sample in result.samples],
        "warmup": [sample.warmup for sample in result.samples],
        "metrics": dict(result.metrics),
        "details": dict(result.details),
    }


def rank(number: int, port: int, mode: str, channel: Any) -> None:
    """One of two cards that train together."""
    os.environ |= {"HABANA_VISIBLE_MODULES": "0,1", "HLS_MODULE_ID": str(number)}
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=240)
    device = device_for("hpu")
    with joined(rendezvous=meet, rank=number, world_size=2, device=device) as collective:
        context = Worker().context(rank=number, world_size=2, collective=collective)
        result = finetuning.run(job(mode, batch_size=2), replace(context, device=device))
    channel.send(told(result))


def gang(mode: str) -> list[dict[str, Any]]:
    """The results of each of two ranks."""
    fork = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    channels = []
    for number in range(2):
        mine, theirs = fork.Pipe()
        fork.Process(target=rank, args=(number, port, mode, theirs), daemon=True).start()
        theirs.close()
        channels.append(mine)
    return [channel.recv() for channel in channels]


def main(mode: str) -> None:
    import torch

    torch.set_num_threads(1)
    device = device_for("hpu")
    library.prepare(device)
    done: dict[str, Any] = {}
    if mode == "lazy":
        done["gang"] = gang(mode)  # forked before this process has threads

    def run(**given: Any) -> dict[str, Any]:
        before = torch_compilations().graphs or 0
        result = finetuning.run(job(mode, **given), replace(Worker().context(), device=device))
        return told(result) | {"graphs": (torch_compilations().graphs or 0) - before}

    done["fresh"] = run()
    done["mixed"] = run(autocast="bf16")
    done["own loop"] = run(engine="transformers")
    if mode == "lazy":
        done["checkpoint"] = run(initial_weights="checkpoint")
    print("ROWS", json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
