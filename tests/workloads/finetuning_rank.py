"""One rank of a fine-tuning gang, as a process: `finetuning_rank.py RANK WORLD_SIZE PORT CASES`.

CASES is a JSON object: name -> settings of a job (``finetuning_cases.request``). All run one after
another in the same gang. The last line printed is what each measured, as JSON; a job that fails
leaves its error there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from finetuning_cases import losses, request
from generation_cases import Worker

from workloads import finetuning
from workloads.collective import Rendezvous, joined
from workloads.devices import device_for


def main(rank: int, world_size: int, port: int, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=120)
    with joined(
        rendezvous=meet, rank=rank, world_size=world_size, device=device_for("cpu")
    ) as collective:
        for name, settings in cases.items():
            context = Worker().context(rank=rank, world_size=world_size, collective=collective)
            result = finetuning.run(request(**settings), context)
            found[name] = {
                "losses": losses(result),
                "items": sum(sample.items for sample in result.samples),
                "tokens": sum(sample.input_tokens for sample in result.samples),
                "details": dict(result.details),
                "trainable": result.trainable_parameter_count,
            }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
