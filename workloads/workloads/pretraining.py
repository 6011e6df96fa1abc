"""Pretraining: a masked language model learns the words of a corpus, from fresh weights or on.

Its parameters are put together from those of all training, its own, and those of the techniques
that can do something for its models: chunks of one length leave nothing to be padded or packed.
"""

from __future__ import annotations

from typing import Literal

from workloads.base import SAMPLES, Metric, Timed
from workloads.finetuning_method import TrainingParameters
from workloads.pretraining_rules import refuse
from workloads.registry import WorkloadSpec
from workloads.settings import setting
from workloads.techniques import with_techniques

TASKS = ("masked-lm",)


class CorpusParameters(TrainingParameters):
    """Settings of what is learned from a corpus, and what is begun with."""

    initial_weights: Literal["fresh", "checkpoint"] = setting(
        "fresh",
        role="work",
        loads=True,
        description="fresh draws the weights of the model's configuration, whether or not it has "
        "any; checkpoint goes on with those it has.",
    )
    masked_share: float = setting(
        0.15,
        role="work",
        gt=0,
        lt=1,
        description="Probability with which a token is masked and learned: 80 % of them are shown "
        "as the mask token, 10 % as any token, 10 % as they are, drawn anew in every step.",
    )


PretrainingParameters = with_techniques(
    "PretrainingParameters",
    CorpusParameters,
    TASKS,
    {"learning_rate_schedule": "linear", "max_gradient_norm": 1.0},
)


def _steps_per_s(timed: Timed) -> float | None:
    """Optimizer steps over their time; a step is as slow as the slowest rank."""
    slowest: dict[tuple[int, int], float] = {}
    for sample in timed.samples:
        step = (sample.repeat, sample.batch)
        slowest[step] = max(slowest.get(step, 0.0), sample.wall_s)
    took_s = sum(slowest.values())
    return len(slowest) / took_s if took_s > 0 else None


def _hours(steps: int) -> Metric:
    """The time that so many steps take."""

    def figure(timed: Timed) -> float | None:
        rate = _steps_per_s(timed)
        return steps / rate / 3600 if rate else None

    return Metric(
        name=f"hours_for_{steps}_steps",
        title=f"{steps:,} steps",
        unit="h",
        description=f"Time for {steps:,} steps at the rate that was measured, as others trained.",
        better="lower",
        figure=figure,
    )


SPEC = WorkloadSpec(
    name="pretraining",
    function="workloads.finetuning:run",
    parameters=PretrainingParameters,
    summary="Pretraining of a masked language model on chunks of a corpus: samples/s, loss.",
    ability="train",
    tasks=TASKS,
    dataset="english-corpus-synthetic",
    fresh_weights=True,
    throughput=SAMPLES,
    metrics=(
        Metric(
            name="steps_per_s",
            title="steps",
            unit="steps/s",
            description="Optimizer steps over their time.",
            better="higher",
            figure=_steps_per_s,
        ),
        _hours(65_000),
        _hours(20_000),
    ),
    refuse=refuse,
)
