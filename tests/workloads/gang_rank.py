"""One rank of a gang, as a process: `python gang_rank.py RANK WORLD_SIZE PORT CASES`.

CASES is a JSON object: name -> settings of a fine-tuning job (``finetuning_cases.request``), or
with ``generate`` those of text generation (``generation_cases.request``). All run one after another
in the same gang. The last line printed is what each measured, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import finetuning_cases
import generation_cases
import torch

from workloads import finetuning, text_generation
from workloads.collective import Rendezvous, joined
from workloads.devices import device_for


def measured(settings: dict[str, Any], rank: int, world_size: int, collective: Any) -> Any:
    """What one job measured on this rank."""
    context = generation_cases.Worker().context(
        rank=rank, world_size=world_size, collective=collective
    )
    if "generate" in settings:
        asked = generation_cases.request(**settings["generate"])
        result = text_generation.run(asked, context)
        texts = [[item.index, item.output_text] for item in result.items]
        return {"texts": texts, "details": dict(result.details)}
    result = finetuning.run(finetuning_cases.request(**settings), context)
    return {
        "losses": finetuning_cases.losses(result),
        "items": sum(sample.items for sample in result.samples),
        "tokens": sum(sample.input_tokens for sample in result.samples),
        "details": dict(result.details),
        "trainable": result.trainable_parameter_count,
    }


def main(rank: int, world_size: int, port: int, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=120)
    with joined(
        rendezvous=meet, rank=rank, world_size=world_size, device=device_for("cpu")
    ) as collective:
        found = {
            name: measured(settings, rank, world_size, collective)
            for name, settings in cases.items()
        }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
