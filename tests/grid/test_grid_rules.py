"""Rules of workloads are asked once for jobs alike to them, and answer as if asked for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from core_cases import a_job

from orchestrator.core.job import Job, Scalar
from orchestrator.grid.diagnostics import Rule, Rules
from orchestrator.grid.parser import parse_grid
from workloads.base import JobDescription, Refusal
from workloads.registry import WORKLOADS
from workloads.rules import refusals


def job(precision: str = "bf16", batch_size: int = 1, **parameters: Scalar) -> Job:
    return a_job(
        workload="made-up",
        precision=precision,
        batch_size=batch_size,
        parameters=tuple(sorted(parameters.items())),
    )


class Counted:
    """Rules for one workload, and how often its rule was asked."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.times = 0
        self.rules = Rules(lambda rule, job: rule(job), {"made-up": self})

    def __call__(self, asked: JobDescription) -> list[Refusal]:
        self.times += 1
        return list(self.rule(asked))

    def reason(self, job: Job) -> str:
        return ", ".join(refusal.reason for refusal in self.rules.answers(job, "cpu"))


def test_a_rule_is_asked_once_for_jobs_alike_in_what_it_reads() -> None:
    def rule(job: JobDescription) -> Iterator[Refusal]:
        if job.precision == "int4":
            yield Refusal(setting="packed", reason=f"{job.batch_size} {job.parameters['packed']}")

    counted = Counted(rule)
    plain, packed = job(packed=False), job(packed=True)
    for precision, size, this in product(("bf16", "int4"), (1, 2, 3), (plain, packed)):
        expected = f"{size} {this is packed}" if precision == "int4" else ""
        assert counted.reason(replace(this, precision=precision, batch_size=size)) == expected
        assert counted.times == 2 or precision == "int4" or size == 1


@pytest.mark.parametrize("values", [(1, True), (True, 1), (0, False), (1, 1.0)])
def test_equal_values_of_other_types_are_told_apart(values: tuple[Scalar, Scalar]) -> None:
    """1, 1.0 and true are equal in Python, and are other settings."""

    def rule(asked: JobDescription) -> Iterator[Refusal]:
        yield Refusal(setting="size", reason=repr(asked.parameters["size"]))

    counted = Counted(rule)
    assert [counted.reason(job(size=value)) for value in values] == [repr(v) for v in values]


def test_fields_with_swapped_values_are_told_apart() -> None:
    def rule(asked: JobDescription) -> Iterator[Refusal]:
        if asked.precision and asked.cards > asked.batch_size:  # type: ignore[operator]
            yield Refusal(setting="cards", reason=f"{asked.cards} > {asked.batch_size}")

    counted = Counted(rule)
    for cards, size in product((2, 4, 8, 1), (4, 2, 8, 1)):
        expected = f"{cards} > {size}" if cards > size else ""
        assert counted.reason(replace(job(batch_size=size), cards=cards)) == expected


def test_a_rule_may_copy_what_it_is_given() -> None:
    def rule(job: JobDescription) -> Iterator[Refusal]:
        yield Refusal(setting="x", reason=str(replace(job, cards=2).batch_size))

    counted = Counted(rule)
    assert [counted.reason(job(batch_size=size)) for size in (1, 2, 1, 3)] == ["1", "2", "1", "3"]


GRID = """
name: many
defaults: {model: tiny-chatglm3}
experiments:
  - name: generation
    workload: text-generation
    axes:
      accelerator: [HPU, CPU]
      engine: [transformers, optimum-habana, vllm]
      precision: [fp32, int4]
      batching: [static, continuous]
      sparse_kernels: [false, true]
      hpu_mode: [null, lazy]
      attention: [sdpa, eager]
  - name: training
    workload: finetuning
    axes:
      accelerator: [HPU, CPU]
      engine: [transformers, optimum-habana]
      method: [lora, full, qlora]
      precision: [fp32, bf16, int8]
      autocast: [none, bf16]
      gradient_checkpointing: [false, true]
"""


@pytest.mark.slow
def test_the_rules_of_our_workloads_answer_as_if_asked_for_each_job() -> None:
    rules = Rules(refusals, WORKLOADS)
    refused = 0
    jobs = parse_grid(GRID.encode(), "grid").jobs()
    wrong = [replace(each, precision="fp16") for each in jobs]  # some a grid would not take
    for each, device in product((*jobs, *wrong), ("hpu", "cuda", "cpu")):
        asked = JobDescription(
            model=each.model,
            dataset=each.dataset,
            precision=each.precision,
            device=device,
            batch_size=each.batch_size,
            cards=each.cards,
            parameters=dict(each.parameters),
            engine=each.engine,
        )
        refuse = partial(refusals, WORKLOADS[each.workload])
        assert rules.answers(each, device) == tuple(refuse(asked))
        refused += bool(refuse(asked))
    assert refused > 100
