"""Rules of strategies beside other settings: what this version cannot do together. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from workloads.base import JobDescription, Refusal
from workloads.finetuning_method import method_name
from workloads.parallel.layout import divides_weights

#: DeepSpeed's, by stage.
ZERO = ("zero0", "zero1", "zero2", "zero3")


def combination_refusals(
    asked: JobDescription, strategy: str | None, tensor: int
) -> Iterator[Refusal]:
    """Objections to a strategy, on several cards, beside a job's other settings.

    Args:
        strategy: of the job; None: ddp.
        tensor: cards that split each matrix.
    """
    if tensor > 1:
        yield from _with_tensor_parallel(asked)
    if strategy in ZERO:
        yield from _with_deepspeed(asked, strategy, tensor)
    if strategy == "fsdp2":
        yield from _with_fsdp2(asked, tensor)


def driven_by_deepspeed(asked: JobDescription) -> bool:
    """Tell if DeepSpeed's engine runs the model's passes and steps."""
    return asked.cards > 1 and asked.parameters.get("strategy") in ZERO


def whole_weights_refusals(
    asked: JobDescription, setting: str, *, value: str, instead: str = ""
) -> Iterator[Refusal]:
    """Objections to a technique that reads whole weights, and was tried with strategies of
    PyTorch's own only.

    Args:
        setting: of the technique.
        value: that it is set to.
        instead: what would be right as well as another strategy; "": to leave the setting out.
    """
    if asked.cards > 1 and divides_weights(asked.parameters, asked.cards):
        reason = f"{value} reads whole weights, of which each card has a part here"
    elif driven_by_deepspeed(asked):
        reason = f"DeepSpeed drives the model, and {value} was not tried with it"
    else:
        return
    hint = f"write strategy: ddp, or {instead or f'leave {setting} out'}"
    yield Refusal(setting=setting, reason=reason, hint=hint, unsupported=True)


def _with_tensor_parallel(asked: JobDescription) -> Iterator[Refusal]:
    parameters = asked.parameters
    method = method_name(parameters)
    if method not in ("full", "lora"):
        yield _cannot("method", f"{method} over split matrices; full and lora do")
    if parameters.get("autocast") == "fp16":
        yield _cannot("autocast", "loss scaling over split matrices")
    if parameters.get("save_adapter"):
        yield _cannot("save_adapter", "keeping an adapter that is split over cards")


def _with_deepspeed(asked: JobDescription, strategy: str, tensor: int) -> Iterator[Refusal]:
    parameters = asked.parameters
    if tensor > 1 and strategy != "zero1":
        yield _cannot("tensor_parallel", f"{strategy} of split matrices; zero1 does")
    elif tensor > 1 and parameters.get("save_every"):
        yield _cannot("save_every", f"checkpoints of {strategy} over split matrices; ddp has")
    elif tensor == asked.cards:
        yield Refusal(
            setting="tensor_parallel",
            reason=f"{strategy} divides the optimizer's state among copies of the model, "
            "and there is one",
            hint=f"write a tensor_parallel below {asked.cards}, or strategy: tensor-parallel",
        )
    method = method_name(parameters)
    if method == "qlora" or (method.startswith("qat") and strategy == "zero3"):
        yield _cannot("method", f"{method} under {strategy}; strategy ddp does")
    if parameters.get("autocast", "none") != "none":
        yield Refusal(
            setting="autocast",
            reason="DeepSpeed switches torch's autocast off inside its engine",
            hint="write precision: bf16 (fp32 master weights), or strategy: ddp",
            unsupported=True,
        )
    if parameters.get("optimizer", "adamw") != "adamw":
        yield _cannot("optimizer", f"{parameters['optimizer']} under DeepSpeed; adamw does")
    if asked.precision == "fp16":
        yield _cannot("precision", "fp16 weights under DeepSpeed; bf16 does")


def _with_fsdp2(asked: JobDescription, tensor: int) -> Iterator[Refusal]:
    parameters = asked.parameters
    if tensor > 1:
        yield _cannot("tensor_parallel", "fsdp2 of split matrices; ddp and zero1 do")
    method = method_name(parameters)
    if method not in ("full", "lora"):
        yield _cannot("method", f"{method} under fsdp2; full and lora do")
    if parameters.get("autocast") == "fp16":
        yield _cannot("autocast", "loss scaling under fsdp2; bf16 needs none")
    if parameters.get("profile"):
        yield _cannot("profile", "profile that puts divided weights back; zero3 and ddp have")
    optimizer = parameters.get("optimizer", "adamw")
    if not optimizer.startswith("adamw") or "8bit" in optimizer:
        yield _cannot("optimizer", f"{optimizer} of divided weights; adamw does")


def _cannot(setting: str, what: str) -> Refusal:
    return Refusal(setting=setting, reason=f"this version has no {what}", unsupported=True)
