"""Rules that a plan reads from the files of a model of texts: a tokenizer, room for positions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from workloads.base import JobDescription, Refusal, WorkloadError
from workloads.engines import ENGINES
from workloads.models.catalog import ModelEntry, find_model, refuse_name
from workloads.models.checkpoint_files import has_tokenizer, protected_files, read_config
from workloads.models.checkpoint_kind import CheckpointKind
from workloads.models.known_config import known_config, positions_of
from workloads.models.quantized_checkpoints import precisions_of, unreadable
from workloads.models.reach import narrow_layers


def no_tokenizer(directory: str, kind: CheckpointKind) -> tuple[str, str]:
    """Words for a missing tokenizer, and what to do about it for such a model."""
    glm = kind.model_type in ("glm", "chatglm")
    return f"{directory} has no tokenizer", (
        "put ChatGLM3's tokenizer.model beside its weights and convert again"
        if glm
        else "put tokenizer.json, or the files it is made of, of the model's own repository there"
    )


def saving_refusals(model: str, name: str | None) -> Iterator[Refusal]:
    """Objections to keeping what a job makes of ``model`` under a name; None: it keeps nothing."""
    if name is None:
        return
    if taken := refuse_name(name):
        yield Refusal(
            setting="save_model", reason=taken, hint="choose a name that nothing else has"
        )
    if is_protected(model):
        yield Refusal(
            setting="save_model",
            reason=f"{model} is protected, and what is saved would lie in the clear",
            hint="leave save_model out, or train from the weights in the clear",
        )


def is_protected(model: str) -> bool:
    """Tell if a model that lies here has protected weights."""
    try:
        return bool(protected_files(Path(find_model(model, weights=False).location)))
    except (WorkloadError, OSError):
        return False


def text_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """Objections to a job over texts; where the model's files are not here yet, by its config
    alone, or none."""
    try:
        entry = find_model(asked.model, weights=False)
        if entry.checkpoint.pipeline:
            return
        directory = Path(entry.location)
        if os.path.isfile(directory / "config.json"):
            yield from _file_refusals(asked, entry, directory)
    except (WorkloadError, OSError):
        return  # whoever looks for the model says so
    yield from _position_refusals(asked)


def _file_refusals(asked: JobDescription, entry: ModelEntry, directory: Path) -> Iterator[Refusal]:
    """Objections by the files of a model."""
    parameters = asked.parameters
    if not has_tokenizer(directory) and not parameters.get("tokenizer"):
        if entry.kind != "random":
            reason, hint = no_tokenizer(entry.location, entry.checkpoint)
            yield Refusal(setting="model", reason=reason, hint=hint)
        elif parameters.get("input_tokens", 0) is None:
            yield Refusal(
                setting="model",
                reason=f"{asked.model} has no tokenizer, so prompts have no length of their own",
                hint="set input_tokens, 512 for instance; or name random:DIRECTORY of one that "
                "has the model's tokenizer beside its config.json",
            )
    engine = ENGINES.get(asked.engine)
    if entry.kind == "random" and engine is not None and engine.own_loader:
        yield Refusal(
            setting="model",
            reason=f"the engine {engine.name} reads weights from files, and {asked.model} has none",
            hint="leave out `engine:`, or name a checkpoint",
            unsupported=True,
        )
    own = engine is not None and engine.own_loader
    if not own and (reason := unreadable(read_config(directory))):
        yield Refusal(
            setting="model",
            reason=f"{asked.model} cannot be read: {reason}",
            hint="name the model that it was made from, or another checkpoint of it",
            unsupported=True,
        )
    if protected_files(directory):
        shared = int(parameters.get("tensor_parallel") or 1) > 1
        if shared or engine is None or not engine.opens_protected:
            reader = "tensor_parallel" if shared else f"the engine {asked.engine}"
            yield Refusal(
                setting="model",
                reason=f"{reader} reads weights from files, and those of {asked.model} are "
                "protected",
                hint="name the model as it was before `nightgrid protect`, or another engine",
                unsupported=True,
            )


def quantised_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """Objections to generating with a quantised checkpoint: it has its precision, and is no
    reference of its own quality."""
    engine = ENGINES.get(asked.engine)
    try:
        directory = Path(find_model(asked.model, weights=False).location)
    except (WorkloadError, OSError):
        return
    right = precisions_of(known_config(asked.model) or {}, directory, asked.on)
    if right and asked.precision not in right and engine is not None and not engine.own_loader:
        yield Refusal(
            setting="precision",
            reason=f"{asked.model} is quantised already, and runs in {' or '.join(right)} here",
            hint=f"write precision: {right[0]}",
        )
    compared = asked.parameters.get("quality") and not asked.parameters.get("quality_of")
    if compared and right and "fp32" not in right:
        yield Refusal(
            setting="quality",
            reason=f"the reference is in fp32, and {asked.model} is quantised",
            hint="write quality_of: the model that it was made from",
        )


def _position_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """More tokens to read and to write than the model has positions, or sees at once."""
    config = known_config(asked.model) or {}
    positions, engine = positions_of(config), ENGINES.get(asked.engine)
    wanted = {name: asked.parameters.get(name) or 0 for name in ("input_tokens", "output_tokens")}
    longest = max(wanted, key=lambda name: wanted[name])
    window = min(narrow_layers(config).values(), default=0)
    if engine is not None and engine.sees_whole_texts and 0 < window < sum(wanted.values()):
        yield Refusal(
            setting=longest,
            reason=f"{sum(wanted.values()):,} tokens in and out are more than the {window:,} that "
            f"layers of the model see, and the engine {engine.name} sees them all",
            hint=f"input_tokens and output_tokens may be {window:,} together",
            unsupported=True,
        )
    if positions is None:
        return
    if config.get("is_encoder_decoder"):  # the encoder reads, the decoder writes
        yield from too_long(longest, wanted[longest], positions)
    elif sum(wanted.values()) > positions:
        yield Refusal(
            setting="input_tokens" if wanted["input_tokens"] else "output_tokens",
            reason=f"{sum(wanted.values()):,} tokens in and out are more than the model's "
            f"{positions:,} positions",
            hint=f"input_tokens and output_tokens may be {positions:,} together",
        )


def too_long(setting: str, tokens: int, positions: int) -> Iterator[Refusal]:
    """An objection to a length beyond the model's positions."""
    if tokens > positions:
        yield Refusal(
            setting=setting,
            reason=f"{tokens:,} tokens are more than the model's {positions:,} positions",
            hint=f"write {setting}: {positions}, or less",
        )
