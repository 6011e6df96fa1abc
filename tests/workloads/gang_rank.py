"""Gangs of processes over gloo: `python gang_rank.py GANGS`.

GANGS is a JSON list of [number of ranks, cases]; cases map a name to settings of a fine-tuning job
(``finetuning_cases.request``), or with ``generate`` to those of text generation
(``generated``). All cases of a gang run one after another in the same processes. The
last line printed is what each rank of each gang measured, as JSON. Ranks are forked from a process
that has imported everything, as those of emulated cards are, and import nothing again.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import time
from typing import Any

import finetuning_cases
import generation_cases
import torch

from workloads import finetuning, text_generation
from workloads.api import JobContext, MeasureSettings
from workloads.collective import Rendezvous, joined
from workloads.devices import device_for


def measured(settings: dict[str, Any], rank: int, world_size: int, collective: Any) -> Any:
    """One job's result on this rank."""
    context = generation_cases.Worker().context(
        rank=rank, world_size=world_size, collective=collective
    )
    if "architecture" in settings:
        return split_and_whole(settings["architecture"], rank, world_size)
    if "generate" in settings:
        return generated(settings, context)
    result = finetuning.run(finetuning_cases.request(**settings), context)
    return {
        "losses": finetuning_cases.losses(result),
        "items": sum(sample.items for sample in result.samples),
        "tokens": sum(sample.input_tokens for sample in result.samples),
        "communication_s": [sample.communication_s for sample in result.samples],
        "wall_s": [sample.wall_s for sample in result.samples],
        "details": dict(result.details),
        "metrics": dict(result.metrics),
        "trainable": result.trainable_parameter_count,
    }


def generated(settings: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The texts and the end of a job of text generation; rank 1 is slowed down by
    ``slow_rank_s`` whenever it waits for its card, so that the ranks' clocks disagree."""
    asked = settings["generate"]
    if "measure" in asked:
        asked = asked | {"measure": MeasureSettings(**asked["measure"])}
    if "slow_rank_s" in settings and context.rank == 1:
        wait = context.device.synchronize

        def slow() -> None:
            time.sleep(settings["slow_rank_s"])
            wait()

        context.device.synchronize = slow  # type: ignore[method-assign]
    result = text_generation.run(generation_cases.request(**asked), context)
    return {
        "texts": [[item.index, item.output_text] for item in result.items],
        "stop_reason": result.stop_reason,
        "repeats": sorted({s.repeat for s in result.samples if not s.warmup}),
        "complete": sorted({s.repeat for s in result.samples if s.complete}),
        "sizes": [s.items for s in result.samples if s.repeat == 0],
    }


def split_and_whole(architecture: str, rank: int, world_size: int) -> dict[str, Any]:
    """The distance of a small random model, split, from itself whole: logits, and gradients of what
    stays whole, as the largest difference relative to the largest value."""
    import copy

    from transformers import AutoConfig, AutoModelForCausalLM

    from workloads.parallel.layout import Layout, make_groups
    from workloads.parallel.tensor import split

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
    )
    whole = AutoModelForCausalLM.from_config(config)
    for parameter in whole.parameters():  # no zeros and ones: all of them matter
        torch.nn.init.normal_(parameter, std=0.2)
    part = copy.deepcopy(whole)
    layout = Layout(rank=rank, world_size=world_size, tensor=world_size)
    summary = split(part, layout, make_groups(layout))
    ids = torch.arange(2, 22).reshape(2, 10)
    logits = []
    for model in (whole, part):
        logits.append(model(input_ids=ids, use_cache=False).logits)
        torch.nn.functional.cross_entropy(logits[-1].flatten(0, 1), ids.flatten()).backward()
    of_part = dict(part.named_parameters())
    pairs = [
        (parameter.grad, of_part[name].grad)
        for name, parameter in whole.named_parameters()
        if of_part[name].shape == parameter.shape
    ]
    return {
        "summary": summary,
        "logits": _difference(*logits),
        "gradients": max(_difference(one, other) for one, other in pairs),
        "compared": len(pairs),
    }


def _difference(one: Any, other: Any) -> float:
    return float((one - other).abs().max() / one.abs().max())


def run_rank(rank: int, world_size: int, port: int, cases: dict[str, Any], channel: Any) -> None:
    """Run all cases as one rank, and send what they measured."""
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=240)
    with joined(
        rendezvous=meet, rank=rank, world_size=world_size, device=device_for("cpu")
    ) as collective:
        found = {
            name: measured(settings, rank, world_size, collective)
            for name, settings in cases.items()
        }
    channel.send(found)


def run_gang(world_size: int, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of each rank. A rank that fails ends this process, and with it the others."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    channels, ranks = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        arguments = (rank, world_size, port, cases, theirs)
        ranks.append(context.Process(target=run_rank, args=arguments, daemon=True))
        ranks[-1].start()
        theirs.close()
        channels.append(mine)
    found = [channel.recv() for channel in channels]  # EOFError: the rank has said why
    for process in ranks:
        process.join()
    return found


def preload() -> None:
    """Import what jobs import, and start no threads."""
    torch.set_num_threads(1)
    names = [
        "transformers",
        "peft",
        "torch.nn.parallel",
        "workloads.parallel.tensor",
        "workloads.parallel.pipeline",
    ]
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
