"""A model's prompt layout in words, and an example with its ids, where a tokenizer is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.models import chatglm3
from workloads.models.catalog import TINY
from workloads.models.checkpoint_files import architecture_of
from workloads.models.prompt import encode_prompt, layout_of

CHATGLM3_LAYOUT = "[gMASK] <sop> then per turn: <|role|> metadata ⏎ content, then <|assistant|>"
LAYOUTS = {
    "chatglm3": CHATGLM3_LAYOUT,
    "chat-template": "the tokenizer's chat template",
    "plain": "beginning-of-sequence token, then the text",
}
#: What the published tokenizer of ChatGLM3-6B gives for 你好 as one user turn.
PUBLISHED_EXAMPLE = {
    "[gMASK]": 64790,
    "<sop>": 64792,
    "<|user|>": 64795,
    "▁": 30910,
    "<0x0A>": 13,
    "▁你": 36474,
    "好": 54591,
    "<|assistant|>": 64796,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The way from text to ids."""

    layout: str  # in words
    example: str
    tokens: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    note: str = ""


def example_prompt(name: str, config: Mapping[str, Any], directory: Path | None) -> Prompt:
    """The prompt layout of a model, with an example.

    Args:
        name: the model's name.
        config: its native config.json.
        directory: where its tokenizer would be.
    """
    tokenizer = _tokenizer(name, config, directory)
    if tokenizer is None:
        return _without_tokenizer(config)
    kind = layout_of(tokenizer)
    text = "你好" if kind == "chatglm3" else "What is a card?"
    ids = encode_prompt(tokenizer, None, text)
    return Prompt(
        layout=LAYOUTS[kind],
        example=text,
        tokens=tuple(tokenizer.convert_ids_to_tokens(ids)),
        ids=tuple(ids),
    )


def _tokenizer(name: str, config: Mapping[str, Any], directory: Path | None) -> Any:
    """The model's tokenizer, or None where none can be had."""
    from transformers import PreTrainedTokenizerFast

    from workloads.models.chatglm3_tokenizer import build_tokenizer, read_pieces, tokenizer_config

    longest = int(config.get("max_position_embeddings") or 0)
    pieces = None
    if name == TINY:
        from workloads.models.tiny_vocabulary import pieces as tiny_pieces

        pieces = tiny_pieces()
    elif directory is None:
        return None
    elif architecture_of(dict(config)) == "GlmForCausalLM" and not _has_fast(directory):
        try:
            pieces = read_pieces(directory / "tokenizer.model")
        except DataMissing:
            return None
    if pieces is not None:
        settings = tokenizer_config(longest)
        settings.pop("tokenizer_class")
        return PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(pieces), **settings)
    return _from_directory(directory)


def _has_fast(directory: Path) -> bool:
    return (directory / "tokenizer.json").is_file()


def _from_directory(directory: Path | None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception:  # files from anywhere make the library raise anything
        return None  # a config by itself, or files that are no tokenizer


def _without_tokenizer(config: Mapping[str, Any]) -> Prompt:
    glm = architecture_of(dict(config)) == "GlmForCausalLM"
    if glm and config.get("vocab_size") == chatglm3.PUBLISHED_VOCABULARY:
        return Prompt(
            layout=CHATGLM3_LAYOUT,
            example="你好",
            tokens=tuple(PUBLISHED_EXAMPLE),
            ids=tuple(PUBLISHED_EXAMPLE.values()),
            note="no tokenizer.model here: ids of the published tokenizer",
        )
    return Prompt(layout="unknown", example="", note="no tokenizer beside the config")
