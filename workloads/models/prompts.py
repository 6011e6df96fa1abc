"""From text to the ids that a model was trained to answer.

Three layouts: ChatGLM3's (``[gMASK] <sop>``, then per turn role id, newline, content;
``<|assistant|>`` at the end), the tokenizer's chat template, or plain text after the
beginning-of-sequence token. In ChatGLM3's, parts are encoded with special tokens disabled, so that
content which spells ``<|system|>`` cannot pose as a turn (prompt injection).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workloads.base import BadConfiguration
from workloads.data.shapes import Turn
from workloads.inspection.tokenizers import compiled, fixed_date, has_tokenizer
from workloads.models.chatglm3 import layout as chatglm3_layout
from workloads.models.chatglm3.conversion import tokenizer_directory
from workloads.models.chatglm3.tokenizer import PROMPT_LAYOUT

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
        why = (str(error) or repr(error)).splitlines()[0]
        return Prompt(
            layout="unknown", example="", note=f"its tokenizer cannot be read: {why:.200}"
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
