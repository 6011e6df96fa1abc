"""From text to the ids a model was trained to answer.

Three layouts. ChatGLM3's: ``[gMASK] <sop>``, then per message the role's id, the metadata and a
newline, the content, and ``<|assistant|>`` at the end. A chat template, where the tokenizer has
one. Plain text after the beginning-of-sequence token for base models. In ChatGLM3's layout each
part is encoded by itself with special tokens switched off, so content that spells ``<|system|>``
stays those letters and cannot pose as a turn (prompt injection).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from workloads.errors import BadConfiguration
from workloads.models.chatglm3_tokenizer import PROMPT_LAYOUT

if TYPE_CHECKING:
    from workloads.models.loading import ModelSource

Role = Literal["system", "user", "assistant", "observation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. ``metadata`` is what follows the role: a tool's name, or nothing."""

    role: Role
    content: str
    metadata: str = ""
    tools: Sequence[Mapping[str, Any]] = ()  # of a system turn


def layout_of(tokenizer: Any) -> Literal["chatglm3", "chat-template", "plain"]:
    """Layout of prompts that a tokenizer asks for."""
    if getattr(tokenizer, "init_kwargs", {}).get("prompt_layout") == PROMPT_LAYOUT:
        return "chatglm3"
    return "chat-template" if getattr(tokenizer, "chat_template", None) else "plain"


def encode_prompt(tokenizer: Any, source: ModelSource | None, text: str) -> list[int]:
    """The ids of ``text`` as one user turn, ready for the model to answer.

    Args:
        tokenizer: from ``loading.load_tokenizer``.
        source: the model it belongs to; named in errors.
        text: the content, as the user wrote it.
    """
    layout = layout_of(tokenizer)
    if layout == "chatglm3":
        return encode_messages(tokenizer, [Message(role="user", content=text)])
    if layout == "chat-template":
        return _from_template(tokenizer, text)
    return _plain(tokenizer, text, source)


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """ChatGLM3's ids of a conversation, ending where the assistant's answer begins."""
    ids = [_id(tokenizer, "[gMASK]"), _id(tokenizer, "<sop>")]
    for message in messages:
        content = message.content
        if message.role == "system" and message.tools:
            content += "\n" + json.dumps(list(message.tools), indent=4, ensure_ascii=False)
        ids.append(_id(tokenizer, f"<|{message.role}|>"))
        ids += _encode_as_text(tokenizer, f"{message.metadata}\n")
        ids += _encode_as_text(tokenizer, content)
    return [*ids, _id(tokenizer, "<|assistant|>")]


def encode_answer(tokenizer: Any, text: str, answer: str) -> list[int]:
    """The ids of the answer to ``text`` as they follow the prompt's, the ending token included.

    Args:
        tokenizer: from ``loading.load_tokenizer``.
        text: the content that ``encode_prompt`` was given.
        answer: what the model is to learn to say.
    """
    layout = layout_of(tokenizer)
    if layout == "chatglm3":
        ids = _encode_as_text(tokenizer, "\n") + _encode_as_text(tokenizer, answer)
    elif layout == "chat-template":
        return _answer_from_template(tokenizer, text, answer)
    else:
        ids = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    return [*ids, tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else ids


def _encode_as_text(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    return list(encoded["input_ids"])


def _id(tokenizer: Any, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or found == tokenizer.unk_token_id:
        raise BadConfiguration(f"the tokenizer has no {token}, which ChatGLM3's layout needs")
    return int(found)


def _from_template(tokenizer: Any, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _answer_from_template(tokenizer: Any, text: str, answer: str) -> list[int]:
    """Ids that the template puts after the prompt: the answer and how a turn ends."""
    turns = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    turns.append({"role": "assistant", "content": answer})
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    if not whole.startswith(prompt):  # a template that writes a prompt otherwise once answered
        whole = prompt + answer + (tokenizer.eos_token or "")
    return list(tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"])


def _plain(tokenizer: Any, text: str, source: ModelSource | None) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    start = tokenizer.bos_token_id
    ids = ids if start is None else [start, *ids]
    if not ids:
        name = source.entry.name if source is not None else "the model"
        raise BadConfiguration(f"an empty prompt gives no token at all for {name}")
    return ids
