"""Which jobs an engine takes: pure, without torch, since the plan asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from workloads.engines import ENTRIES, hpu_mode
from workloads.errors import WorkloadError
from workloads.models.catalog import find_model
from workloads.models.checkpoint_files import read_config
from workloads.precision import STOCK
from workloads.refusal import Asked, Refusal


def engine_refusals(asked: Asked) -> Iterator[Refusal]:
    """What speaks against a job's engine, and against settings that depend on it."""
    entry = ENTRIES.get(asked.engine)
    if entry is None:
        return  # the grid's reader has said so
    if not entry.runs_on(asked.device):
        where = " and ".join(entry.devices) or f"devices with {entry.needs}"
        yield Refusal(
            setting="engine",
            reason=f"the engine {asked.engine} runs on {where}, not on {asked.device}",
            unsupported=True,
        )
        return
    yield from _mode(asked)
    if asked.engine == STOCK:
        return
    if (asked.parameters.get("tensor_parallel") or 1) > 1:
        yield Refusal(
            setting="tensor_parallel",
            reason=f"with the engine {asked.engine} this version gives every card the whole model",
            hint=f"engine {STOCK} splits matrices over cards",
            unsupported=True,
        )
    if asked.engine == "optimum-habana" and asked.precision == "int4":
        yield from _four_bits(asked)


def _mode(asked: Asked) -> Iterator[Refusal]:
    wanted = asked.parameters.get("hpu_mode")
    if wanted is None:
        return
    if asked.device != "hpu":
        yield Refusal(
            setting="hpu_mode",
            reason=f"{asked.device} has no such mode; it is one of Gaudi cards",
            unsupported=True,
        )
    elif hpu_mode(asked.engine, asked.parameters) == "lazy" and asked.engine != "optimum-habana":
        yield Refusal(
            setting="hpu_mode",
            reason=f"the engine {asked.engine} does not cut graphs, which lazy mode collects",
            hint="leave hpu_mode out, or write engine: optimum-habana",
            unsupported=True,
        )


def _four_bits(asked: Asked) -> Iterator[Refusal]:
    from workloads.engines import gaudi_quantization

    if asked.cards > 1:
        yield Refusal(
            setting="cards",
            reason="checkpoints in 4 bits run on one Gaudi card",
            unsupported=True,
        )
    try:
        directory = Path(find_model(asked.model).location)
        config = read_config(directory) if directory.is_dir() else None
    except (WorkloadError, OSError):
        return  # the job itself will look
    if config is not None and gaudi_quantization.four_bit_method(config) is None:
        named = ", ".join(gaudi_quantization.FOUR_BIT)
        yield Refusal(
            setting="precision",
            reason=f"int4 on Gaudi takes checkpoints that are quantised already ({named}); "
            f"{asked.model} is not",
            unsupported=True,
        )
