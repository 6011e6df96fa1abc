"""One rank of a text-generation gang, as a process: `python generation_rank.py RANK PORT DATASET`.

Prints what it measured as JSON. Rank 1 is slowed down, so that the ranks' clocks disagree.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from generation_cases import Worker, request

from workloads import text_generation
from workloads.api import MeasureSettings
from workloads.collective import Rendezvous, joined
from workloads.devices import device_for


def main(rank: int, port: int, dataset: str) -> None:
    torch.set_num_threads(1)
    settings = MeasureSettings(
        warmup=1, min_repeats=3, max_repeats=4, relative_half_width=1e-9, time_limit_s=600
    )
    device = device_for("cpu")
    meet = Rendezvous(address="127.0.0.1", port=port, timeout_s=120)
    with joined(rendezvous=meet, rank=rank, world_size=2, device=device) as collective:
        context = Worker().context(rank=rank, world_size=2, collective=collective)
        if rank == 1:
            wait = context.device.synchronize

            def slow() -> None:
                time.sleep(0.002)
                wait()

            context.device.synchronize = slow  # type: ignore[method-assign]
        asked = request(dataset, batch_size=3, output_tokens=8, measure=settings)
        result = text_generation.run(asked, context)
    print(
        json.dumps(
            {
                "stop_reason": result.stop_reason,
                "repeats": sorted({s.repeat for s in result.samples if not s.warmup}),
                "complete": sorted({s.repeat for s in result.samples if s.complete}),
                "items": [[item.index, item.output_text] for item in result.items],
                "sizes": [s.items for s in result.samples if s.repeat == 0],
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
