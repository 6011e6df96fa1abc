"""Output of stock transformers on the CPU for some prompts: the reference of ``verification.py``.

An engine may change transformers for its whole process, so the reference runs in a process of its
own in which no accelerator is visible and nothing is patched. Prompts are taken one by one, without
padding, so nothing of the engine's arrangements is in it. Its answers are kept in the node's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.base import BadConfiguration
from workloads.data.cache import cached_directory
from workloads.devices import environment_for, host_device
from workloads.models.chatglm3.conversion import fingerprint
from workloads.models.loading import open_model
from workloads.training.adapters import find_adapter

if TYPE_CHECKING:
    import torch

_FILE = "reference.safetensors"
#: Raise when what is computed changes: it is in the cache's keys.
_RECIPE = 1
_TAIL = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question to the reference: greedy tokens after each prompt, past any end of text."""

    model: str
    adapter: str | None
    precision: str  # "fp32" or "bf16"
    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Its answer."""

    tokens: torch.Tensor  # [prompts, steps]
    logits: torch.Tensor  # [prompts, steps, vocabulary], float32


def answer(question: Question) -> Reference:
    """The reference's answer, computed if nobody has asked before.

    Raises:
        DataMissing: the model or the adapter is not there.
        BadConfiguration: stock transformers cannot run it; carries the end of its log.
    """
    from safetensors.torch import load_file

    directory = cached_directory(_key(question), lambda to: _ask(question, to))
    found = load_file(directory / _FILE)
    return Reference(tokens=found["tokens"], logits=found["logits"])


def _key(question: Question) -> str:
    import transformers

    seen = [transformers.__version__, asdict(question)]
    seen.append(fingerprint(Path(open_model(question.model, protected=True).path)))
    if question.adapter:
        seen.append(fingerprint(find_adapter(question.adapter)))
    text = json.dumps(seen, sort_keys=True)
    return f"reference-{_RECIPE}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _ask(question: Question, directory: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PT_HPU", "HABANA"))}
    environment |= environment_for(host_device().name, 0)
    environment["PT_HPU_LAZY_MODE"] = "0"  # else transformers looks for the bridge by itself
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in sys.path if path))
    done = subprocess.run(
        [sys.executable, "-m", "workloads.stock_reference", str(directory)],
        input=json.dumps(asdict(question)),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise BadConfiguration(
            f"stock transformers cannot run {question.model} on the CPU: {done.stdout[-_TAIL:]}"
        )


def compute(question: Question, directory: Path) -> None:
    """Generate for each prompt and write tokens and logits; in the process of the reference."""
    import torch
    from safetensors.torch import save_file

    from workloads.base import MeasureSettings, Request
    from workloads.devices import device_for
    from workloads.engines import default_engine, engine_function

    request = Request(
        workload="text-generation",
        model=question.model,
        dataset="",
        precision=question.precision,
        batch_size=1,
        engine=default_engine("generate"),
        residency_key="",
        parameters={"attention": "sdpa", "adapter": question.adapter},
        measure=MeasureSettings(),
    )
    device = device_for(host_device().name)
    load = engine_function(request.engine, "generate", device.name)
    engine = load(request, device)
    tokens, logits = [], []
    with torch.inference_mode():
        for prompt in question.prompts:
            fetch = engine.generate(
                engine.prepare([prompt]),
                output_tokens=question.output_tokens,
                ignore_eos=True,
                on_step=lambda: None,
                keep_logits=True,
            )
            generated = fetch()
            tokens.append(torch.tensor(list(generated.tokens[0])))
            logits.append(torch.cat(list(generated.logits)))
    found = {"tokens": torch.stack(tokens), "logits": torch.stack(logits)}
    save_file(found, directory / _FILE)


def _question_of(text: str) -> Question:
    given = json.loads(text)
    prompts: Sequence[Sequence[int]] = given.pop("prompts")
    return Question(prompts=tuple(tuple(prompt) for prompt in prompts), **given)


if __name__ == "__main__":
    compute(_question_of(sys.stdin.read()), Path(sys.argv[1]))
