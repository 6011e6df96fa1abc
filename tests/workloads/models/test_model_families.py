"""Every family that a task declares runs by default, from a tiny configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
from generation_cases import SIZES, Worker, request, write_dataset

from workloads import text_encoding, text_generation
from workloads.base import Result
from workloads.models.loading import open_model
from workloads.registry import TASKS

#: Sizes by the names that families have for them; a configuration takes those it knows.
SMALL = SIZES | {"num_decoder_layers": 2, "attention_window": [4, 4], "local_radius": 4}
FAMILIES = [
    (task, family)
    for task in ("masked-lm", "seq2seq-lm")
    for family in sorted(TASKS[task].model_types)
]


def small_model(task: str, family: str, to: Path) -> str:
    """A directory with a tiny configuration of this family, and an embedded model's tokenizer."""
    source = Path(open_model("tiny-bert" if task == "masked-lm" else "tiny-t5").path)
    there = json.loads((source / "config.json").read_text())
    kind = transformers.CONFIG_MAPPING[family]
    known = kind().to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in known}
    sizes |= {name: there.get(name) or 0 for name in ("pad_token_id", "eos_token_id")}
    sizes |= {"decoder_start_token_id": 0} if task == "seq2seq-lm" else {}
    config = kind(**sizes | {"vocab_size": there["vocab_size"]})
    auto = "MASKED_LM" if task == "masked-lm" else "SEQ_TO_SEQ_CAUSAL_LM"
    names = transformers.models.auto.modeling_auto
    config.architectures = [getattr(names, f"MODEL_FOR_{auto}_MAPPING_NAMES")[family]]
    config.save_pretrained(to)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copy(source / name, to / name)
    return f"random:{to}"


@pytest.mark.slow
@pytest.mark.parametrize(("task", "family"), FAMILIES)
def test_every_declared_family_runs_by_default(task: str, family: str, tmp_path: Path) -> None:
    """An attention that a class lacks falls back to the one it has, and the row says so."""
    model = small_model(task, family, tmp_path / "model")
    texts = write_dataset(tmp_path / "texts.jsonl", ["a small dog", "one two three four five"])
    result: Result
    if task == "masked-lm":
        job = request(texts, workload="text-encoding", model=model, texts=2)
        result = text_encoding.run(job, Worker().context())
    else:
        job = request(texts, model=model, prompts=2, output_tokens=3, ignore_eos=True)
        result = text_generation.run(job, Worker().context())
    assert sum(sample.items for sample in result.samples) == 2
    kind = getattr(transformers, result.details["architecture"])
    says = result.details["attention"]
    assert says == "sdpa" if kind._supports_sdpa else says.startswith("eager: ")
