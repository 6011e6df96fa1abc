"""Recorded loads: Mooncake-like traces.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.base import DataMissing
from workloads.data.records import BadExample
from workloads.serving.load import Planned, generator

#: Tokens of a block that one hash id stands for.
BLOCK_TOKENS = 512
#: Other names of a trace's fields, as other writers have them.
_FIELDS = {
    "timestamp": ("timestamp", "created_time"),
    "input_length": ("input_length", "input_tokens"),
    "output_length": ("output_length", "output_tokens"),
}


def read_trace(
    path: Path, vocabulary: int, *, count: int | None = None, salt: str = ""
) -> list[Planned]:
    """Read the first ``count`` requests (None: all) of a Mooncake-like trace (JSON lines), with
    their times.

    Ids are drawn from ``range(vocabulary)``; another ``salt`` draws others. Raises DataMissing if
    the file cannot be read or has no request, and BadExample, which names the line.
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
                prompt=_tokens(record, length, vocabulary, number, where, salt),
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
    record: Mapping[str, Any], length: int, vocabulary: int, number: int, where: str, salt: str
) -> tuple[int, ...]:
    """The ids of a prompt: those of its blocks; without hash ids, of the line alone."""
    blocks = record.get("hash_ids")
    if blocks is None:
        return _block(f"{salt}line {number}", vocabulary, length)
    if not isinstance(blocks, list) or len(blocks) != -(-length // BLOCK_TOKENS):
        count = len(blocks) if isinstance(blocks, list) else "no list of"
        raise BadExample(
            f"{where}: {count} hash_ids for {length} tokens, in blocks of {BLOCK_TOKENS}"
        )
    tokens: list[int] = []
    for one in blocks:
        tokens += _block(f"{salt}block {one}", vocabulary, BLOCK_TOKENS)
    return tuple(tokens[:length])


def _block(name: str, vocabulary: int, length: int) -> tuple[int, ...]:
    return tuple(generator(0, name).integers(0, vocabulary, length).tolist())
