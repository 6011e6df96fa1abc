"""Prompts of models that are not ChatGLM3: a chat template, or the text as it is."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from workloads.base import BadConfiguration
from workloads.models.chatglm3.tokenizer import build_tokenizer
from workloads.models.embedded.tiny_chatglm3 import pieces
from workloads.models.prompts import encode_prompt, layout_of, prompt_details


@pytest.fixture
def make_tokenizer():
    """A tokenizer over the embedded pieces, with the settings that a test is about."""
    return lambda **settings: PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(pieces()), eos_token="</s>", **settings
    )


def test_a_plain_model_gets_its_begin_token_and_the_text(make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<s>")
    assert layout_of(tokenizer) == "plain"
    ids = encode_prompt(tokenizer, None, "裙子")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁", "裙子"]


def test_a_plain_model_without_a_begin_token(make_tokenizer):
    tokenizer = make_tokenizer()
    assert tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, None, "裙子")) == ["▁", "裙子"]
    with pytest.raises(BadConfiguration, match="empty prompt"):
        encode_prompt(tokenizer, None, "")


def test_a_dated_template_gives_one_prompt_every_night(make_tokenizer):
    tokenizer = make_tokenizer()
    assert prompt_details(tokenizer) == {}
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    text = tokenizer.decode(encode_prompt(tokenizer, None, "x"))
    assert "26" in text and "2024" in text
    assert prompt_details(tokenizer) == {"template_date": "2024-07-26"}
