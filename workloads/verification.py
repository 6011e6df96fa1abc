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
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from workloads.inspection.checkpoints import fingerprint
from workloads.models.loading import open_model
from workloads.models.precision import quantized
from workloads.registry import WorkloadSpec
from workloads.settings import ADAPTER, amount, setting
from workloads.text_generation import refuse
from workloads.training.adapters import find_adapter

if TYPE_CHECKING:
    import torch


class VerificationParameters(DatasetParameters):
    """An engine's greedy tokens and logits against those of stock transformers."""

    prompts: int = amount(
        4, always_in_id=True, le=1000, description="How many prompts of the dataset are compared."
    )
    output_tokens: int = amount(
        16, always_in_id=True, le=4096, description="How many tokens after each prompt."
    )
    attention: Literal["eager", "sdpa", "flash_attention_2"] = setting(
        "sdpa",
        role="choice",
        loads=True,
        always_in_id=True,
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
_TAIL = 2000


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
    """Return the reference's answer, computed if not in the node's cache.

    Raises:
        DataMissing: model or adapter is missing.
        BadConfiguration: stock transformers cannot run it; has the end of its log.
    """
    import transformers
    from safetensors.torch import load_file

    key = [transformers.__version__, asdict(question)]
    key.append(fingerprint(Path(open_model(question.model, protected=True).path)))
    if question.adapter:
        key.append(fingerprint(find_adapter(question.adapter)))
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = f"reference-{_RECIPE}-{digest}"
    directory = cached_directory(name, lambda to: _compute_apart(question, to))
    return Reference(**load_file(directory / _FILE))


def _compute_apart(question: Question, directory: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PT_HPU", "HABANA"))}
    environment |= environment_for(host_device().name, 0)
    environment["PT_HPU_LAZY_MODE"] = "0"  # else transformers looks for the bridge
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    done = subprocess.run(
        [sys.executable, "-m", "workloads.verification", str(directory)],
        input=json.dumps(asdict(question)),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise BadConfiguration(
            f"stock transformers cannot run {question.model} on the CPU: {done.stdout[-_TAIL:]}"
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """First position at which an engine chose another token than the reference."""

    prompt: int
    step: int
    token: int
    reference_token: int
    margin: float  # by how much the reference preferred its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Distance between two sets of greedy texts and their logits."""

    compared_steps: int
    all_steps: int
    largest_difference: float  # of any logit, over all compared steps
    mean_difference: float
    spread: float  # standard deviation of the reference's logits, to see differences against
    partings: tuple[Parting, ...]

    @property
    def near_tie_bound(self) -> float:
        """Distance below which two logits may swap: each may be off by the largest difference."""
        return 2 * self.largest_difference

    @property
    def near_ties(self) -> int:
        """Number of partings that are at a near tie."""
        return sum(parting.margin <= self.near_tie_bound for parting in self.partings)

    def metrics(self) -> dict[str, float]:
        """Its figures, by the names that the task declares."""
        return {
            "largest_logit_difference": self.largest_difference,
            "mean_logit_difference": self.mean_difference,
            "logit_spread": self.spread,
            "compared_tokens": self.compared_steps,
            "reference_tokens": self.all_steps,
            "near_ties": self.near_ties,
            "near_tie_bound": self.near_tie_bound,
        }

    def verdict(self, precision: str) -> str:
        """Say if they agree, in one of the words above."""
        if quantized(precision):
            return QUANTIZED
        rounding = self.largest_difference <= _ROUNDING[precision] * self.spread
        if not rounding or self.near_ties < len(self.partings):
            return NO
        return NEAR_TIES if self.partings else EQUAL

    def details(self, precision: str) -> dict[str, Any]:
        """Further details for the row."""
        details = {
            "agrees": self.verdict(precision),
            "reference": "stock transformers on the CPU, one prompt at a time",
        }
        if self.partings:
            first = self.partings[0]
            details["first_parting"] = (
                f"prompt {first.prompt}, token {first.step}: {first.token} instead of "
                f"{first.reference_token}, which the reference preferred by {first.margin:.3g}"
            )
        return details


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
    agreement = compare(tokens, logits, answer(question))
    return result_of(
        engine,
        dataset,
        sample,
        metrics=agreement.metrics(),
        details=agreement.details(request.precision),
    )


def compare(
    tokens: Sequence[Sequence[int]], logits: Sequence[torch.Tensor], reference: Reference
) -> Agreement:
    """Compare up to each prompt's first difference; ``logits`` are float32 [steps, vocabulary]."""
    largest, total, compared, partings = 0.0, 0.0, 0, []
    for prompt, (mine, my_logits) in enumerate(zip(tokens, logits, strict=True)):
        theirs, their_logits = reference.tokens[prompt].tolist(), reference.logits[prompt]
        parted = next((n for n, token in enumerate(theirs) if mine[n] != token), None)
        steps = len(theirs) if parted is None else parted + 1
        # Output layers may be padded to different sizes.
        width = min(my_logits.shape[-1], their_logits.shape[-1])
        apart = (my_logits[:steps, :width] - their_logits[:steps, :width]).abs()
        largest = max(largest, float(apart.max()))
        total += float(apart.mean()) * steps
        compared += steps
        if parted is not None:
            row = their_logits[parted]
            partings.append(
                Parting(
                    prompt=prompt,
                    step=parted,
                    token=mine[parted],
                    reference_token=theirs[parted],
                    margin=float(row[theirs[parted]] - row[mine[parted]]),
                )
            )
    return Agreement(
        compared_steps=compared,
        all_steps=int(reference.tokens.numel()),
        largest_difference=largest,
        mean_difference=total / max(compared, 1),
        spread=float(reference.logits.std()),
        partings=tuple(partings),
    )
