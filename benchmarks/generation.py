"""Text generation on 100 prompts of mixed length, greedy in fp32, beside transformers.

Prompts are the embedded English ones whole, then cut at sentence ends, so that all differ and none
shares work with another by being the same. SmolLM2-135M-Instruct, a real pretrained model; the
embedded tiny-chatglm3 where smoke is enough. All read the same token ids; whether they wrote the
same tokens is counted and told.

Nightgrid's process runs in the peers' environment too: their memory and ours hold the same
libraries.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.figures import Goal, Line, cpu_ratio, rates
from benchmarks.setting import Setting

TITLE = "Text generation, 100 prompts of mixed length"
STATIC_SIZES = (16, 32)  # beside 8, to find the best of ``generate``
#: Slow; which of the peers is the best differs from run to run, so that none deserves more turns.
_ONE_TURN = ("generate, batches of 16", "generate_batch")
ROWS = 24


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from tokenizers import Tokenizer

    from workloads.data.examples import Example, write_json_lines
    from workloads.models.loading import encode_prompt, load_tokenizer, open_model

    count, output_tokens = (6, 6) if setting.smoke else (100, 48)
    model = "tiny-chatglm3" if setting.smoke else "smollm2-135m-instruct"
    source = open_model(model)
    tokenizer = load_tokenizer(source)
    texts = mixed_prompts(count)
    dataset = setting.scratch / "prompts.json"
    write_json_lines(dataset, [Example(content=text) for text in texts])
    ids = [list(encode_prompt(tokenizer, source, text)) for text in texts]
    ids_file = setting.scratch / "prompt-ids.json"
    ids_file.write_text(json.dumps(ids))

    sizes = (8,) if setting.smoke else (8, *STATIC_SIZES)
    with contextlib.ExitStack() as stack:

        def peer(name: str, kind: str, size: int) -> Any:
            return setting.started(
                stack,
                name,
                setting.peer,
                "generate_peer.py",
                *(source.path, ids_file, output_tokens, kind, size),
            )

        def ours(name: str, **parameters: Any) -> Any:
            return setting.started(
                stack,
                name,
                setting.peer,
                "generate_nightgrid.py",
                *(source.path, dataset, output_tokens, min(ROWS, count)),
                json.dumps({"prompts": count, **parameters}),
            )

        nightgrid = ours("nightgrid continuous", batching="continuous", packed_weights=True)
        static = [peer(f"generate, batches of {size}", "static", size) for size in sizes]
        continuous = peer("generate_batch", "continuous", min(ROWS, count))
        peers = [*static, continuous]
        often = [each for each in peers if each.name not in _ONE_TURN]
        turns = {**setting.turns_of([nightgrid, *often])}
        turns |= {each.name: [each.turn()] for each in peers if each.name in _ONE_TURN}

    decode = Tokenizer.from_file(f"{source.tokenizer_path}/tokenizer.json").decode
    return _lines(turns, ids, decode, sizes)


def _lines(
    turns: Mapping[str, list[dict[str, Any]]],
    ids: Sequence[Sequence[int]],
    decode: Any,
    sizes: Sequence[int],
) -> tuple[list[Line], dict[str, Any]]:
    mine = turns["nightgrid continuous"]
    peers = {name: found for name, found in turns.items() if not name.startswith("nightgrid")}
    first = f"generate, batches of {sizes[0]}"
    best = max(peers, key=lambda name: mean(rates(peers[name])))
    peak = {name: max(turn["peak_bytes"] for turn in found) for name, found in turns.items()}

    def line(against: str, goal: Goal, note: str = "") -> Line:
        theirs = peers[against]
        beside = mine[: len(theirs)]
        memory = f"peak {peak['nightgrid continuous'] / 2**30:.2f} GiB beside "
        return Line(
            what="tokens/s, continuous batching and pre-packed weights",
            against=against,
            unit="tokens/s",
            ours=rates(beside),
            theirs=rates(theirs),
            goal=goal,
            cpu_ratio=cpu_ratio(beside, theirs),
            note=memory + f"{peak[against] / 2**30:.2f} GiB" + note,
        )

    lines = [
        line(first, Goal(kind="at least", value=2.0)),
        line(best, Goal(kind="at least", value=1.3), "; the best of these peers in this run"),
    ]
    lines += [line(name, Goal()) for name in peers if name not in (first, best)]
    reference = peers[first][0]["texts"]
    expected = [decode(text, skip_special_tokens=True) for text in reference]
    equal = {
        name: sum(a == b for a, b in zip(found[0]["texts"], reference, strict=True))
        for name, found in peers.items()
    }
    for name in turns.keys() - peers.keys():
        equal[name] = sum(a == b for a, b in zip(turns[name][0]["texts"], expected, strict=True))
    facts = {
        "prompts": len(ids),
        "prompt tokens": sum(map(len, ids)),
        "tokens of the shortest and longest prompt": [
            min(map(len, ids)),
            max(map(len, ids)),
        ],
        "tokens written": reference and sum(map(len, reference)),
        "texts equal to generate's in batches of 8": equal,
        "peak resident bytes": peak,
    }
    return lines, facts


def mixed_prompts(count: int) -> list[str]:
    """Different prompts of mixed length: the embedded ones, then longer and shorter beginnings."""
    from workloads.data.english_prompts import PROMPTS

    found: dict[str, None] = {}
    for text in _beginnings(PROMPTS):
        found.setdefault(text)
        if len(found) == count:
            return list(found)
    raise ValueError(f"only {len(found)} different prompts")


def _beginnings(prompts: Sequence[str]) -> Iterator[str]:
    yield from prompts
    for part in range(2, 12):
        for prompt in prompts:
            words = prompt.split()
            if len(words) >= 2 * part:
                yield " ".join(words[: len(words) * (part - 1) // part])
                yield " ".join(words[: max(3, len(words) // part)])
