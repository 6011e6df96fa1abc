"""Text generation on 100 prompts of mixed length, greedy, beside transformers and OpenVINO GenAI.

Prompts are the embedded English ones whole, then cut at sentence ends, so that all differ and none
shares work with another by being the same. SmolLM2-135M-Instruct, a real pretrained model; the
embedded tiny-chatglm3 where smoke is enough. All read the same token ids; whether they wrote the
same tokens is counted and told. Peers: ``generate`` in batches of 8 by itself, and of 16 with
prompts sorted by length and a static cache, which was the fastest of static and dynamic caches and
of 16, 32 and 64; ``generate_batch``; OpenVINO GenAI on a graph that optimum-intel converted, whose
key/value cache has the precision of its products, with 64 and with all 100 texts at a time. Ours
are batches of 100: sorted by length with the engine transformers, continuous with the engine
openvino, which runs OpenVINO GenAI below.
Those of transformers take a minute a turn, and have one: it is compared with our first.

Nightgrid's processes run in the peers' environment too: their memory and ours hold the same
libraries. OpenVINO GenAI as a peer has an environment of its own.
llama.cpp is left out: its Python package is source only, and its build was not done after 25
minutes on a busy machine of two cores. vLLM is left out: its build for CPUs takes 3.5 GB.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.contender import Contender
from benchmarks.figures import Goal, Line, cpu_ratio, rates
from benchmarks.night import timed
from benchmarks.setting import Setting, Takes

TITLE = "Text generation, 100 prompts of mixed length"
TAKES_S = Takes(whole=520, quick=85)
#: Texts at a time, of ours and of ``generate_batch``: all of them.
ROWS = 100
#: Texts at a time of OpenVINO GenAI: which is faster depends on the precision and the processor.
OPENVINO_ROWS = (64, ROWS)
#: Precisions as both name them.
PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
#: Ours: by engine what it is asked for besides, and in which precisions.
ENGINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "transformers": ({"batching": "sorted"}, ("fp32",)),
    "openvino": ({}, tuple(PRECISIONS)),
}
_PLAIN = "generate, batches of 8"
_SORTED = "generate, sorted by length, static cache, batches of 16"
#: Take part in the first turn alone.
_ONE_TURN = dict.fromkeys((_PLAIN, "generate_batch", _SORTED), 1)


def ours_in(engine: str, precision: str) -> str:
    """Name of a contender of ours."""
    return f"nightgrid, engine {engine}, {precision}"


def _theirs_in(precision: str) -> str:
    """Begin the name of a contender of OpenVINO GenAI."""
    return f"OpenVINO GenAI, {precision}, "


def run(setting: Setting) -> tuple[list[Line], dict[str, Any]]:
    """The lines and facts of this benchmark."""
    from tokenizers import Tokenizer

    from workloads.data.shapes import Example, write_json_lines
    from workloads.models.loading import encode_prompt, load_tokenizer, open_model

    count, output_tokens = setting.sized((100, 48), (12, 48), (6, 6))
    model = "tiny-chatglm3" if setting.smoke else "smollm2-135m-instruct"
    source = open_model(model)
    tokenizer = load_tokenizer(source)
    texts = mixed_prompts(count)
    dataset = setting.scratch / "prompts.json"
    write_json_lines(dataset, [Example(content=text) for text in texts])
    ids = [list(encode_prompt(tokenizer, source, text)) for text in texts]
    ids_file = setting.scratch / "prompt-ids.json"
    ids_file.write_text(json.dumps(ids))

    # The smoke size's model is one that optimum-intel does not convert.
    openvino = None if setting.smoke else setting.openvino_python
    rows = min(ROWS, count)
    with contextlib.ExitStack() as stack:

        def peer(name: str, kind: str, size: int) -> Contender:
            arguments = (source.path, ids_file, output_tokens, kind, size)
            return setting.started(stack, name, setting.peer, "generate_peer.py", *arguments)

        def ours(engine: str, precision: str) -> Contender:
            asked = {"prompts": count, "batching": "continuous"} | ENGINES[engine][0]
            arguments = (source.path, dataset, output_tokens, rows, json.dumps(asked))
            return setting.started(
                stack,
                ours_in(engine, precision),
                setting.peer,
                "generate_nightgrid.py",
                *(*arguments, precision, engine),
            )

        started = [peer(_PLAIN, "static", 8)]
        started.append(peer(_SORTED, "sorted", 8 if setting.smoke else 16))
        if not setting.quick:
            started.append(peer("generate_batch", "continuous", rows))
        taken = {
            engine: precisions[: 1 if setting.quick else None]
            for engine, (_, precisions) in ENGINES.items()
            if engine == "transformers" or openvino is not None
        }
        for engine, precisions in taken.items():
            started += [ours(engine, precision) for precision in precisions]
        for precision, size in product(
            taken.get("openvino", ()), sorted({min(each, count) for each in OPENVINO_ROWS})
        ):
            ends = ",".join(map(str, end_token_ids(source.path)))
            started.append(
                setting.started(
                    stack,
                    f"{_theirs_in(precision)}{size} texts at a time",
                    str(openvino),
                    "generate_openvino.py",
                    converted(setting, source.path),
                    *(ids_file, output_tokens, PRECISIONS[precision], size, ends),
                )
            )
        turns = setting.turns_of(started, fewer=_ONE_TURN)

    decode = Tokenizer.from_file(f"{source.tokenizer_path}/tokenizer.json").decode
    return _lines(turns, ids, decode, with_goals=not setting.quick)


def end_token_ids(directory: str | Path) -> list[int]:
    """The tokens that end a text of this checkpoint, as ``generate`` reads them."""
    told = json.loads((Path(directory) / "generation_config.json").read_text())["eos_token_id"]
    return told if isinstance(told, list) else [told]


def converted(setting: Setting, directory: str | Path) -> Path:
    """The checkpoint as OpenVINO reads it, in fp32, made once.

    Raises:
        RuntimeError: the conversion failed; with the end of what it printed.
    """
    assert setting.openvino_python is not None
    to = setting.scratch / "openvino"
    if not to.exists():
        setting.say("  converting for OpenVINO")
        command = setting.openvino_python.with_name("optimum-cli")
        options = ("--task", "text-generation-with-past", "--weight-format", "fp32")
        timed("optimum-cli", command, *("export", "openvino"), "-m", str(directory), *options, to)
    return to


def _lines(
    turns: Mapping[str, list[dict[str, Any]]],
    ids: Sequence[Sequence[int]],
    decode: Any,
    *,
    with_goals: bool,
) -> tuple[list[Line], dict[str, Any]]:
    mine = {
        ours_in(engine, precision): precision
        for engine, (_, precisions) in ENGINES.items()
        for precision in precisions
        if ours_in(engine, precision) in turns
    }
    theirs = {  # the faster first
        precision: sorted(
            (name for name in turns if name.startswith(_theirs_in(precision))),
            key=lambda name: -mean(rates(turns[name])),
        )
        for precision in PRECISIONS
    }
    peers = [name for name in turns if name not in (*mine, *chain(*theirs.values()))]
    best = max(peers, key=lambda name: mean(rates(turns[name])))
    peak = {name: max(turn["peak_bytes"] for turn in found) for name, found in turns.items()}

    def at_least(value: float) -> Goal:
        """Return the goal, which is one for the whole size."""
        return Goal(kind="at least", value=value) if with_goals else Goal()

    def line(ours: str, against: str, goal: Goal, note: str = "") -> Line:
        beside = turns[ours][: len(turns[against])]
        memory = f"peak {peak[ours] / 2**30:.2f} GiB beside {peak[against] / 2**30:.2f} GiB"
        return Line(
            what=f"tokens/s, {ours.partition(', ')[2]}",
            against=against,
            unit="tokens/s",
            ours=rates(beside),
            theirs=rates(turns[against]),
            goal=goal,
            cpu_ratio=cpu_ratio(beside, turns[against]),
            note=memory + note,
        )

    own = ours_in("transformers", "fp32")
    lines = [line(own, _PLAIN, Goal())]
    if best != _PLAIN:
        lines.append(line(own, best, Goal(), "; the best of transformers here"))
    lines += [line(own, name, Goal()) for name in peers if name not in (_PLAIN, best)]
    lines += [
        # The goal is beside the faster of theirs.
        line(name, against, Goal() if place else at_least(1.2))
        for name, precision in mine.items()
        for place, against in enumerate(theirs.get(precision, ()))
    ]
    reference = turns[_PLAIN][0]["texts"]
    expected = [decode(text, skip_special_tokens=True) for text in reference]
    equal = {
        name: sum(
            a == b
            for a, b in zip(found[0]["texts"], expected if name in mine else reference, strict=True)
        )
        for name, found in turns.items()
    }
    facts = {
        "threads of each": sorted({turn["threads"] for told in turns.values() for turn in told}),
        "prompts": len(ids),
        "prompt tokens": sum(map(len, ids)),
        "tokens of the shortest and longest prompt": [
            min(map(len, ids)),
            max(map(len, ids)),
        ],
        "tokens written": reference and sum(map(len, reference)),
        f"texts equal to those of {_PLAIN}, in fp32": equal,
        "peak resident bytes": peak,
    }
    return lines, facts


def mixed_prompts(count: int) -> list[str]:
    """Different prompts of mixed length: the embedded ones, then longer and shorter beginnings."""
    from workloads.data.embedded import ENGLISH_PROMPTS

    found: dict[str, None] = {}
    for text in _beginnings(ENGLISH_PROMPTS):
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
