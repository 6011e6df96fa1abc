"""Channels removed from the feed-forward parts of a decoder: generation with and without them.

The same random decoder of the twin's kind, wide enough that its matrices cost more than what
surrounds them, as it is and with half of its channels. Both are ordinary dense models, which take
turns in processes of their own on the same prompts, in fp32, with fixed lengths. The interval is
Student's, of the logarithms of the turns' ratios.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates
from benchmarks.setting import Setting, Takes
from workloads.util.statistics import mean_interval

TITLE = "Generation with half of the feed-forward channels"
TAKES_S = Takes(whole=35, quick=19)
SHARE, TURNS = 0.5, 8
PLAIN, PRUNED = "all channels", "half of the channels"


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    sizes = (64, 128, 1) if setting.smoke else (512, 2048, 8)
    prompts, output_tokens, batch = (2, 4, 2) if setting.smoke else (16, 32, 8)
    counts = {
        name: make(setting.scratch / name.replace(" ", "-"), sizes, share)
        for name, share in ((PLAIN, 0.0), (PRUNED, SHARE))
    }
    asked = {"prompts": prompts, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        contenders = [
            setting.started(
                stack,
                name,
                sys.executable,
                "generate_nightgrid.py",
                *(setting.scratch / name.replace(" ", "-"), "advertisegen-synthetic"),
                *(output_tokens, batch, json.dumps(asked), "fp32", "transformers"),
            )
            for name in counts
        ]
        turns = setting.turns_of(
            contenders, warm_ups=1, turns=2 if setting.smoke else max(TURNS, setting.turns)
        )
    line = Line(
        what="tokens/s with half of the feed-forward channels",
        against="the same decoder with all of them",
        unit="tokens/s",
        ours=rates(turns[PRUNED]),
        theirs=rates(turns[PLAIN]),
        goal=Goal(kind="at least", value=1.0),
        cpu_ratio=cpu_ratio(turns[PRUNED], turns[PLAIN]),
        note=f"{counts[PRUNED] / 1e6:.1f} of {counts[PLAIN] / 1e6:.1f} million parameters",
    )
    found = mean_interval([math.log(ratio) for ratio in line.ratios])
    assert found is not None  # two turns at least
    low, mean, high = (math.exp(value) for value in (found.low, found.mean, found.high))
    return [line], {
        "turns of each": len(line.ratios),
        "geometric mean of the ratios, 95 % interval": f"{mean:.3f} ({low:.3f} to {high:.3f})",
        "hidden size, feed-forward channels, layers": list(sizes),
        "prompts, output tokens, batch size": [prompts, output_tokens, batch],
    }


def make(directory: Path, sizes: tuple[int, int, int], share: float) -> int:
    """Write the decoder, with a share of its channels removed; the number of its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from workloads.compression import pruning
    from workloads.models.loading import open_model
    from workloads.models.products import copy_tokenizer

    source = open_model("tiny-chatglm3")
    config = AutoConfig.from_pretrained(source.path)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = sizes
    config.num_attention_heads = sizes[0] // config.head_dim
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if share:
        pruning.remove_channels(model, pruning.channels_left(sizes[1], share))
    model.save_pretrained(directory)
    copy_tokenizer(Path(source.tokenizer_path), directory)
    return sum(parameter.numel() for parameter in model.parameters())
