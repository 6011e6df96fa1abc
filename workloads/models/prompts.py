"""From text to the ids that a model was trained to answer.

Three layouts: ChatGLM3's (``[gMASK] <sop>``, then per turn role id, newline, content;
``<|assistant|>`` at the end), the tokenizer's chat template, or plain text after the
beginning-of-sequence token. In ChatGLM3's, parts are encoded with special tokens disabled, so that
content which spells ``<|system|>`` cannot pose as a turn (prompt injection).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workloads.base import BadConfiguration, JobDescription, Refusal, WorkloadError
from workloads.data.datasets import Reading, changed_at, placed_examples, reading_of
from workloads.data.shapes import Turn
from workloads.inspection.look import READER, state_of
from workloads.inspection.process import Ended
from workloads.inspection.tokenizers import (
    chat_template,
    compiled,
    fast_tokenizer,
    fixed_date,
    has_tokenizer,
    special_tokens,
)
from workloads.models.catalog import known_config, model_here, positions_of
from workloads.models.chatglm3 import layout as chatglm3_layout
from workloads.models.chatglm3.conversion import tokenizer_directory
from workloads.models.chatglm3.tokenizer import PROMPT_LAYOUT
from workloads.models.rules import narrow_layers
from workloads.registry import ENGINES

if TYPE_CHECKING:
    from workloads.models.loading import ModelSource


class NotRendered(BadConfiguration):
    """A chat template refuses the turns of one example; another may do."""


def layout_of(tokenizer: Any) -> Literal["chatglm3", "chat-template", "plain"]:
    """Return the prompt layout of a tokenizer."""
    if getattr(tokenizer, "init_kwargs", {}).get("prompt_layout") == PROMPT_LAYOUT:
        return "chatglm3"
    return "chat-template" if getattr(tokenizer, "chat_template", None) else "plain"


def encode_prompt(
    tokenizer: Any, source: ModelSource | None, text: str, earlier: Sequence[Turn] = ()
) -> list[int]:
    """Encode ``text`` as a user turn to be answered; without a layout, turns are paragraphs."""
    layout = layout_of(tokenizer)
    turns = turns_of(text, earlier)
    if layout == "chatglm3":
        return encode_turns(tokenizer, turns)
    if layout == "chat-template":
        return _ids(tokenizer, _rendered(tokenizer, turns))
    ids = _ids(tokenizer, "\n\n".join(turn.text for turn in turns))
    if tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    if not ids:
        name = source.entry.name if source is not None else "the model"
        raise BadConfiguration(f"an empty prompt gives no token at all for {name}")
    return ids


def turns_of(text: str, earlier: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return a prompt's turns: the earlier ones, and the user's unless a tool's is the last."""
    return (*earlier, Turn(role="user", text=text)) if text or not earlier else tuple(earlier)


def encode_turns(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    """Encode a conversation in ChatGLM3's layout, up to the start of the assistant's answer."""
    ids = [_id(tokenizer, "[gMASK]"), _id(tokenizer, "<sop>")]
    for turn in turns:
        role = "observation" if turn.role == "tool" else turn.role
        ids.append(_id(tokenizer, f"<|{role}|>"))
        ids += _encode_as_text(tokenizer, "\n")
        ids += _encode_as_text(tokenizer, turn.text)
    return [*ids, _id(tokenizer, "<|assistant|>")]


def encode_answer(
    tokenizer: Any, text: str, answer: str, earlier: Sequence[Turn] = ()
) -> list[int]:
    """Encode the answer as it follows ``encode_prompt``'s ids, with the end token."""
    layout = layout_of(tokenizer)
    if layout == "chatglm3":
        ids = _encode_as_text(tokenizer, "\n") + _encode_as_text(tokenizer, answer)
    elif layout == "chat-template":
        turns = turns_of(text, earlier)
        prompt = _rendered(tokenizer, turns)
        answered = (*turns, Turn(role="assistant", text=answer))
        whole = _rendered(tokenizer, answered, answers=False)
        if not whole.startswith(prompt):  # the template rewrites answered prompts
            return _ids(tokenizer, answer + (tokenizer.eos_token or ""))
        return _ids(tokenizer, whole[len(prompt) :])
    else:
        ids = _ids(tokenizer, answer)
    return [*ids, tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else ids


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode_as_text(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    return list(encoded["input_ids"])


def _id(tokenizer: Any, token: str) -> int:
    number = tokenizer.convert_tokens_to_ids(token)
    if number is None or number == tokenizer.unk_token_id:
        raise BadConfiguration(f"the tokenizer has no {token}, which ChatGLM3's layout needs")
    return int(number)


def _rendered(tokenizer: Any, turns: Sequence[Turn], *, answers: bool = True) -> str:
    """Render as ``apply_chat_template`` does, but on one day: a prompt is the same every night."""
    messages = [message_of(turn) for turn in turns]
    try:
        render = compiled(tokenizer.get_chat_template())
        return render(messages, tokenizer.special_tokens_map, answers=answers)
    except Exception as error:  # e.g. system turns are not supported; templates raise anything
        roles = ", ".join(turn.role for turn in turns)
        raise NotRendered(
            f"the model's chat template refuses the turns {roles}: {error}"
        ) from error


def message_of(turn: Turn) -> dict[str, Any]:
    """Return a turn as templates expect it; arguments of calls are objects, not their JSON."""
    if not turn.tool_calls:
        return {"role": turn.role, "content": turn.text}
    calls = []
    for call in turn.tool_calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(function["arguments"])
                call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {"role": turn.role, "content": turn.text, "tool_calls": calls}


def prompt_details(tokenizer: Any) -> dict[str, str]:
    """Return details of a row on its prompts: the date that a dated template is given."""
    template = getattr(tokenizer, "chat_template", None)
    dated = "strftime_now" in str(template or "")
    return {"template_date": fixed_date("%Y-%m-%d")} if dated else {}


# A model's prompt layout in words, with an example and its ids if there is a tokenizer.

LAYOUTS = {
    "chatglm3": "[gMASK] <sop> then per turn: <|role|> metadata ⏎ content, then <|assistant|>",
    "chat-template": "the tokenizer's chat template",
    "plain": "beginning-of-sequence token, then the text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt layout of a model."""

    layout: str  # in words
    example: str
    tokens: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    note: str = ""


def example_prompt(config: Mapping[str, Any], directory: Path | None) -> Prompt:
    """Return the prompt layout of a native config, with an example if there is a tokenizer."""
    from transformers import AutoTokenizer

    if directory is None or not has_tokenizer(directory):
        glm = config.get("vocab_size") == chatglm3_layout.PUBLISHED_VOCABULARY
        layout = LAYOUTS["chatglm3"] if glm else "unknown"
        return Prompt(layout=layout, example="", note="no tokenizer beside the config")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(tokenizer_directory(directory)), trust_remote_code=False
        )
    except MemoryError:
        raise
    except Exception as error:  # of arbitrary files
        why = " ".join((str(error) or repr(error)).split())
        return Prompt(
            layout="unknown", example="", note=f"its tokenizer cannot be read: {why:.300}"
        )
    kind = layout_of(tokenizer)
    text = "你好" if kind == "chatglm3" else "What is a card?"
    ids = encode_prompt(tokenizer, None, text)
    return Prompt(
        layout=LAYOUTS[kind],
        example=text,
        tokens=tuple(tokenizer.convert_ids_to_tokens(ids)),
        ids=tuple(ids),
    )


# The look at the prompts that jobs will read: which the chat template refuses, which are too long.
#
# No torch: conversations are rendered as at night, and texts that could be too long (a token has at
# least a byte) are tokenized by the model's tokenizer.json, in the process with limits.

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
    how = asdict(reading)
    try:
        answer = READER.call(
            f"{__name__}:examine_prompts",
            directory=directory,
            dataset=dataset,
            reading=how,
            **options,
        )
    except Ended:  # what hangs in the template of one turn is refused by the look at the model
        return PromptLook(ended=True)
    return PromptLook(**answer)


def examine_prompts(
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
        tokenizer = cache(lambda: fast_tokenizer(place))
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
    return asdict(look)


def _renderer(place: Path) -> Callable[[Sequence[Turn], bool], str]:
    """Return a function from turns to text, by a model's chat template or else as paragraphs."""
    _, template = chat_template(place)
    if not template:
        return lambda turns, answers: "\n\n".join(turn.text for turn in turns)
    render, tokens = compiled(template), special_tokens(place)
    return lambda turns, answers: render([message_of(t) for t in turns], tokens, answers=answers)
