"""Gangs of processes over gloo: `python gang_rank.py GANGS`.

GANGS is a JSON list of [number of ranks, cases]; cases map a name to settings of a fine-tuning job
(``finetuning_cases.request``), or with ``generate`` to those of text generation. All cases of a
gang run one after another in the same processes. A case with ``dies_at`` is tried twice: first, in
processes of its own, every rank is killed with signal 9 at that step (``dies``). The last line
printed is what each rank of each gang measured, as JSON. Ranks are forked from a process that has
imported everything, as those of emulated cards are.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import finetuning_cases
import torch
from generation_cases import Worker, request

from workloads import finetuning, text_generation
from workloads.base import JobContext, MeasureSettings, Request
from workloads.bench.collective import Rendezvous, joined
from workloads.devices import device_for
from workloads.training import checkpoints
from workloads.training.parallel.layout import Layout, make_groups
from workloads.training.parallel.tensor import split, total_norm


def measured(settings: dict[str, Any], rank: int, world_size: int, collective: Any) -> Any:
    if "architecture" in settings:
        return split_and_whole(settings["architecture"], rank, world_size)
    context = Worker().context(rank=rank, world_size=world_size, collective=collective)
    if "generate" in settings:
        return generated(settings, context)
    result = finetuning.run(asked(settings), context)
    return {
        "steps": [sample.repeat for sample in result.samples],
        "losses": finetuning_cases.losses(result),
        "items": sum(sample.items for sample in result.samples),
        "communication_s": [sample.communication_s for sample in result.samples],
        "wall_s": [sample.wall_s for sample in result.samples],
        "details": dict(result.details),
        "metrics": dict(result.metrics),
        "trainable": result.trainable_parameter_count,
    }


def asked(settings: dict[str, Any]) -> Request:
    """A fine-tuning job; one that is killed keeps checkpoints, and goes on for one timed step."""
    again = "dies_at" in settings
    fields = {name: value for name, value in settings.items() if name != "dies_at"}
    job = finetuning_cases.request(**fields)
    kept_as = f"killed-{zlib.crc32(repr(settings).encode())}" if again else ""
    measure = dataclasses.replace(job.measure, min_repeats=1)
    return dataclasses.replace(job, kept_as=kept_as, attempt=1 + again, measure=measure)


def dies(rank: int, world_size: int, port: int, case: dict[str, Any], _: Any) -> None:
    """Be killed when step ``dies_at`` is saved: rank 0 behind its part, others in the middle."""
    write = checkpoints.write_state

    def killed(state: Any, target: Path) -> None:
        ends = state.get("step") == case["dies_at"]
        if ends and rank:
            target.with_suffix(".part").write_bytes(b"half of a file")
        else:
            write(state, target)
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.write_state = killed
    with member(rank, world_size, port) as collective:
        measured(case, rank, world_size, collective)


def generated(settings: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Texts and end of a job; rank 1 waits ``slow_rank_s`` at its card, so that clocks disagree."""
    job = settings["generate"]
    if "measure" in job:
        job = job | {"measure": MeasureSettings(**job["measure"])}
    if "slow_rank_s" in settings and context.rank == 1:
        wait = context.device.synchronize

        def slow() -> None:
            time.sleep(settings["slow_rank_s"])
            wait()

        context.device.synchronize = slow
    result = text_generation.run(request(**job), context)
    return {
        "texts": [[item.index, item.output_text] for item in result.items],
        "stop_reason": result.stop_reason,
        "repeats": sorted({s.repeat for s in result.samples if not s.warmup}),
        "complete": sorted({s.repeat for s in result.samples if s.complete}),
        "sizes": [s.items for s in result.samples if s.repeat == 0],
    }


def split_and_whole(architecture: str, rank: int, world_size: int) -> dict[str, Any]:
    """The relative distance of a small model, split, from itself: logits, gradients of the rest."""
    whole = finetuning_cases.small_model(architecture, wide=True)
    part = copy.deepcopy(whole)
    layout = Layout(rank=rank, world_size=world_size, tensor=world_size)
    split(part, layout, make_groups(layout))
    ids = torch.arange(2, 22).reshape(2, 10)
    logits, norms = [], []
    for model in (whole, part):
        logits.append(model(input_ids=ids, use_cache=False).logits)
        torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), ids.flatten()).backward()
        norms.append(float(total_norm(model, list(model.parameters()))))
    of_part = dict(part.named_parameters())
    pairs = [
        (parameter.grad, of_part[name].grad)
        for name, parameter in whole.named_parameters()
        if of_part[name].shape == parameter.shape
    ]
    return {
        "logits": _difference(*logits),
        "gradients": max(_difference(one, other) for one, other in pairs),
        "compared": len(pairs),
        "norms": norms,
    }


def _difference(one: Any, other: Any) -> float:
    return float((one - other).abs().max() / one.abs().max())


def run_rank(rank: int, world_size: int, port: int, cases: dict[str, Any], channel: Any) -> None:
    with member(rank, world_size, port) as collective:
        results = {
            name: measured(case, rank, world_size, collective) for name, case in cases.items()
        }
    channel.send(results)


def run_gang(world_size: int, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of each rank. A rank that fails ends this process, and with it the others."""
    for name, case in cases.items():
        if "dies_at" in case:
            gang, _ = start(dies, world_size, case)
            for process in gang:
                process.join()
            assert [p.exitcode for p in gang] == [-signal.SIGKILL] * world_size, name
    gang, channels = start(run_rank, world_size, cases)
    results = [channel.recv() for channel in channels]  # EOFError: the rank has said why
    for process in gang:
        process.join()
    return results


def start(target: Any, world_size: int, given: Any) -> tuple[list[Any], list[Any]]:
    """Fork the ranks of a gang; what each sends comes out of a channel."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    gang, channels = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        arguments = (rank, world_size, port, given, theirs)
        gang.append(context.Process(target=target, args=arguments, daemon=True))
        gang[-1].start()
        theirs.close()
        channels.append(mine)
    return gang, channels


def member(rank: int, world_size: int, port: int, device: str = "cpu") -> Any:
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=240)
    return joined(rendezvous=meet, rank=rank, world_size=world_size, device=device_for(device))


def preload() -> None:
    """Import what jobs import, and start no threads."""
    torch.set_num_threads(1)
    names = ["transformers", "peft", "torch.nn.parallel", "workloads.training.parallel.pipeline"]
    if importlib.util.find_spec("deepspeed") is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        names.append("deepspeed")
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported is no garbage; jobs would look it through


if __name__ == "__main__":
    preload()
    print("\n" + json.dumps([run_gang(size, cases) for size, cases in json.loads(sys.argv[1])]))
