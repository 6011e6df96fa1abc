"""Verification of an engine against stock transformers.

The engine generates greedily on its card; stock transformers does so on the CPU, prompt by prompt
without padding, in an unpatched process without accelerators (cached on the node). Logits are
compared up to and including the first step at which the tokens differ.

In 16 bits rounding may flip the choice between nearly equal logits (a *near tie*); engines agree if
nothing else makes the texts differ. For quantized models the difference is a result, not a fault.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workloads.base import (
    TOKENS,
    BadConfiguration,
    JobContext,
    MeasureSettings,
    Request,
    Result,
)
from workloads.data.cache import cached_directory
from workloads.data.datasets import DatasetParameters, load_dataset
from workloads.devices import device_for, environment_for, host_device
from workloads.engines import default_engine, engine_function
from workloads.engines.loaded import EngineLoader, Generation
from workloads.engines.passes import continued, result_of
from workloads.models.loading import open_model
from workloads.models.precision import quantized
from workloads.registry import WorkloadSpec
from workloads.settings import ADAPTER, amount_in_id, choice_in_id
from workloads.text_generation import refuse
from workloads.training.saved_adapters import find_adapter
from workloads.util.contents import fingerprint

if TYPE_CHECKING:
    import torch


class VerificationParameters(DatasetParameters):
    """An engine's greedy tokens and logits against those of stock transformers."""

    prompts: int = amount_in_id(
        4, le=1000, description="How many prompts of the dataset are compared."
    )
    output_tokens: int = amount_in_id(16, le=4096, description="How many tokens after each prompt.")
    attention: Literal["eager", "sdpa", "flash_attention_2"] = choice_in_id(
        "sdpa",
        loads=True,
        description="Attention implementation of the engine, as in text-generation.",
    )
    adapter: str | None = ADAPTER


SPEC = WorkloadSpec(
    name="verification",
    function="workloads.verification:run",
    parameters=VerificationParameters,
    summary="An engine's greedy tokens and logits against those of stock transformers.",
    ability="generate",
    tasks=("causal-lm",),
    throughput=TOKENS,
    refuse=refuse,
    moved={"hpu_mode": None},
)


_FILE = "reference.safetensors"
#: Raise when what is computed changes: it is in the cache's keys.
_RECIPE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Request to the reference: greedy tokens after each prompt, past any end of text."""

    model: str
    adapter: str | None
    precision: str  # "fp32" or "bf16"
    prompts: Sequence[Sequence[int]]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Tokens and logits of the reference."""

    tokens: torch.Tensor  # [prompts, steps]
    logits: torch.Tensor  # [prompts, steps, vocabulary], float32


def answer(question: Question) -> Reference:
    """Return the reference's answer, computed if not in the node's cache; BadConfiguration, with
    the end of the log, if stock transformers cannot run it."""
    import transformers
    from safetensors.torch import load_file

    key = [transformers.__version__, asdict(question)]
    key.append(fingerprint(Path(open_model(question.model, protected=True).path)))
    if question.adapter:
        key.append(fingerprint(find_adapter(question.adapter)))
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]

    def compute_apart(directory: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PT_HPU", "HABANA"))}
        kept |= environment_for(host_device().name, 0)
        kept["PT_HPU_LAZY_MODE"] = "0"  # else transformers looks for the bridge
        kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
        done = subprocess.run(
            [sys.executable, "-m", "workloads.verification", str(directory)],
            input=json.dumps(asdict(question)),
            env=kept,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise BadConfiguration(
                f"stock transformers cannot run {question.model} on the CPU: {done.stdout[-2000:]}"
            )

    directory = cached_directory(f"reference-{_RECIPE}-{digest}", compute_apart)
    return Reference(**load_file(directory / _FILE))


def compute(question: Question, directory: Path) -> None:
    """Generate for each prompt and write tokens and logits; in the process of the reference."""
    import torch
    from safetensors.torch import save_file

    request = Request(
        workload="text-generation",
        model=question.model,
        dataset="",
        precision=question.precision,
        batch_size=1,
        engine=default_engine("generate"),
        residency_key="",
        parameters={"attention": "sdpa", "adapter": question.adapter},
        measure=MeasureSettings(),
    )
    device = device_for(host_device().name)
    load: EngineLoader = engine_function(request.engine, "generate", device.name)
    engine = load(request, device)
    generation = Generation(output_tokens=question.output_tokens, keep_logits=True)
    tokens, logits = [], []
    with torch.inference_mode():
        for prompt in question.prompts:
            generated = engine.generate(engine.prepare([prompt]), generation)()
            tokens.append(torch.tensor(list(generated.tokens[0])))
            logits.append(torch.cat(list(generated.logits)))
    answers = {"tokens": torch.stack(tokens), "logits": torch.stack(logits)}
    save_file(answers, directory / _FILE)


if __name__ == "__main__":
    compute(Question(**json.load(sys.stdin)), Path(sys.argv[1]))


#: Words of ``details["agrees"]``.
EQUAL, NEAR_TIES, QUANTIZED, NO = "yes", "yes, but for near ties", "quantised", "no"

#: Largest rounding error of a logit, in standard deviations of the reference's logits.
_ROUNDING = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.25}


def run(request: Request, context: JobContext) -> Result:
    """Compare an engine with the reference; see ``workloads.base.Workload``."""
    parameters = VerificationParameters.model_validate(dict(request.parameters))
    context.device.seed(0)
    context.enter_phase("load")
    load: EngineLoader = engine_function(request.engine, "generate", context.device.name)
    engine = load(request, context.device)
    dataset = load_dataset(request.dataset, parameters.reading())
    steps = parameters.output_tokens
    prompts, tokens, logits, sample = continued(
        engine, request, context, dataset, prompts=parameters.prompts, output_tokens=steps
    )
    question = Question(
        model=request.model,
        adapter=parameters.adapter,
        precision="fp32" if request.precision == "fp32" else "bf16",
        prompts=prompts,
        output_tokens=steps,
    )
    metrics, details = compare(tokens, logits, answer(question), request.precision)
    return result_of(engine, dataset, sample, metrics=metrics, details=details)


def compare(
    tokens: Sequence[Sequence[int]],
    logits: Sequence[torch.Tensor],
    reference: Reference,
    precision: str,
) -> tuple[dict[str, float], dict[str, str]]:
    """Figures and details of texts up to each prompt's first difference from the reference;
    ``logits`` are float32 [steps, vocabulary]."""
    largest, total, compared = 0.0, 0.0, 0
    margins: list[float] = []  # by which the reference preferred its own token where texts part
    details = {"reference": "stock transformers on the CPU, one prompt at a time"}
    for prompt, (mine, my_logits) in enumerate(zip(tokens, logits, strict=True)):
        theirs, their_logits = reference.tokens[prompt].tolist(), reference.logits[prompt]
        parted = next((n for n, token in enumerate(theirs) if mine[n] != token), None)
        steps = len(theirs) if parted is None else parted + 1
        # Output layers may be padded to different sizes.
        width = min(my_logits.shape[-1], their_logits.shape[-1])
        apart = (my_logits[:steps, :width] - their_logits[:steps, :width]).abs()
        apart = apart.nan_to_num(nan=math.inf, posinf=math.inf)  # no number is as far as can be
        largest = max(largest, float(apart.max()))
        total += float(apart.mean()) * steps
        compared += steps
        if parted is None:
            continue
        row, token, own = their_logits[parted], mine[parted], theirs[parted]
        margins.append(float(row[own] - row[token]))
        details.setdefault(
            "first_parting",
            f"prompt {prompt}, token {parted}: {token} instead of {own}, which the reference "
            f"preferred by {margins[-1]:.3g}",
        )
    bound = 2 * largest  # either of two logits may be off by the largest difference
    near_ties = sum(margin <= bound for margin in margins)
    spread = float(reference.logits.std())
    if quantized(precision):
        details["agrees"] = QUANTIZED
    elif not largest <= _ROUNDING[precision] * spread or near_ties < len(margins):
        details["agrees"] = NO
    else:
        details["agrees"] = NEAR_TIES if margins else EQUAL
    metrics = {
        "largest_logit_difference": largest,
        "mean_logit_difference": total / max(compared, 1),
        "logit_spread": spread,
        "compared_tokens": float(compared),
        "reference_tokens": float(reference.tokens.numel()),
        "near_ties": float(near_ties),
        "near_tie_bound": bound,
    }
    return metrics, details
