"""Jobs of optimum-habana in one process under the stand-in; prints a row of each as JSON.

The bridge is made to compile a graph, and to leave an operation to the host, whenever the card is
waited for while the clock runs: in no job, in the first timed part of one, or in every one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from finetuning_cases import parameters
from generation_cases import Worker, request
from habana_frameworks.torch.hpex import kernels
from habana_frameworks.torch.hpu import metrics

from workloads import finetuning, text_generation
from workloads.base import JobContext, MeasureSettings, Result
from workloads.devices import device_for

SETTINGS = MeasureSettings(warmup=1, min_repeats=2, max_repeats=2, time_limit_s=600)
ENGINE = {"engine": "optimum-habana", "precision": "bf16"}


class Card:
    """A worker on an emulated Gaudi card, whose bridge compiles in so many timed parts."""

    def __init__(self, timed_parts: int) -> None:
        self.worker = Worker()
        self.device = device_for("hpu")
        self.left = timed_parts
        self.synchronize, self.device.synchronize = self.device.synchronize, self.compile
        self.counted = metrics.metric_global("graph_compilation").numbers

    def compile(self) -> None:
        if self.worker.phases[-1:] == ["measure"] and self.left:
            metrics.met_graph(known=False, seconds=1.5)
            metrics.met_fallback()
        self.synchronize()

    def enter_phase(self, phase: Any) -> None:
        if self.worker.phases[-1:] == ["measure"]:
            self.left -= bool(self.left)
        self.worker.phases.append(phase)

    def run(self, workload: Any, job: Any) -> dict[str, Any]:
        before = self.counted["TotalNumber"]
        kernels.softmax_modes.clear()
        context: JobContext = replace(
            self.worker.context(), device=self.device, enter_phase=self.enter_phase
        )
        result: Result = workload(job, context)
        return {
            "timed_parts": result.timed_parts,
            "timed_compilations": result.timed_compilations,
            "timed_cpu_fallbacks": result.timed_cpu_fallbacks,
            "compiled": result.details.get("compiled_in_timed_part", ""),
            "compiled_in_all": self.counted["TotalNumber"] - before,
            "warmup_steps": result.warmup_steps,
            "warmup_end": result.warmup_end,
            "shapes": result.shapes,
            "shapes_unmet": result.shapes_unmet,
            "timed": sum(not sample.warmup for sample in result.samples),
            "loss": result.samples[-1].loss,
            "details": dict(result.details),
            "softmax": sorted(kernels.softmax_modes),
        }


def noted_configs() -> list[dict[str, Any]]:
    """The generation configs that jobs give to the library from now on."""
    from workloads.engines.optimum_habana.generation import OptimumHabanaEngine

    noted: list[dict[str, Any]] = []
    made = OptimumHabanaEngine.config

    def noting(*given: Any) -> Any:
        config = made(*given)
        noted.append({name: value for name, value in vars(config).items() if name in _ASKED})
        return config

    OptimumHabanaEngine.config = noting  # type: ignore[method-assign]
    return noted


_ASKED = (
    *("static_shapes", "trim_logits", "reuse_cache", "bucket_internal", "bucket_size"),
    *("limit_hpu_graphs", "attn_softmax_bf16", "use_flash_attention", "use_cache"),
    *("flash_attention_recompute", "flash_attention_fast_softmax"),
)


def main(dataset: str, model: str) -> None:
    """Generate with two shapes (a batch of two, a partial one), and train."""
    job = request(
        dataset,
        model=model,
        prompts=3,
        output_tokens=4,
        measure=SETTINGS,
        hpu_mode="lazy",
        **ENGINE,
    )
    small = parameters(steps=3, samples=8, max_length=64)
    # Of engines' own settings the trainer takes none.
    train = replace(
        job, workload="finetuning", parameters=small, settings={}, dataset="advertisegen-synthetic"
    )
    configs = noted_configs()
    done: dict[str, Any] = {
        f"{name} {compiles}": Card(compiles).run(workload, one)
        for compiles in (0, 1, 9)
        for name, workload, one in (
            ("generation", text_generation.run, job),
            ("training", finetuning.run, train),
        )
    }
    done["config"] = configs[-1]
    print("ROWS", json.dumps(done))


main(*sys.argv[1:])
