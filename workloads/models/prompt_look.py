"""The look at the prompts that jobs will read: which the chat template refuses, which are too long.

No torch: conversations are rendered as at night, and texts that could be too long (a token has at
least a byte) are tokenized by the model's tokenizer.json, in the process with limits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from workloads.base import JobDescription, Refusal, WorkloadError
from workloads.data.datasets import Reading, changed_at, placed_examples, reading_of
from workloads.data.shapes import Turn
from workloads.inspection.look import READER, state_of
from workloads.inspection.process import Ended
from workloads.inspection.tokenizers import chat_template, compiled, special_tokens
from workloads.models.catalog import known_config, model_here, positions_of
from workloads.models.prompts import message_of, turns_of
from workloads.models.rules import narrow_layers
from workloads.registry import ENGINES

#: Seconds after which the look at the prompts of one dataset ends.
LOOK_S = 1.0


@dataclass(slots=True, kw_only=True)
class PromptLook:
    """Counts of prompts, and the first of each kind."""

    count: int = 0  # prompts that were looked at
    usable: int = 0  # those that the template takes and that are not skipped
    refused: int = 0  # by the chat template
    first_refused: str = ""
    long: int = 0  # of more tokens than there is room for
    first_long: str = ""
    unknown: int = 0  # perhaps as long: no tokenizer.json says
    ended: bool = False  # before the last prompt


def prompt_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Refuse data of which a job could use too little, by the prompts that it will read."""
    looked_at = _look(job)
    if looked_at.refused > looked_at.usable:
        yield Refusal(
            setting="dataset",
            reason=f"the chat template of {job.model} refuses {looked_at.refused:,} of its "
            f"{looked_at.count:,} conversations; the first: {looked_at.first_refused}",
            hint="take a model whose template takes such turns, or other data",
        )
    elif looked_at.long and job.parameters.get("too_long") == "error":
        yield Refusal(
            setting="too_long",
            reason=f"{looked_at.long:,} of {looked_at.count:,} prompts of {job.dataset} leave "
            f"{job.model} no room for its output_tokens; the first: {looked_at.first_long}",
            hint="write too_long: cut, or skip; or set input_tokens",
        )


def prompt_notes(job: JobDescription) -> Iterator[str]:
    """Say which prompts are left out or cut, and what could not be looked at."""
    looked_at = _look(job)
    of = f"{looked_at.count:,} prompts of {job.dataset} with {job.model}"
    if looked_at.refused:
        yield (
            f"{looked_at.refused:,} of {of} are left out: the chat template refuses them; the "
            f"first: {looked_at.first_refused}"
        )
    if looked_at.long:
        fate = "cut" if job.parameters.get("too_long") == "cut" else "left out"
        first = looked_at.first_long
        yield f"{looked_at.long:,} of {of} are too long and {fate}; the first: {first}"
    if looked_at.unknown:
        yield (
            f"{looked_at.unknown:,} of {of} may be too long: they are counted when the model "
            "loads, since it has no tokenizer.json"
        )
    if looked_at.ended:
        yield f"only the first {of} were looked at, in {LOOK_S:g} s"


def _look(job: JobDescription) -> PromptLook:
    """Look at the prompts of a job, if its model and data are here; embedded ones are our own."""
    entry, config = model_here(job.model), known_config(job.model) or {}
    causal = not config.get("is_encoder_decoder") and config.get("model_type") != "chatglm"
    if entry is None or entry.kind == "embedded" or not causal:
        return PromptLook()
    learned = "samples" in job.parameters
    size = job.batch_size if isinstance(job.batch_size, int) and not learned else 1
    return _looked_at(
        entry.location,
        state_of(Path(entry.location)),
        job.dataset,
        changed_at(job.dataset),
        reading_of(job),
        count=max(int(job.parameters["samples" if learned else "prompts"]), size * job.cards),
        room=None if learned else _room(job, config),
        learned=learned,
        skips=job.parameters.get("too_long") == "skip",
    )


def _room(job: JobDescription, config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a prompt; None if there is no limit, or none that a job keeps."""
    limits = [positions_of(config) or 0]
    engine = ENGINES.get(job.engine)
    if engine is not None and engine.sees_whole_texts:
        limits.append(min(narrow_layers(config).values(), default=0))
    room = min(filter(None, limits), default=0) - int(job.parameters.get("output_tokens") or 0)
    return room if room > 0 and job.parameters.get("input_tokens") is None else None


@lru_cache(maxsize=256)
def _looked_at(
    directory: str,
    _state: str,
    dataset: str,
    _changed_at_ns: int,
    reading: Reading,
    **options: Any,
) -> PromptLook:
    how = dataclasses.asdict(reading)
    try:
        answer = READER.call(
            f"{__name__}:examine", directory=directory, dataset=dataset, reading=how, **options
        )
    except Ended:  # what hangs in the template of one turn is refused by the look at the model
        return PromptLook(ended=True)
    return PromptLook(**answer)


def examine(
    directory: str,
    dataset: str,
    reading: Mapping[str, str],
    *,
    count: int,
    room: int | None,
    learned: bool,
    skips: bool,
) -> dict[str, Any]:
    """Return a ``PromptLook`` as values; for the process that reads what strangers made.

    A job reads ``count`` prompts of at most ``room`` tokens (None: any number). ``learned``: the
    answers are rendered, too; ``skips``: another prompt is read in the place of one that is too
    long.
    """
    place, look = Path(directory), PromptLook()
    try:
        render = _renderer(place)
        tokenizer = cache(lambda: _tokenizer(place))
        until = time.monotonic() + LOOK_S
        for where, example in placed_examples(dataset, Reading(**reading)):
            if look.usable == count:
                break
            if time.monotonic() > until:
                look.ended = True
                break
            look.count += 1
            turns = turns_of(example.content, example.earlier)
            try:
                text = render(turns, True)
                if learned and example.summary:
                    render((*turns, Turn(role="assistant", text=example.summary)), False)
            except MemoryError:
                raise
            except Exception as error:  # templates raise anything
                look.refused += 1
                look.first_refused = look.first_refused or f"{where}: {error}"[:300]
                continue
            tokens = 0
            if room is not None and len(text.encode()) > room:
                if tokenizer() is None:
                    look.unknown += 1
                else:
                    tokens = len(tokenizer().encode(text, add_special_tokens=False).ids)
            if is_long := room is not None and tokens > room:
                look.long += 1
                first = f"{where} has {tokens:,} tokens, and there is room for {room:,}"
                look.first_long = look.first_long or first
            look.usable += not (skips and is_long)
    except WorkloadError:
        return {}  # of the template or the data, and named by the look at these
    return dataclasses.asdict(look)


def _renderer(place: Path) -> Callable[[Sequence[Turn], bool], str]:
    """Return a function from turns to text, by a model's chat template or else as paragraphs."""
    _, template = chat_template(place)
    if not template:
        return lambda turns, answers: "\n\n".join(turn.text for turn in turns)
    render, tokens = compiled(template), special_tokens(place)
    return lambda turns, answers: render([message_of(t) for t in turns], tokens, answers=answers)


def _tokenizer(place: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(place / "tokenizer.json"))
    except Exception:  # the library raises no other class
        return None
