"""Recorded loads: Mooncake-like traces and ShareGPT's conversations.

"Random input length n" differs between tools. Read from their sources:

- here: n token ids, sent as ids; the server counts n (``load.py``).
- ``vllm bench serve``: n random ids are decoded to text, which is cut or filled up until it encodes
  to n again; special tokens that the tokenizer adds are left out of n beforehand. With
  ``--random-range-ratio r`` lengths are uniform in [n (1 - r), n (1 + r)].
- InferenceX: the same with an older script, whose lengths are uniform in [r n, n].
- AIPerf, GuideLLM: n tokens of a book's text by the client's tokenizer; the server's chat template
  and special tokens come on top. inference-perf: a text of random tokens.

A trace of Mooncake's has a line a request: ``timestamp`` (ms), ``input_length``, ``output_length``
and ``hash_ids``, one for each block of 512 tokens: equal ids mean equal tokens, so prefixes are
shared as they were. The tokens themselves are not recorded; they are drawn by the id.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.data.records import BadExample
from workloads.data.shapes import Example
from workloads.serving.load import Planned, generator

#: Tokens of a block that one hash id stands for.
BLOCK_TOKENS = 512
#: Other names of a trace's fields, as other writers have them.
_FIELDS = {
    "timestamp": ("timestamp", "created_time"),
    "input_length": ("input_length", "input_tokens"),
    "output_length": ("output_length", "output_tokens"),
}
#: Limits of vLLM's ShareGPT sampling, in tokens: shorter and longer conversations are left out.
SHAREGPT_LEAST, SHAREGPT_LONGEST_PROMPT, SHAREGPT_LONGEST = 4, 1024, 2048


def read_trace(path: Path, vocabulary: int, *, count: int | None = None) -> list[Planned]:
    """Read a Mooncake-like trace (JSON lines) as requests of token ids with their times.

    Args:
        vocabulary: ids are drawn from ``range(vocabulary)``.
        count: of requests from the start; None: all.

    Raises:
        DataMissing: the file cannot be read, or has no request.
        BadExample: a line is no such request; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataMissing(f"{path}: {error}") from error
    requests: list[Planned] = []
    previous_s = first_s = -math.inf
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if count is not None and len(requests) == count:
            break
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadExample(f"{where}: {error}") from error
        at_s = _number(record, "timestamp", where) / 1000
        if at_s < previous_s:
            raise BadExample(f"{where}: its timestamp is before that of the line above")
        first_s = at_s if not requests else first_s
        previous_s = at_s
        length = int(_number(record, "input_length", where, least=1))
        requests.append(
            Planned(
                prompt=_tokens(record, length, vocabulary, number, where),
                input_tokens=length,
                output_tokens=max(1, int(_number(record, "output_length", where))),
                at_s=at_s - first_s,
            )
        )
    if not requests:
        raise DataMissing(f"{path} has no requests; expected a JSON object a line")
    return requests


def _number(record: Any, field: str, where: str, least: float = 0) -> float:
    names = _FIELDS[field]
    value = None
    if isinstance(record, Mapping):
        value = next((record[name] for name in names if name in record), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(float(value or 0)) or float(value or 0) < least:
        raise BadExample(
            f"{where}: {field} is {json.dumps(value, default=str)[:40]}; a Mooncake trace has "
            f"timestamp (ms), input_length and output_length, of at least {least:g} here"
        )
    return float(value or 0)


def _tokens(
    record: Mapping[str, Any], length: int, vocabulary: int, number: int, where: str
) -> tuple[int, ...]:
    """The ids of a prompt: those of its blocks; without hash ids, of the line alone."""
    blocks = record.get("hash_ids")
    if blocks is None:
        return _block(f"line {number}", vocabulary, length)
    if not isinstance(blocks, list) or len(blocks) != -(-length // BLOCK_TOKENS):
        count = len(blocks) if isinstance(blocks, list) else "no list of"
        raise BadExample(
            f"{where}: {count} hash_ids for {length} tokens, in blocks of {BLOCK_TOKENS}"
        )
    tokens: list[int] = []
    for one in blocks:
        tokens += _block(f"block {one}", vocabulary, BLOCK_TOKENS)
    return tuple(tokens[:length])


def _block(name: str, vocabulary: int, length: int) -> tuple[int, ...]:
    return tuple(generator(0, name).integers(0, vocabulary, length).tolist())


def sharegpt_requests(
    examples: Sequence[Example],
    count_tokens: Callable[[str], int],
    count: int,
    *,
    output_tokens: int | None = None,
    seed: int = 0,
) -> list[Planned]:
    """Requests of ShareGPT conversations as vLLM samples them: question and answer length.

    Conversations are shuffled by ``seed``; those with a prompt or answer below 4 tokens, a prompt
    above 1,024 or more than 2,048 together are left out.

    Args:
        examples: conversations in any shape that ``workloads.data`` reads.
        count_tokens: of a text by the model's tokenizer, without special tokens.
        output_tokens: of every answer, instead of its recorded length.

    Raises:
        DataMissing: no conversation is left.
    """
    order = generator(seed, "conversations").permutation(len(examples)).tolist()
    requests: list[Planned] = []
    for position in order:
        if len(requests) == count:
            break
        question, answer = _first_exchange(examples[position])
        if not question or not answer:
            continue
        prompt, reply = count_tokens(question), output_tokens or count_tokens(answer)
        if min(prompt, reply) < SHAREGPT_LEAST or prompt > SHAREGPT_LONGEST_PROMPT:
            continue
        if prompt + reply <= SHAREGPT_LONGEST:
            requests.append(Planned(prompt=question, input_tokens=prompt, output_tokens=reply))
    if not requests:
        raise DataMissing("no conversation has a question and an answer of a usable length")
    return requests


def _first_exchange(example: Example) -> tuple[str, str]:
    turns = [(turn.role, turn.text) for turn in example.earlier]
    turns += [("user", example.content), ("assistant", example.summary)]
    spoken = [(role, text) for role, text in turns if role in ("user", "assistant") and text]
    if len(spoken) < 2 or [role for role, _ in spoken[:2]] != ["user", "assistant"]:
        return "", ""
    return spoken[0][1], spoken[1][1]
