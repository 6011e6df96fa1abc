"""BERT pretraining by optimum-habana in one process under the stand-in, and as a gang of two.

Prints what each job measured as JSON: fresh weights and a checkpoint's, in fp32 and under bf16
autocast; two cards; and the same job by Nightgrid's own loop on the same card. The mode of the
process is the argument: lazy or compile.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from finetuning_cases import PRETRAINING
from finetuning_cases import request as asked
from generation_cases import Worker
from rows_of import gang, values_of

from workloads import finetuning
from workloads.base import MeasureSettings, Request
from workloads.devices import device_for
from workloads.devices.base import torch_compilations
from workloads.engines.optimum_habana import prepare


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


def main(mode: str) -> None:
    import torch

    torch.set_num_threads(1)
    device = device_for("hpu")
    prepare(device)
    done: dict[str, Any] = {}
    if mode == "lazy":
        done["gang"] = gang(finetuning.run, job(mode, batch_size=2), Worker().context())

    def run(**given: Any) -> dict[str, Any]:
        before = torch_compilations().graphs or 0
        result = finetuning.run(job(mode, **given), replace(Worker().context(), device=device))
        return values_of(result) | {"graphs": (torch_compilations().graphs or 0) - before}

    done["fresh"] = run()
    done["mixed"] = run(autocast="bf16")
    done["own loop"] = run(engine="transformers")
    if mode == "lazy":
        done["checkpoint"] = run(initial_weights="checkpoint")
    print("ROWS", json.dumps(done), flush=True)


main(sys.argv[1])
