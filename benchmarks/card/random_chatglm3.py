"""A ChatGLM3-6B of full size with random weights, in transformers' native layout, on local disk.

python -m benchmarks.card.random_chatglm3 DIRECTORY
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from workloads.models.chatglm3 import layout
from workloads.models.chatglm3.layout import Sizes
from workloads.models.chatglm3.tokenizer import write_tokenizer
from workloads.models.embedded.tiny_chatglm3 import pieces

SIZES = Sizes(
    hidden=4096,
    layers=28,
    heads=32,
    kv_heads=2,
    head_dim=128,
    intermediate=13696,
    vocabulary=65024,
)
ENDS = [2, 64795, 64797]
FILES = 8


def main(directory: Path) -> None:
    """Write configuration, tokenizer and weights; the weights are drawn on the card."""
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    config = layout.native_config(SIZES, eos_token_ids=ENDS, max_positions=8192)
    (directory / "config.json").write_text(json.dumps(config | {"random_weights": True}))
    generation = {"bos_token_id": 1, "eos_token_id": ENDS, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(directory, pieces(), 8192)
    shapes = layout.native_shapes(SIZES)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    groups: list[list[str]] = [[] for _ in range(FILES)]
    filled = 0
    for name, shape in shapes.items():
        groups[min(FILES - 1, filled * FILES // parameters)].append(name)
        filled += math.prod(shape)
    draw = torch.Generator(device="cuda").manual_seed(0)

    def weights(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], dtype=torch.bfloat16)
        drawn = torch.randn(shapes[name], generator=draw, device="cuda") * 0.02
        return drawn.to(torch.bfloat16).cpu()

    index, writers = {}, []
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{FILES:05d}.safetensors"
        index |= dict.fromkeys(names, file)
        writers.append(
            threading.Thread(
                target=save_file,
                args=({name: weights(name) for name in names}, str(directory / file)),
                kwargs={"metadata": {"format": "pt"}},
            )
        )
        writers[-1].start()
    for writer in writers:
        writer.join()
    told = {"metadata": {"total_size": 2 * parameters}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(told))
    print(f"{parameters:,} parameters written in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
