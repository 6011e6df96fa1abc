"""Distillation: the loss as it is written, students as they are asked for, logits that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_cases import losses, small_model, train, trained, training_of

from workloads.compression import distillation
from workloads.data.datasets import load_dataset
from workloads.models.loading import load_causal_model, load_tokenizer, open_model
from workloads.training.data import encode_samples, padded
from workloads.training.methods import method_of
from workloads.training.techniques.precision import Autocast

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


def divergence_of(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    student, teacher = (torch.log_softmax(one / temperature, -1) for one in (student, teacher))
    return torch.nn.functional.kl_div(student, teacher, reduction="sum", log_target=True)


def first_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of student and teacher at the first batch of ``SMALL``, and its labels."""
    source = open_model("tiny-chatglm3")
    teacher = load_causal_model(source, dtype=torch.float32).eval()
    student = distillation.make_student(teacher, 2, None)
    reading = method_of({"samples": 8, "max_length": 48, "held_out": 4}).reading()
    examples = load_dataset("advertisegen-synthetic", reading).examples
    samples = encode_samples(examples, 4, load_tokenizer(source), source, 48).samples
    batch = padded(samples, 0)
    with torch.no_grad():
        ours, theirs = (m(**batch.arguments()).logits[:, :-1] for m in (student, teacher))
    return ours, theirs, batch.labels[:, 1:]


def test_the_divergence_is_that_of_torch_over_learned_positions() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(9, 40), torch.randn(9, 40) * 3
    labels = torch.tensor([-100, -100, 4, 5, 6, 7, 8, 9, -100])
    here = labels != -100
    reference = divergence_of(student[here], teacher[here], 2)
    torch.testing.assert_close(distillation.summed_kl(student, teacher, labels, 2.0), reference)
    largest = teacher.topk(40, dim=-1)
    found = distillation.summed_kl(student, largest.values, labels, 2.0, largest.indices)
    torch.testing.assert_close(found, reference)
    some = teacher.topk(8, dim=-1)
    both = student[here].gather(-1, some.indices[here]), some.values[here]
    found = distillation.summed_kl(student, some.values, labels, 2.0, some.indices)
    torch.testing.assert_close(found, divergence_of(*both, 2))
    alike = distillation.summed_kl(teacher, some.values, labels, 2.0, some.indices)
    assert float(alike) == pytest.approx(0, abs=1e-5), "a student that equals its teacher"


@pytest.mark.slow
def test_training_learns_from_what_plain_torch_computes_and_the_row_has_its_figures() -> None:
    result = trained(**SMALL, distillation_alpha=0.7, temperature=3.0)
    ours, theirs, labels = first_batch()
    here = labels != -100
    plain = torch.nn.functional.cross_entropy(ours[here], labels[here])
    divergence = divergence_of(ours[here], theirs[here], 3) / here.sum()
    wanted = float(0.7 * 9 * divergence + 0.3 * plain)
    assert losses(result)[0] == pytest.approx(wanted, rel=1e-4)
    metrics = result.metrics
    assert metrics["first_batch_loss_after"] < metrics["first_batch_loss_before"]
    assert metrics["held_out_kl"] > 0 and metrics["held_out_kl_before"] > 0
    assert 0 < metrics["teacher_share"] < 1
    assert metrics["student_parameters"] < metrics["teacher_parameters"]
    assert metrics["held_out_loss"] > 0 and metrics["teacher_held_out_loss"] > 0


@pytest.mark.slow
def test_a_saved_student_is_the_model_that_remains_and_may_have_a_teacher_of_its_own() -> None:
    """The divergence before a step is that of the model which another job has left."""
    still = {**SMALL, "steps": 1, "learning_rate": 1e-12}
    metrics = train(**still, autocast="bf16").metrics
    assert metrics["held_out_kl_before"] == metrics["held_out_kl"]
    few = {"cluster_bits": 2, "cluster_steps": 1, "save_model": "of-few-values"}
    shared = train(**SMALL, **few).metrics
    again = still | {"student_layers": None, "model": "of-few-values", "teacher": "tiny-chatglm3"}
    found = train(**again)
    assert found.details["teacher"] == "tiny-chatglm3, random weights"
    before = found.metrics["held_out_kl_before"]
    assert before == pytest.approx(shared["held_out_kl"], rel=1e-5)
    student, teacher = (load_causal_model(open_model(again[n])) for n in ("model", "teacher"))
    assert student.config.num_hidden_layers == 2
    assert student.generation_config.eos_token_id == teacher.generation_config.eos_token_id != 2
    assert student.generation_config.to_diff_dict() == teacher.generation_config.to_diff_dict()


@pytest.mark.slow
def test_kept_logits_teach_the_same_and_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "LARGEST", 100_000)
    usual = {**SMALL, "distillation_alpha": 0.7, "temperature": 3.0}
    computed = trained(**usual)
    first = train(**usual, teacher_logits="kept")
    assert losses(first) == pytest.approx(losses(computed), rel=1e-4)
    assert "computed in" in first.details["teacher_logits"]
    second = train(**{**usual, "temperature": 1.0, "steps": 1}, teacher_logits="kept")
    assert second.details["teacher_logits"].endswith("read")
    monkeypatch.setattr(distillation, "LARGEST", 64)
    few = train(**{**usual, "steps": 1}, teacher_logits="kept")
    assert few.details["teacher_logits"].startswith("64 largest of ")
    assert "computed in" in few.details["teacher_logits"]
    ours, theirs, labels = first_batch()
    largest, here = theirs.topk(64, dim=-1), labels != -100
    divergence = distillation.summed_kl(ours, largest.values, labels, 3.0, largest.indices)
    plain = torch.nn.functional.cross_entropy(ours[here], labels[here])
    wanted = float(0.7 * 9 * divergence / here.sum() + 0.3 * plain)
    assert losses(few)[0] == pytest.approx(wanted, rel=1e-4)


def test_logits_are_kept_by_all_that_changes_them() -> None:
    model = small_model()
    training = training_of(model)
    taught = distillation.Taught(teacher=model, directory=Path(), training=training)
    seen = {taught.arithmetic()}
    model.set_attn_implementation("eager")
    seen.add(taught.arithmetic())
    training.details["matmul_backend"] = "onednn"
    seen.add(taught.arithmetic())
    Autocast(autocast="bf16").on_model(training)
    assert len(seen | {taught.arithmetic()}) == 4


def test_students_keep_layers_or_width() -> None:
    teacher = load_causal_model(open_model("tiny-chatglm3"), dtype=torch.float32)
    student = distillation.make_student(teacher, 2, None)
    theirs, ours = teacher.state_dict(), student.state_dict()
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
        torch.testing.assert_close(ours[f"model.layers.1.{name}"], theirs[f"model.layers.2.{name}"])
    torch.testing.assert_close(ours["lm_head.weight"], theirs["lm_head.weight"])
    size = distillation.head_size(teacher.config)
    narrow: Any = distillation.make_student(teacher, 6, 2 * size)
    assert narrow.config.num_attention_heads == 2 and narrow.config.num_hidden_layers == 6
    assert narrow.dtype == torch.float32
    assert narrow(input_ids=torch.tensor([[5, 9, 77]])).logits.isfinite().all()
