"""Checkpoints as people have them: refused by the plan with file and remedy, or run rightly."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch
from checkpoint_cases import CONFIG, GENERATION, SETTINGS, TEMPLATE, TOKENIZER, WEIGHTS, Change
from command_line import ROOT, started
from generation_cases import described
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workloads.base import DataMissing, WorkloadError
from workloads.inspection.configuration import objections, own_code
from workloads.inspection.look import READER, Look, look
from workloads.inspection.process import SECONDS
from workloads.inspection.weights import difference
from workloads.models.catalog import find_model, positions_of
from workloads.models.loading import (
    load_causal_model,
    load_config,
    load_masked_model,
    load_tokenizer,
    open_model,
)
from workloads.registry import WORKLOADS
from workloads.rules import refusals

MANY = {str(n): {"content": f"<{n}>"} for n in range(200_001)}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ATTENTION = "model.layers.0.self_attn"
LORA = f"{ATTENTION}.q_proj.lora_A.weight"
ONES = torch.ones(16)
OWN_TOKENIZER = {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "OwnTokenizer"}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}


class Foreign:
    """An object that no file of weights should hold."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def foreign_object(directory: Path) -> None:
    torch.save({"model.norm.weight": Foreign()}, directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


def renamed_bin(directory: Path) -> None:
    (directory / "pytorch_model.bin").rename(directory / WEIGHTS)


#: Kind -> the changes, and words of the refusal: what is wrong with which file.
REFUSED: dict[str, tuple[Sequence[Change], str]] = {
    # handed out with the issue
    "saved-while-compiled": ([cases.prefixed("_orig_mod.")], "torch.compile"),
    "saved-from-ddp": ([cases.prefixed("module.")], "DistributedDataParallel"),
    "without-head": ([cases.lacking("lm_head.weight")], "lm_head.weight"),
    "more-layers-than-weights": ([cases.values(CONFIG, num_hidden_layers=4)], "end with layer 1"),
    "lfs-pointer": ([cases.written(WEIGHTS, cases.POINTER)], "git lfs pull"),
    "half-copied": ([cases.truncated(WEIGHTS)], "its tensors take"),
    "unknown-rope": ([cases.rope(type="su", factor=4.0)], "unknown type 'su'"),
    "negative-new-tokens": ([cases.values(GENERATION, max_new_tokens=-1)], "max_new_tokens is -1"),
    "own-code": (
        [cases.values(CONFIG, model_type="mytiny", auto_map={"AutoConfig": "own.Tiny"})],
        "--remote-code",
    ),
    # weight files
    "web-page": ([cases.written(WEIGHTS, "<!DOCTYPE html><html>401</html>")], "a web page"),
    "empty-file": ([cases.written(WEIGHTS, "")], "it is empty"),
    "file-of-zeros": ([cases.written(WEIGHTS, bytes(5000))], "begins with zeros"),
    "compressed": ([cases.written(WEIGHTS, b"\x1f\x8b\x08" + bytes(99))], "gzip"),
    "torch-file-renamed": ([cases.as_bin, renamed_bin], "a file of torch.save"),
    "gguf-renamed": ([cases.written(WEIGHTS, b"GGUF" + bytes(99))], "a GGUF file"),
    "overlapping-tensors": ([cases.header(cases.overlapping)], "overlaps another"),
    "trailing-bytes": ([cases.bytewise(WEIGHTS, lambda b: b + b"x" * 9)], "its tensors take"),
    "tensor-twice": (
        [cases.header(lambda h: json.dumps(h)[:-1] + ', "lm_head.weight": {}}')],
        "names a tensor twice",
    ),
    "file-and-index": ([cases.sharded, cases.written(WEIGHTS, "")], "libraries differ"),
    "index-without-metadata": (
        [cases.sharded, cases.values(f"{WEIGHTS}.index.json", metadata=...)],
        "has no 'metadata'",
    ),
    "object-in-bin": ([foreign_object], "which is no tensor"),
    "bin-half-copied": ([cases.as_bin, cases.truncated("pytorch_model.bin")], "without its end"),
    # tensors and configuration
    "zero3-placeholders": ([cases.mapped(lambda t: torch.zeros(0))], "another shape"),
    "peft-not-merged": ([cases.prefixed("base_model.model.")], "merge_and_unload"),
    "peft-base-layers": (
        [cases.renamed(lambda n: n.replace("_proj.weight", "_proj.base_layer.weight"))],
        "merge_and_unload",
    ),
    "fsdp-names": (
        [cases.renamed(lambda n: n.replace("layers.", "_fsdp_wrapped_module.layers."))],
        "left by FSDP",
    ),
    "checkpointed-layers": (
        [cases.renamed(lambda n: n.replace(".mlp", "._checkpoint_wrapped_module.mlp"))],
        "activation checkpointing",
    ),
    "unknown-prefix": ([cases.prefixed("wrapped.")], "'wrapped.'"),
    "shapes-of-another-size": ([cases.values(CONFIG, intermediate_size=32)], "24×16, not 32×16"),
    "biases-without-place": ([cases.added(f"{ATTENTION}.q_proj.bias", ONES)], "no place for 1"),
    "fewer-layers-than-weights": ([cases.values(CONFIG, num_hidden_layers=1)], "no place for 9"),
    "layer-types": ([cases.values(CONFIG, layer_types=["full_attention"] * 3)], "3 layers of 2"),
    "layer-types-number": ([cases.values(CONFIG, layer_types=7)], "not a list"),
    "heads-of-no-size": ([cases.values(CONFIG, num_attention_heads=3, head_dim=...)], "3 heads"),
    "groups-of-no-size": ([cases.values(CONFIG, num_key_value_heads=3)], "num_key_value_heads 3"),
    "yarn-without-factor": ([cases.rope(type="yarn")], "lacks factor"),
    "rope-is-a-text": ([cases.values(CONFIG, rope_parameters="yarn")], "not an object"),
    "text-config-number": ([cases.values(CONFIG, text_config=5)], "text_config is 5"),
    "quantization-list": ([cases.values(CONFIG, quantization_config=["gptq"])], "not an object"),
    "layers-beyond-reason": ([cases.values(CONFIG, num_hidden_layers=10**12)], "to 2,000"),
    "labels-beyond-reason": ([cases.values(CONFIG, num_labels=10**9)], "up to 1,000,000"),
    "no-layers": ([cases.values(CONFIG, num_hidden_layers=0)], "from 1 to 2,000"),
    "layers-with-fractions": ([cases.values(CONFIG, num_hidden_layers=2.0)], "not a whole number"),
    "epsilon-is-no-number": ([cases.values(CONFIG, rms_norm_eps=float("nan"))], "not a number"),
    "unknown-family": ([cases.values(CONFIG, model_type="llama9")], "knows no model_type"),
    "padding-beyond-vocabulary": ([cases.values(GENERATION, pad_token_id=400)], "vocab_size 320"),
    "unknown-activation": ([cases.values(CONFIG, hidden_act="swiglu")], 'is "swiglu"'),
    "unknown-dtype": ([cases.values(CONFIG, dtype="float99")], 'is "float99"'),
    "epsilon-is-a-text": ([cases.values(CONFIG, rms_norm_eps="1e-6")], "not a number"),
    "whole-numbers": ([cases.mapped(torch.Tensor.long)], "holds whole numbers"),
    "adapter-beside": ([cases.added(LORA, torch.ones(2, 16))], "an adapter's tensors"),
    "weights-linked-to-nowhere": (
        [cases.without(WEIGHTS), lambda d: (d / WEIGHTS).symlink_to("../blobs/4d")],
        "a link to ../blobs/4d, which is not there",
    ),
    "weights-are-a-directory": (
        [cases.without(WEIGHTS), lambda d: (d / WEIGHTS).mkdir()],
        "a directory, not a file",
    ),
    # tokenizer and template
    "byte-order-mark": (
        [cases.bytewise(SETTINGS, lambda b: b"\xef\xbb\xbf" + b)],
        "byte order mark",
    ),
    "own-tokenizer": ([cases.values(SETTINGS, **OWN_TOKENIZER)], "(own.py)"),
    "no-default-template": (
        [
            cases.without(TEMPLATE),
            cases.values(SETTINGS, chat_template=[{"name": "rag", "template": "x"}]),
        ],
        "named default",
    ),
    "tokenizer-half-copied": ([cases.truncated(TOKENIZER)], "cannot be read as JSON"),
    "tokenizer-pointer": ([cases.written(TOKENIZER, cases.POINTER)], "Git LFS pointer"),
    "tokenizer-without-model": ([cases.values(TOKENIZER, model={})], "no model with a vocabulary"),
    "tokens-beyond-embedding": (
        [
            cases.values(CONFIG, vocab_size=256),
            cases.mapped(lambda t: t[:256] if len(t) == cases.ROWS else t),
        ],
        "3 tokens have no row",
    ),
    "many-added-tokens": ([cases.values(SETTINGS, added_tokens_decoder=MANY)], "200,001 tokens"),
    "growing-normalizer": ([cases.values(TOKENIZER, normalizer=GROWING)], "99 times as long"),
    "model-max-length-text": ([cases.values(SETTINGS, model_max_length="long")], "not above 0"),
    **{
        f"template-{name}": ([cases.written(TEMPLATE, text)], words)
        for name, text, words in (
            ("syntax", "{% for %}", "does not render"),
            ("imports", "{% import 'x' as y %}", "does not render"),
            ("divides", "{{ 1 / 0 }}", "ZeroDivisionError"),
            ("adds-types", "{{ messages + 1 }}", "TypeError"),
            ("random", "{{ [1, 2] | random }}", "differ every night"),
            ("deaf", "Hello.", "leaves out what a user writes"),
            ("of-gigabytes", "{{ 'x' * 10**10 }}", "memory"),
        )
    },
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.make_good(tmp_path_factory.mktemp("models") / "good")


def words(directory: Path) -> str:
    """All that the look says of a directory."""
    found = look(directory, task="causal-lm", chats=True).objections
    return "\n".join(f"{one.file}: {one.reason}; {one.hint}" for one in found)


@pytest.mark.parametrize("kind", REFUSED)
def test_is_refused(kind: str, good: Path, tmp_path: Path) -> None:
    changes, reason = REFUSED[kind]
    assert reason in words(cases.copied(good, tmp_path / kind, *changes))


#: Directory that is nearly a model -> a file in it, and what is written instead.
NEARLY = {
    "an-adapter": ("adapter_config.json", "`adapter:`"),
    "trainers-output": ("checkpoint-500/config.json", "checkpoint-…"),
    "hub-cache": ("snapshots/ab12/config.json", "org/name"),
    "folder-of-models": ("llama/config.json", "name the one that is meant"),
    "gguf": ("model-q4.gguf", "made from"),
    "consolidated": ("consolidated.00.pth", "Hugging Face repository"),
    "deepspeed": ("global_step10/mp_rank_00_model_states.pt", "zero_to_fp32.py"),
    "fsdp-shards": ("pytorch_model_fsdp_0/x.distcp", "merge-weights"),
    "distributed": ("__0_0.distcp", "dcp_to_torch_save"),
    "mlx": ("weights.npz", "converted from"),
    "onnx-export": ("model.onnx", "made from"),
    "shards-without-index": ("model-00001-of-00002.safetensors", "safetensors.index.json"),
    "interrupted-download": ("model.safetensors.incomplete", "fetch it again"),
}


@pytest.mark.parametrize("kind", NEARLY)
def test_is_named(kind: str, tmp_path: Path) -> None:
    name, remedy = NEARLY[kind]
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    with pytest.raises(DataMissing, match=remedy):
        find_model(str(tmp_path))


#: Changes after which the model is the same.
HARMLESS: dict[str, Sequence[Change]] = {
    "other-order": [cases.weights(lambda w: dict(reversed(w.items())))],
    "other-shards": [cases.sharded],
    "torch-save": [cases.as_bin],
    "unused-files": [cases.written("notes.bin.txt", "x"), cases.written("optimizer.pt", "x")],
    "names-without-prefix": [cases.renamed(lambda n: n.removeprefix("model."))],
    "names-with-two-prefixes": [cases.prefixed("model.")],
    "unused-tensor": [cases.added("value_head.weight", torch.ones(3))],
    "frequencies": [cases.added(f"{ATTENTION}.rotary_emb.inv_freq", torch.ones(2))],
    "weights-of-16-bits-named": [cases.values(CONFIG, torch_dtype="float32")],
    "no-metadata": [cases.without_metadata],
    "lines-of-windows": [cases.bytewise(CONFIG, lambda b: b.replace(b"\n", b"\r\n"))],
    "tied-head": [cases.lacking("lm_head.weight"), cases.values(CONFIG, tie_word_embeddings=True)],
}


@cache
def loaded(directory: Path) -> Any:
    return load_causal_model(open_model(str(directory)), dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HARMLESS)
def test_passes(kind: str, good: Path, tmp_path: Path) -> None:
    """And computes what the original computes."""
    changed = cases.copied(good, tmp_path / kind, *HARMLESS[kind])
    assert words(changed) == ""
    models = [loaded(changed), loaded(good)]
    assert models[0].new_weights == ()
    ids = torch.tensor([[5, 17, 200, 3]])
    with torch.no_grad():
        same = torch.equal(*(model(ids).logits for model in models))
    assert same or kind == "tied-head"


@pytest.mark.slow
def test_a_template_that_loops_is_ended_and_named(good, tmp_path, monkeypatch) -> None:
    assert READER.seconds == SECONDS < 10.0
    monkeypatch.setattr(READER, "seconds", 2.0)
    said = words(cases.copied(good, tmp_path / "loops", cases.written(TEMPLATE, LOOP)))
    # On a busy host the limit of time comes before that of CPU time.
    assert re.search("the chat template in .* more than (2 s of CPU time|12 s)", said)


@pytest.mark.slow
def test_a_workstation_plans_with_the_packages_of_its_requirements(good, tmp_path) -> None:
    """A chat template, and a shipped grid that pretrains, whose corpus a tokenizer counts."""
    client = (ROOT / "requirements-client.txt").read_text().lower()
    project = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2]
    names = re.findall(r'^    "(\w+)', project.partition("\n]")[0], re.MULTILINE)
    absent = {"tokenizers", "huggingface_hub"}  # come with others
    absent |= {name for name in names if not re.search(f"^{name.lower()}>", client, re.MULTILINE)}
    assert {"torch", "ray", "transformers", "pyarrow"} < absent
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(absent)}))\n"
    )
    own = tmp_path / "own.yaml"
    settings = f"name: a, workload: text-generation, model: {good}, dataset: english-prompts"
    settings += ", accelerator: CPU, output_tokens: 4"
    own.write_text(f"name: own\nexperiments:\n- {{{settings}}}\n")
    for grid, emulated in ((own, "1x1:CPU"), (ROOT / "grids/gaudi2-vs-a100.yaml", "1x8:HPU")):
        process = started("plan", str(grid), "--emulate", emulated, cwd=tmp_path)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, printed


def test_positions_are_those_of_vllm() -> None:
    """yarn-times-four, and the other types."""
    plain = {"max_position_embeddings": 512}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for scaling, positions in (
        (yarn, 2048),
        ({"rope_type": "yarn", "factor": 2.0}, 1024),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 512),
        ({"type": "longrope", "factor": 8.0}, 512),
        ({"type": "yarn", "factor": "4"}, 512),
        ([], 512),
    ):
        assert positions_of({**plain, "rope_scaling": scaling}) == positions
    nested = {"text_config": {**plain, "rope_parameters": {"full_attention": yarn}}}
    assert positions_of(nested) == 2048


def test_a_changed_part_of_a_pipeline_is_looked_at_again(good: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "unet": ["a", "B"]}')
    part = cases.copied(good, tmp_path / "unet")
    assert words(tmp_path) == ""
    cases.truncated(WEIGHTS)(part)
    assert "its tensors take" in words(tmp_path)
    cases.copied(
        good, tmp_path / "vae", cases.sharded, cases.without("model-00002-of-00002.safetensors")
    )
    assert "model-00002-of-00002.safetensors" in words(tmp_path)


#: Change of a pipeline's part -> words of the refusal, which name the part.
PARTS: dict[str, tuple[Change, str]] = {
    "without weights": (cases.without(WEIGHTS), "unet/: it has no weights"),
    "other variant": (
        lambda d: (d / WEIGHTS).rename(d / "model.fp16.safetensors"),
        "without a variant, such as fp16",
    ),
    "config half copied": (cases.truncated(CONFIG), "unet/config.json: it cannot be read"),
    "weights half copied": (cases.truncated(WEIGHTS), "unet/model.safetensors: "),
    "not there": (shutil.rmtree, "unet/: model_index.json names it, and it is not there"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_pipeline_is_refused(kind: str, good: Path, tmp_path: Path) -> None:
    parts = {"unet": ["a", "B"], "safety_checker": ["c", "D"], "vae": [None, None], "n": [1, 0]}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "P", **parts}))
    part = cases.copied(good, tmp_path / "unet")
    assert words(tmp_path) == ""
    change, reason = PARTS[kind]
    change(part)
    assert reason in words(tmp_path)


def test_the_plan_refuses_at_the_grids_line(good, tmp_path, nightgrid, monkeypatch) -> None:
    """Every objection of the look is a problem of the grid."""
    monkeypatch.chdir(tmp_path)
    for kind in ("saved-from-ddp", "own-code"):
        cases.copied(good, tmp_path / kind, *REFUSED[kind][0])
    lines = [
        "name: g",
        "defaults: {workload: text-generation, accelerator: CPU, precision: fp32}",
        "experiments:",
        "  - {name: a, model: saved-from-ddp}",
        "  - {name: b, model: own-code}",
    ]
    (tmp_path / "g.yaml").write_text("\n".join(lines))
    said = nightgrid("plan", "g.yaml", "--emulate", "1x1:CPU", code=2).err
    assert "g.yaml:4:" in said and "model.module" in said
    assert "g.yaml:5:" in said and "--remote-code own-code" in said


@pytest.mark.slow
def test_no_configuration_of_transformers_is_odd() -> None:
    """The defaults of some 800 families pass; a family that this release knows needs no code. One
    in four is made here, all in the rehearsal."""
    odd = {}
    for name in list(CONFIG_MAPPING)[:: 1 if "NIGHTGRID_REHEARSAL" in os.environ else 4]:
        try:
            config = json.loads(CONFIG_MAPPING[name]().to_json_string())
        except Exception:  # needs arguments, or a package
            continue
        config.setdefault("model_type", name)
        if found := list(objections(config)) or own_code(config):
            odd[name] = found
    assert odd == {}


def save_tiny(directory: Path, loader: type, **config: object) -> Path:
    """A model of another family, with a tokenizer of its own vocabulary."""
    sizes = {"vocab_size": cases.ROWS, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
    made = loader.from_config(AutoConfig.for_model(**{**sizes, **config}))  # type: ignore[attr-defined]
    made.save_pretrained(directory)
    return directory


def test_a_new_head_makes_the_rows_weights_random(tmp_path: Path) -> None:
    """An encoder without its head is a masked language model, and an encoder without a layer
    is none."""
    directory = save_tiny(tmp_path / "bert", AutoModel, model_type="bert")
    assert look(directory, task="masked-lm").objections == ()
    model = load_masked_model(open_model(str(directory)))
    assert model.new_weights and all(name.startswith("cls.") for name in model.new_weights)
    cases.lacking("layer.1.")(directory)
    assert "end with layer 0" in look(directory, task="masked-lm").objections[0].hint
    with pytest.raises(DataMissing, match="16 of the"):
        load_masked_model(open_model(str(directory)))


@pytest.mark.slow
def test_a_family_without_a_table_is_compared_by_transformers(tmp_path: Path) -> None:
    """In a process with torch the first time, from the cache after that."""
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 1}
    whole = save_tiny(tmp_path / "whole", AutoModelForCausalLM, model_type="mixtral", **sizes)
    assert look(whole, task="causal-lm") == Look()
    part = cases.copied(whole, tmp_path / "part")
    cases.lacking("experts")(part)
    for _ in range(2):
        (found,) = look(part, task="causal-lm").objections
        assert "experts" in found.reason
    images = save_tiny(tmp_path / "images", AutoModel, model_type="vit", image_size=32)
    (found,) = look(images, task="causal-lm").objections
    assert "no AutoModelForCausalLM of the model type 'vit'" in found.reason
    began = time.monotonic()
    os.utime(whole)  # the process's memory aside, the answer is on disk
    assert look(whole, task="causal-lm") == Look() and time.monotonic() - began < 2


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_causal_model])
def test_a_value_of_a_type_that_transformers_refuses_is_named(load, good, tmp_path) -> None:
    """Its message has the reason in the second line."""
    changed = cases.copied(good, tmp_path / "text", cases.values(CONFIG, eos_token_id="</s>"))
    with pytest.raises(WorkloadError, match=r"eos_token_id.*expected int, got str"):
        load(open_model(str(changed)))


def test_a_model_of_no_task_is_compared_as_the_first_task_loads_it(good, tmp_path) -> None:
    """Unless the engine has a list of its own."""
    change = cases.values(CONFIG, model_type="qwen3", architectures=["Qwen3Model"])
    bare = cases.copied(good, tmp_path / "bare", change)
    spec = WORKLOADS["text-generation"]
    for engine, refused in (("transformers", True), ("vllm", False)):
        job = described(model=str(bare), engine=engine, device="cuda")
        job = replace(job, parameters=spec.validate(job.parameters, engine))
        assert any("q_norm.weight" in each.reason for each in refusals(spec, job)) is refused


def test_packed_layers_need_no_plain_weight() -> None:
    """A quantised layer holds other tensors, and a layer of none is missing all the same."""
    expected = {"a.q_proj.weight": (8, 8), "a.o_proj.weight": (8, 8), "norm.weight": (8,)}
    stored = {"a.q_proj.qweight": (1, 8), "a.q_proj.scales": (1, 8), "norm.weight": (8,)}
    found = difference(expected, stored, packed=True)
    assert found.missing == ("a.o_proj.weight",) and not found.unexpected and not found.misshapen


# Seeded changes of a good checkpoint: none runs with a tensor that was made up.

COUNT = 100 if "NIGHTGRID_REHEARSAL" in os.environ else 8
Mutation = Callable[[random.Random, Path], None]


def _drop(random: random.Random, directory: Path) -> None:
    gone = random.sample(sorted(load_file(directory / WEIGHTS)), random.randint(1, 5))
    cases.weights(lambda w: {n: t for n, t in w.items() if n not in gone})(directory)


def _rename(random: random.Random, directory: Path) -> None:
    old, new = random.choice(
        [("model.", "modle."), ("self_attn", "attn"), ("q_proj", "query"), ("", "net.")]
    )
    share = random.choice([1.0, 0.5])
    cases.renamed(lambda n: n.replace(old, new, 1) if random.random() < share else n)(directory)


def _reshape(random: random.Random, directory: Path) -> None:
    name = random.choice(sorted(load_file(directory / WEIGHTS)))
    change = random.choice(
        [lambda t: t.T, lambda t: t[:-1], lambda t: t[None], lambda t: t * 0 + 1]
    )
    cases.weights(lambda w: {**w, name: change(w[name]).contiguous()})(directory)


def _resize(random: random.Random, directory: Path) -> None:
    key = random.choice(
        [
            *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
            *("num_key_value_heads", "vocab_size", "head_dim", "tie_word_embeddings"),
        ]
    )
    value = random.choice([1, 2, 3, 8, 16, 64, 321, True, None, "4", -1, 10**12])
    cases.values(CONFIG, **{key: value})(directory)


def _another_family(random: random.Random, directory: Path) -> None:
    family = random.choice(["qwen2", "qwen3", "gemma2", "olmo2", "phi3", "gpt2", "mixtral", "bert"])
    cases.values(CONFIG, model_type=family, architectures=["AnyForCausalLM"])(directory)


def _damage(random: random.Random, directory: Path) -> None:
    name = random.choice([WEIGHTS, CONFIG, TOKENIZER, SETTINGS, GENERATION])
    data = bytearray((directory / name).read_bytes())
    for _ in range(random.randint(1, 4)):
        data[random.randrange(min(len(data), 900))] = random.randrange(256)
    if random.random() < 0.4:
        data = data[: random.randrange(len(data))]
    (directory / name).write_bytes(bytes(data))


def _odd_values(random: random.Random, directory: Path) -> None:
    name = random.choice([CONFIG, TOKENIZER, SETTINGS, GENERATION])
    content = json.loads((directory / name).read_text())
    for key in random.sample(sorted(content), min(2, len(content))):
        content[key] = random.choice([None, [], {}, "x", -1, 10**15, True, [["a"]], {"b": 1}])
    (directory / name).write_text(json.dumps(content))


HARMFUL: list[Mutation] = [_drop, _rename, _reshape, _resize, _another_family, _damage, _odd_values]


def run(directory: Path) -> Any:
    """The model as a job loads it, after the plan has looked; raises as they do."""
    objections = look(directory, task="causal-lm", chats=True).objections
    if objections:
        raise WorkloadError(objections[0].reason)
    source = open_model(str(directory))
    load_tokenizer(source)
    model = load_causal_model(source, dtype=torch.float32)
    assert not source.random_weights and model.new_weights == ()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_no_change_makes_up_a_tensor(seed: int, good: Path, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    mutation = random_.choice(HARMFUL)
    directory = cases.copied(good, tmp_path / "m", lambda d: mutation(random_, d))
    try:
        model = run(directory)
    except WorkloadError:
        return
    stored = cases.read_state(directory)
    for name, tensor in model.state_dict().items():
        bare = name if name in stored else name.removeprefix("model.")
        assert torch.equal(tensor, stored[bare].to(tensor.dtype)), (mutation, name)
