"""Nightgrid's text-generation workload, as a worker runs it.

generate_nightgrid.py MODEL DATASET OUTPUT_TOKENS BATCH_SIZE PARAMETERS.json PRECISION ENGINE
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.contender import serve
from benchmarks.contenders.alone import Alone, request


def main() -> None:
    model, dataset, output_tokens, batch_size, parameters, precision, engine = sys.argv[1:8]
    more = json.loads(parameters)
    alone = Alone()
    asked = request(
        "text-generation",
        model=model,
        dataset=dataset,
        batch_size=int(batch_size),
        precision=precision,
        engine=engine,
        parameters={"output_tokens": int(output_tokens), "keep_texts": 10**6, **more},
    )

    def turn() -> dict[str, Any]:
        result = alone.run(asked)
        items = sorted(result.items, key=lambda item: item.index)
        return {
            "work": sum(item.output_tokens for item in items),
            "wall_s": sum(sample.wall_s for sample in result.samples),
            "cpu_s": sum(sample.cpu_s for sample in result.samples),
            "computed_tokens": sum(sample.computed_tokens for sample in result.samples),
            "counts": [item.output_tokens for item in items],
            "texts": [item.output_text for item in items],
            "threads": torch.get_num_threads(),
        }

    alone.load(asked)
    serve(turn)


if __name__ == "__main__":
    main()
