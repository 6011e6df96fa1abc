"""Does an engine compute what stock transformers computes? Numbers, before times mean anything.

The same prompts go through the engine on its card, batched and padded as it does, and through
stock transformers on the CPU, one by one (``stock_reference.py``). Both generate greedily. As long
as both have chosen the same tokens they have read the same text, so their logits can be compared,
the ones at which they part included.

In 16 bits two correct implementations differ by rounding, and where the two best logits are closer
than that, they may choose differently: a *near tie*, and after it they write different texts. What
counts as agreement is that nothing else ever makes them part. A quantised model is another model,
and its difference is a result, not a fault: the row says how large it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workloads.base import JobContext, Request, Result
from workloads.data.datasets import load_dataset
from workloads.engines import engine_function
from workloads.engines.base import EngineLoader
from workloads.models.precision import quantized
from workloads.one_pass import continued, result_of
from workloads.stock_reference import Question, Reference, answer
from workloads.workloads.verification import VerificationParameters

if TYPE_CHECKING:
    import torch

#: Words of ``details["agrees"]``.
EQUAL, NEAR_TIES, QUANTIZED, NO = "yes", "yes, but for near ties", "quantised", "no"

#: A logit that is off by more than so many standard deviations of the reference's is no rounding.
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

    def metrics(self) -> dict[str, float]:
        """Its figures, by the names that the task declares."""
        return {
            "largest_logit_difference": self.largest_difference,
            "mean_logit_difference": self.mean_difference,
            "logit_spread": self.spread,
            "compared_tokens": self.compared_steps,
            "reference_tokens": self.all_steps,
            "near_ties": sum(self.near_ties),
            "near_tie_bound": self.near_tie_bound,
        }

    @property
    def near_tie_bound(self) -> float:
        """Two logits that are closer than this may change places: each may be off by the largest
        difference."""
        return 2 * self.largest_difference

    @property
    def near_ties(self) -> list[bool]:
        """Tell of each parting if it is at a near tie."""
        return [parting.margin <= self.near_tie_bound for parting in self.partings]

    def verdict(self, precision: str) -> str:
        """Say if they agree, in one of the words above."""
        if quantized(precision):
            return QUANTIZED
        if self.largest_difference > _ROUNDING[precision] * self.spread:
            return NO
        ties = self.near_ties
        return (NEAR_TIES if ties else EQUAL) if all(ties) else NO


def run(request: Request, context: JobContext) -> Result:
    """Compare an engine with the reference; see ``workloads.base.Workload``."""

    parameters = VerificationParameters.model_validate(dict(request.parameters))
    context.device.seed(0)
    context.enter_phase("load")
    load: EngineLoader = engine_function(request.engine, "generate", context.device.name)
    engine = load(request, context.device)
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts, tokens, logits, sample = continued(engine, request, context, dataset, parameters)
    reference = answer(
        Question(
            model=request.model,
            adapter=parameters.adapter,
            precision="fp32" if request.precision == "fp32" else "bf16",
            prompts=prompts,
            output_tokens=parameters.output_tokens,
        )
    )
    found = compare(tokens, logits, reference)
    return result_of(
        engine,
        dataset,
        sample,
        metrics=found.metrics(),
        details=details_of(found, request.precision),
    )


def compare(
    tokens: Sequence[Sequence[int]], logits: Sequence[torch.Tensor], reference: Reference
) -> Agreement:
    """Compare token by token, up to the first difference of each prompt.

    Args:
        tokens: for each prompt the engine's tokens.
        logits: for each prompt [steps, vocabulary], float32.
        reference: of the same prompts and steps.
    """
    largest, total, compared, partings = 0.0, 0.0, 0, []
    for prompt, (mine, my_logits) in enumerate(zip(tokens, logits, strict=True)):
        theirs, their_logits = reference.tokens[prompt].tolist(), reference.logits[prompt]
        parted = next((n for n, token in enumerate(theirs) if mine[n] != token), None)
        steps = len(theirs) if parted is None else parted + 1
        # A model's output layer may have more rows than the other's, of padding.
        width = min(my_logits.shape[-1], their_logits.shape[-1])
        apart = (my_logits[:steps, :width] - their_logits[:steps, :width]).abs()
        largest = max(largest, float(apart.max()))
        total += float(apart.mean()) * steps
        compared += steps
        if parted is not None:
            row = their_logits[parted]
            margin = float(row[theirs[parted]] - row[mine[parted]])
            partings.append(
                Parting(
                    prompt=prompt,
                    step=parted,
                    token=mine[parted],
                    reference_token=theirs[parted],
                    margin=margin,
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


def details_of(found: Agreement, precision: str) -> dict[str, Any]:
    """Further details of the agreement for the row."""
    details = {
        "agrees": found.verdict(precision),
        "reference": "stock transformers on the CPU, one prompt at a time",
    }
    if found.partings:
        first = found.partings[0]
        details["first_parting"] = (
            f"prompt {first.prompt}, token {first.step}: {first.token} instead of "
            f"{first.reference_token}, which the reference preferred by {first.margin:.3g}"
        )
    return details
