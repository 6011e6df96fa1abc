"""Distillation: the loss as it is written, students as they are asked for, logits that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import asked, losses, refuse, train, trained, training_of

from workloads.compression import distillation
from workloads.compression.distillation import Taught
from workloads.models.loading import load_causal_model, open_model

SMALL: dict[str, Any] = {
    "method": "distill",
    "samples": 8,
    "steps": 3,
    "max_length": 48,
    "held_out": 4,
    "learning_rate": 1e-3,
    "student_layers": 2,
}


pytestmark = pytest.mark.usefixtures("shared")


def test_the_divergence_is_that_of_torch_over_learned_positions() -> None:
    """With the whole distribution, and with the largest logits where those are all there are."""
    torch.manual_seed(0)
    student, teacher = torch.randn(9, 40), torch.randn(9, 40) * 3
    labels = torch.tensor([-100, -100, 4, 5, 6, 7, 8, 9, -100])
    here = labels != -100
    reference = torch.nn.functional.kl_div(
        torch.log_softmax(student[here] / 2, -1),
        torch.log_softmax(teacher[here] / 2, -1),
        reduction="sum",
        log_target=True,
    )
    torch.testing.assert_close(distillation.summed_kl(student, teacher, labels, 2.0), reference)
    largest = teacher.topk(40, dim=-1)
    found = distillation.summed_kl(student, largest.values, labels, 2.0, largest.indices)
    torch.testing.assert_close(found, reference)
    some = teacher.topk(8, dim=-1)
    left = torch.log_softmax(some.values[here] / 2, -1)
    of_student = torch.log_softmax(student[here] / 2, -1).gather(-1, some.indices[here])
    torch.testing.assert_close(
        distillation.summed_kl(student, some.values, labels, 2.0, some.indices),
        (left.exp() * (left - of_student)).sum(),
    )


@pytest.mark.slow
def test_training_learns_from_what_plain_torch_computes() -> None:
    """The first step's loss is α·T²·KL + (1 − α)·cross entropy of the untrained student, by models
    that are loaded here and a batch that is padded here."""
    from workloads.data.datasets import load_dataset
    from workloads.models.loading import load_tokenizer
    from workloads.training.data import encode_samples, padded
    from workloads.training.methods import method_of

    result = trained(**SMALL, distillation_alpha=0.7, temperature=3.0)
    source = open_model("tiny-chatglm3")
    teacher = load_causal_model(source, dtype=torch.float32).eval()
    student = distillation.make_student(teacher, 2, None)
    reading = method_of({"samples": 8, "max_length": 48, "held_out": 4}).reading()
    examples = load_dataset("advertisegen-synthetic", reading).examples
    samples = encode_samples(examples, 4, load_tokenizer(source), source, 48)
    batch = padded(samples, 0)
    with torch.no_grad():
        ours, theirs = (m(**batch.arguments()).logits[:, :-1] for m in (student, teacher))
    labels = batch.labels[:, 1:]
    here = labels != -100
    plain = torch.nn.functional.cross_entropy(ours[here], labels[here])
    divergence = torch.nn.functional.kl_div(
        torch.log_softmax(ours[here] / 3, -1),
        torch.log_softmax(theirs[here] / 3, -1),
        reduction="batchmean",
        log_target=True,
    )
    wanted = float(0.7 * 9 * divergence + 0.3 * plain)
    assert losses(result)[0] == pytest.approx(wanted, rel=1e-4)


def test_a_row_tells_of_teacher_and_student() -> None:
    """With the teacher alone (alpha 1) the student comes nearer to it where it learned; the figures
    of both stand in the row."""
    near = {**SMALL, "learning_rate": 1e-4}
    metrics = train(**near, distillation_alpha=1.0, temperature=1.0).metrics
    assert metrics["first_batch_loss_after"] < metrics["first_batch_loss_before"]
    assert metrics["held_out_kl"] > 0 and metrics["held_out_kl_before"] > 0
    assert 0 < metrics["teacher_share"] < 1
    assert metrics["student_parameters"] < metrics["teacher_parameters"]
    assert metrics["held_out_loss"] > 0 and metrics["teacher_held_out_loss"] > 0


def test_an_attempt_that_goes_on_counts_the_teacher_of_steps_whose_beginning_is_known() -> None:
    """Its own first step has none, whatever its number."""
    training = training_of(torch.nn.Linear(2, 2))
    taught = Taught(teacher=None, directory=Path(), training=training)
    for step in (5, 6, 7):
        taught.stamps.append((float(step), step + 0.5))
        taught.end_step()
    assert taught.counted == [(6.0, 6.5), (7.0, 7.5)]


@pytest.mark.parametrize("first_step", [0, 5])
def test_only_an_attempt_from_the_beginning_tells_of_the_student_before(first_step: int) -> None:
    """One that goes on has a student that has learned."""
    training = training_of(torch.nn.Linear(2, 2))
    training.first_step = first_step
    training.held_out_loss = lambda objective=None: 1.0
    Taught(teacher=None, directory=Path(), training=training).look_at_held_out()
    assert ("held_out_kl_before" in training.metrics) == (first_step == 0)
    assert training.metrics["teacher_held_out_loss"] == 1.0


@pytest.mark.slow
def test_divergences_are_of_one_arithmetic_and_of_the_model_that_remains() -> None:
    """A job that learns next to nothing under autocast has the same one before and after; a job
    whose weights are shared in the end has that of the model it saves."""
    still = {**SMALL, "steps": 1, "learning_rate": 1e-12}
    metrics = train(**still, autocast="bf16").metrics
    assert metrics["held_out_kl_before"] == metrics["held_out_kl"]
    shared = train(**SMALL, cluster_bits=2, save_model="of-few-values").metrics
    again = {**still, "student_layers": None, "model": "of-few-values"}
    found = train(**again, teacher="tiny-chatglm3").metrics
    assert found["held_out_kl_before"] == pytest.approx(shared["held_out_kl"], rel=1e-5)


@pytest.mark.slow
def test_kept_logits_teach_the_same_and_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of a small vocabulary kept the losses are those of the teacher itself; a second job
    reads what the first has written, whatever its temperature."""
    monkeypatch.setattr(distillation, "LARGEST", 100_000)
    usual = {**SMALL, "distillation_alpha": 0.7, "temperature": 3.0}
    computed = trained(**usual)
    first = train(**usual, teacher_logits="kept")
    assert losses(first) == pytest.approx(losses(computed), rel=1e-4)
    assert "computed in" in first.details["teacher_logits"]
    second = train(**{**usual, "temperature": 1.0, "steps": 1}, teacher_logits="kept")
    assert second.details["teacher_logits"].endswith("read")


@pytest.mark.slow
def test_logits_of_another_arithmetic_are_not_read() -> None:
    """Autocast and attention are part of what is kept: the second job computes its own."""
    one = {**SMALL, "steps": 1, "held_out": 0, "max_length": 40, "teacher_logits": "kept"}
    for given in ({}, {"autocast": "bf16"}, {"attention": "eager"}):
        assert "computed in" in train(**one, **given).details["teacher_logits"], given
    assert train(**one, autocast="bf16").details["teacher_logits"].endswith("read")


def test_the_largest_64_of_each_position_are_kept() -> None:
    """No more, and learned positions alone."""
    result = train(**{**SMALL, "steps": 1, "held_out": 0}, teacher_logits="kept")
    assert result.details["teacher_logits"].startswith("64 largest of ")


def test_students_keep_layers_or_width() -> None:
    """Copied layers are the teacher's; a narrower student runs, and has its heads' size."""
    teacher = load_causal_model(open_model("tiny-chatglm3"), dtype=torch.float32)
    student = distillation.make_student(teacher, 2, None)
    theirs, ours = teacher.state_dict(), student.state_dict()
    assert distillation.layers_kept(4, 2) == [0, 2]
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
        torch.testing.assert_close(ours[f"model.layers.1.{name}"], theirs[f"model.layers.2.{name}"])
    torch.testing.assert_close(ours["lm_head.weight"], theirs["lm_head.weight"])
    size = distillation.head_size(teacher.config)
    narrow: Any = distillation.make_student(teacher, 6, 2 * size)
    assert narrow.config.num_attention_heads == 2 and narrow.config.num_hidden_layers == 6
    assert narrow.dtype == torch.float32
    assert narrow(input_ids=torch.tensor([[5, 9, 77]])).logits.isfinite().all()


@pytest.mark.slow
def test_a_student_is_saved_and_may_have_a_teacher_of_its_own() -> None:
    """The student of one job is the model of the next, which names its teacher."""
    train(**{**SMALL, "steps": 1}, save_model="student")
    student, teacher = (load_causal_model(open_model(n)) for n in ("student", "tiny-chatglm3"))
    assert student.config.num_hidden_layers == 2
    assert student.generation_config.eos_token_id == teacher.generation_config.eos_token_id != 2
    assert student.generation_config.to_diff_dict() == teacher.generation_config.to_diff_dict()
    again = {**SMALL, "steps": 1, "student_layers": None, "model": "student"}
    result = train(**again, teacher="tiny-chatglm3")
    assert result.details["teacher"] == "tiny-chatglm3, random weights"


@pytest.mark.parametrize(
    ("given", "setting", "reason"),
    [
        ({}, "method", "nothing says how they differ"),
        ({"teacher": "tiny-chatglm3"}, "teacher", "is the student as well"),
        ({"teacher": "tiny-t5"}, "teacher", "vocabulary"),
        ({"student_layers": 9}, "student_layers", "4 layers to copy"),
        ({"student_layers": 4}, "student_layers", "would be its teacher"),
        ({"student_hidden": 33}, "student_hidden", "do not divide 33"),
        ({"student_layers": 2, "teacher": "tiny-t5"}, "student_layers", "as it is"),
        ({"student_layers": 2, "method": "full"}, "student_layers", "beside method: distill"),
        (
            {"student_layers": 2, "teacher_logits": "kept", "padding": "packing"},
            "teacher_logits",
            "one sample a row",
        ),
        ({"student_layers": 2, "logits": "chunked"}, "logits", "compared by logits"),
        (
            {"student_layers": 2, "cards": 2, "strategy": "tensor-parallel"},
            "method",
            "no teacher beside a model in parts",
        ),
    ],
)
def test_what_teaches_nothing_is_refused(given: Any, setting: str, reason: str) -> None:
    """The setting is named, the reason, and what would be right."""
    found = refuse(asked(**{"method": "distill", "precision": "fp32", **given}))
    assert any(one.setting == setting and reason in one.reason and one.hint for one in found), found
