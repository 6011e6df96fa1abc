"""Several cards learn what one card learns: every strategy and gradient compression, over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from finetuning_cases import PRETRAINING, SUMMARIES, losses, trained
from generation_cases import MODEL, PROMPTS, Worker
from patience import patience

from workloads.models.loading import load_causal_model, open_model

#: All gangs run in the first test, some 50 s of one core.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parents[1]
GLOBAL_BATCH = 4
Cases: TypeAlias = "dict[str, dict[str, Any]]"

#: Rates at which three steps change the loss by more than a tenth.
FULL: dict[str, Any] = {"method": "full", "learning_rate": 1e-3, "max_length": 64}
LORA: dict[str, Any] = {"targets": "all-linear", "learning_rate": 1e-2}
CLIPPED: dict[str, Any] = FULL | {"max_gradient_norm": 0.5}
FROZEN: dict[str, Any] = FULL | {"freeze_layers": 1, "freeze_embeddings": True}
#: The jobs that all others compute in another way; those of further settings come first.
PLAIN = {
    "masked words": PRETRAINING,
    "pairs": SUMMARIES,
    "clipped": CLIPPED,
    "frozen": FROZEN,
    "full": FULL,
    "lora": LORA,
}

has_deepspeed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not has_deepspeed, reason="deepspeed is not installed: pip install deepspeed"
)

HALF: dict[str, Any] = {"batch_size": 2}
TWO_PASSES: dict[str, Any] = {"gradient_accumulation": 2}
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "batch_size": 4}
CLIPPED_TWICE: dict[str, Any] = CLIPPED | HALF | TWO_PASSES
FSDP2, TENSOR = {"strategy": "fsdp2"}, {"strategy": "tensor-parallel", "batch_size": 4}
ZERO0, ZERO1, ZERO2, ZERO3 = ({"strategy": f"zero{stage}"} for stage in range(4))
OFFLOADED = {"offload_optimizer": True, "offload_parameters": True}
TENSOR_PAIRS: dict[str, Any] = HALF | {"tensor_parallel": 2}
STAGES: dict[str, Any] = CLIPPED | TWO_PASSES | PIPELINE
#: By the number of cards: what they compute as one card does.
AS_ONE: dict[int, Cases] = {
    2: {
        "ddp": FULL | HALF,
        "ddp in two passes": CLIPPED_TWICE | {"save_model": "from-ddp"},
        "tensor": FULL | TENSOR,
        "tensor, lora": LORA | TENSOR,
        "masked words": PRETRAINING | HALF,
        "fsdp2": CLIPPED_TWICE | FSDP2 | {"held_out": 5, "save_model": "from-fsdp2"},
        "fsdp2, lora": LORA | HALF | FSDP2 | {"save_adapter": "from-fsdp2"},
        "pipeline, lora": LORA
        | PIPELINE
        | {"gradient_accumulation": 4, "gradient_checkpointing": True},
        "interleaved": STAGES | {"pipeline_schedule": "interleaved", "held_out": 5},
    },
    4: {
        "data x tensor": FULL | TENSOR_PAIRS,
        "pipeline x data": STAGES | HALF | {"data_parallel": 2},
        "tensor x pipeline": STAGES | {"tensor_parallel": 2, "pipeline_parallel": 2},
    },
}
BY_DEEPSPEED: dict[int, Cases] = {
    2: {
        "zero0": FULL | HALF | ZERO0,
        "zero2": FULL | HALF | ZERO2 | TWO_PASSES,
        "zero3": FULL | HALF | ZERO3,
        "zero3, all offloaded": FULL | HALF | ZERO3 | OFFLOADED,
        "zero3, frozen": FROZEN | HALF | ZERO3 | {"save_model": "from-zero3"},
        "zero3, lora": LORA | HALF | ZERO3 | {"save_adapter": "from-zero3"},
        "pairs, zero3": SUMMARIES | HALF | ZERO3 | {"gradient_checkpointing": True},
    },
    4: {"tensor x zero1": FULL | TENSOR_PAIRS | ZERO1},
}

#: Five steps on two cards, at rates at which a changed gradient would show in the losses.
EXACT: dict[str, Any] = HALF | {"steps": 5, "learning_rate": 1e-2}
COMPRESSED: Cases = {
    "exact": EXACT,
    "fp16": EXACT | {"gradient_compression": "fp16"},
    "bf16": EXACT | {"gradient_compression": "bf16", "gradient_accumulation": 2},
    "powersgd": EXACT | {"gradient_compression": "powersgd", "powersgd_rank": 1},
}

#: Weights in bf16, of which DeepSpeed keeps an fp32 copy.
IN_BF16: dict[str, Any] = FULL | HALF | {"precision": "bf16"}
MIXED: Cases = {"zero0, bf16": IN_BF16 | ZERO0, "zero1, bf16": IN_BF16 | ZERO1}

#: Jobs that signal 9 ends in the middle, each beside the one that nothing ends.
DIES: dict[str, Any] = {"save_every": 1, "dies_at": 1}
FALLING = AS_ONE[2]["masked words"] | {"learning_rate_schedule": "linear"}
UNBROKEN: Cases = {"falling rate": FALLING}
KILLED: Cases = {
    "killed, falling rate": FALLING | DIES | {"save_mode": "async"},
    "killed, tensor": AS_ONE[2]["tensor"] | DIES,
}
KILLED_BY_DEEPSPEED: Cases = {"killed, zero3": BY_DEEPSPEED[2]["zero3"] | DIES}

GENERATION = {"batch_size": 3, "output_tokens": 12}
_REPEATS = {"min_repeats": 3, "max_repeats": 4, "relative_half_width": 1e-9}
SHARED = {
    "batch_size": 3,
    "output_tokens": 8,
    "measure": {"warmup": 1, "time_limit_s": 600, **_REPEATS},
}
#: Fused and separate MLPs, tied embeddings, norms of heads, fused attention.
ARCHITECTURES = ("glm", "llama", "qwen3", "phi3", "gemma2")


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    return {name: losses(trained(**case, batch_size=GLOBAL_BATCH)) for name, case in PLAIN.items()}


@pytest.fixture(scope="module")
def gangs(cache: Path, dataset: str) -> dict[int, list[dict[str, Any]]]:
    generation: Cases = {
        "generation": {"generate": GENERATION | {"dataset": dataset, "tensor_parallel": 2}},
        "shared prompts": {"generate": SHARED | {"dataset": dataset}, "slow_rank_s": 0.002},
    }
    split = {name: {"architecture": name} for name in ARCHITECTURES}
    cases = {
        2: AS_ONE[2] | COMPRESSED | UNBROKEN | KILLED | split | generation,
        4: AS_ONE[4],
    }
    if has_deepspeed:
        cases[2] |= BY_DEEPSPEED[2] | MIXED | KILLED_BY_DEEPSPEED
        cases[4] = cases[4] | BY_DEEPSPEED[4]
    environment = os.environ | {
        "NIGHTGRID_CACHE": str(cache),
        "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / "gang_rank.py"), json.dumps([*cases.items()])]
    limit_s = patience(800)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.fixture
def two(gangs: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return gangs[2]


@pytest.mark.parametrize(
    ("cards", "name"),
    [
        *((cards, name) for cards, cases in AS_ONE.items() for name in cases),
        *(
            pytest.param(cards, name, marks=needs_deepspeed)
            for cards, cases in BY_DEEPSPEED.items()
            for name in cases
        ),
    ],
)
def test_cards_learn_as_one(cards: int, name: str, alone: Any, gangs: Any) -> None:
    """The mean loss of the ranks is one card's at every step; the gang counts each sample once."""
    case, ranks = (AS_ONE[cards] | BY_DEEPSPEED[cards])[name], [rank[name] for rank in gangs[cards]]
    expected = next(alone[plain] for plain, job in PLAIN.items() if job.items() <= case.items())
    by_step = zip(*(rank["losses"] for rank in ranks), strict=True)
    assert [sum(step) / len(ranks) for step in by_step] == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < 0.95 * expected[0]  # else any curve would do
    assert sum(rank["items"] for rank in ranks) == GLOBAL_BATCH * len(expected)
    assert len({rank["trainable"] for rank in ranks}) == 1
    for rank in ranks:  # what cards waited for each other is a part of each step
        waited = zip(rank["communication_s"], rank["wall_s"], strict=True)
        assert all(0 < seconds < whole for seconds, whole in waited)
    if name in BY_DEEPSPEED[cards]:
        config = json.loads(ranks[0]["details"]["deepspeed_config"])
        assert config["zero_optimization"]["stage"] == int(case["strategy"][-1])
        assert config["train_batch_size"] == GLOBAL_BATCH


def bytes_of(ranks: list[dict[str, Any]], what: str, name: str) -> int:
    return int(ranks[0][name]["details"][what])


def test_fsdp2_and_a_pipeline_divide_model_and_optimizer(two: list[dict[str, Any]]) -> None:
    names = ("fsdp2", "interleaved")
    for what in ("optimizer_state_bytes", "weight_bytes_per_card"):
        whole, *parts = (bytes_of(two, what, name) for name in ("ddp", *names))
        assert parts == pytest.approx([whole / 2] * 2, rel=0.01)
    held_out = [two[0][name]["metrics"]["held_out_loss"] for name in names]
    assert held_out[0] == pytest.approx(held_out[1], abs=2e-5)
    shares = {name: two[0][name]["metrics"].get("pipeline_idle_share") for name in AS_ONE[2]}
    assert shares["interleaved"] == pytest.approx(1 / 5)
    assert sum(share is not None for share in shares.values()) == 2
    assert two[0]["interleaved"]["details"]["padded_to"].startswith("64 tokens")


def test_matrices_are_really_split(two: list[dict[str, Any]], gangs: Any) -> None:
    details = two[0]["tensor"]["details"]
    assert details["tensor_parallel_plan"].startswith("25 layers split over 2 cards")
    whole, split = (bytes_of(two, "optimizer_state_bytes", name) for name in ("ddp", "tensor"))
    assert split < 0.7 * whole  # embeddings stay whole
    whole = bytes_of(two, "weight_bytes_per_card", "ddp")
    # Embeddings and the output layer are whole over two of four cards.
    assert bytes_of(gangs[4], "weight_bytes_per_card", "tensor x pipeline") < 0.45 * whole


@needs_deepspeed
def test_zero_divides_the_optimizer_state(two: Any, gangs: Any) -> None:
    state = "optimizer_state_bytes"
    parts = [bytes_of(two, state, f"zero{stage}") for stage in (2, 3)]
    assert parts == pytest.approx([bytes_of(two, state, "zero0") / 2] * 2, rel=0.01)
    whole = bytes_of(gangs[4], state, "data x tensor")
    assert bytes_of(gangs[4], state, "tensor x zero1") == pytest.approx(whole / 2, rel=0.01)


@needs_deepspeed
def test_master_weights_learn_the_same_whole_and_in_parts(two: list[dict[str, Any]]) -> None:
    whole, parts = (two[0][name]["losses"] for name in MIXED)
    assert whole == pytest.approx(parts, abs=1e-3) and parts[-1] < 0.95 * parts[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            "adapters/from-fsdp2/adapter_", "adapters/from-zero3/adapter_", marks=needs_deepspeed
        ),
        ("models/from-fsdp2/", "models/from-ddp/"),
    ],
)
@pytest.mark.usefixtures("gangs")
def test_parts_are_put_together_as_they_would_be_whole(one: str, other: str, cache: Path) -> None:
    from safetensors.torch import load_file

    saved, expected = (load_file(cache / f"{name}model.safetensors") for name in (one, other))
    assert saved.keys() == expected.keys() and len(saved) > 8
    for name, tensor in saved.items():  # Adam makes much of gradients that are nearly nothing
        assert (tensor - expected[name]).norm() < 1e-3 * expected[name].norm(), name


@needs_deepspeed
@pytest.mark.usefixtures("gangs")
def test_zero3_saves_frozen_weights_beside_trained_ones() -> None:
    base, saved = (
        load_causal_model(open_model(name)).state_dict() for name in (MODEL, "from-zero3")
    )
    assert saved.keys() == base.keys()
    same = {name for name, tensor in saved.items() if tensor.equal(base[name])}
    assert same and all(re.search(r"embed_tokens|layers\.0\.", name) for name in same)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_usual_architecture_can_be_split(name: str, two: list[dict[str, Any]]) -> None:
    """Neither logits change nor the gradients of what stays whole, nor the norm of all of them."""
    for rank in two:
        assert rank[name]["compared"] >= 3
        assert rank[name]["logits"] < 1e-5 and rank[name]["gradients"] < 1e-5
        whole, split = rank[name]["norms"]
        assert split == pytest.approx(whole, rel=1e-5)


def test_split_over_two_cards_a_model_says_what_it_says_on_one(two, dataset) -> None:
    here = Worker().run(dataset, **GENERATION)
    there = dict(two[0]["generation"]["texts"])
    assert there == {item.index: item.output_text for item in here.items}
    assert len(there) == len(PROMPTS) and two[1]["generation"]["texts"] == []


def test_two_ranks_share_the_prompts_and_stop_together(two, dataset) -> None:
    alone = Worker().run(dataset, batch_size=1, output_tokens=8)
    texts = {item.index: item.output_text for item in alone.items}
    ranks = [rank["shared prompts"] for rank in two]
    for number, rank in enumerate(ranks):
        assert rank["stop_reason"] == "max_repeats"
        # A beginning that proves slow becomes warm-up, and timing begins anew for both.
        first = rank["repeats"][0]
        assert rank["repeats"] == list(range(first, first + 4)) == ranks[0]["repeats"]
        assert rank["complete"] == list(range(first + 4))
        assert rank["sizes"] == [3, 1]
        assert [index for index, _ in rank["texts"]] == list(range(number, len(PROMPTS), 2))
    assert {index: text for rank in ranks for index, text in rank["texts"]} == texts


@needs_deepspeed
def test_an_adapter_whose_parts_lay_on_two_cards_is_kept_whole(two, dataset) -> None:
    tuned = Worker().run(dataset, **GENERATION, adapter="from-zero3")
    assert tuned.details["adapter"].startswith("from-zero3: LORA, rank 8")
    plain = dict(two[0]["generation"]["texts"])
    assert {item.index: item.output_text for item in tuned.items} != plain


@pytest.mark.parametrize(
    "name",
    [*KILLED, *(pytest.param(name, marks=needs_deepspeed) for name in KILLED_BY_DEEPSPEED)],
)
def test_killed_ranks_go_on_from_the_step_that_all_have(name, two, cache) -> None:
    """The second attempt takes the steps that are left, with the losses of an unbroken job, and
    leaves nothing."""
    for rank in two:
        whole, again = rank[name.removeprefix("killed, ")], rank[name]
        assert again["steps"] == whole["steps"][1:]
        assert again["losses"] == pytest.approx(whole["losses"][1:], rel=1e-6)
        assert again["details"]["resumed"] == f"from step 1 of {len(whole['steps'])}"
        before = float(again["details"]["losses_before"])
        assert before == pytest.approx(whole["losses"][0], rel=1e-5)
    assert list((cache / "checkpoints").iterdir()) == []


def numbers(case: dict[str, Any]) -> tuple[int, int]:
    """The numbers or bytes sent, and those that they stand for."""
    text = case["details"]["gradient_compression"]
    sent, given = re.findall(r"(\d+) (?:bytes|numbers) sent for (\d+)", text)[0]
    return int(sent), int(given)


@pytest.mark.parametrize("case", ["fp16", "bf16"])
def test_sixteen_bits_halve_the_bytes_and_keep_the_curve(case, two) -> None:
    sent, given = numbers(two[0][case])
    assert sent * 2 == given > 0
    assert two[0][case]["losses"] == pytest.approx(two[0]["exact"]["losses"], rel=2e-3)
    assert "gradient_compression" not in two[0]["exact"]["details"]


def test_powersgd_sends_thin_matrices(two: list[dict[str, Any]]) -> None:
    sent, given = numbers(two[0]["powersgd"])
    assert 0 < sent < given / 2
    losses, exact = two[0]["powersgd"]["losses"], two[0]["exact"]["losses"]
    assert losses[:3] == pytest.approx(exact[:3], rel=1e-5)
    assert losses[3:] != pytest.approx(exact[3:], rel=1e-7)
    assert losses == pytest.approx(exact, rel=5e-2) and losses[-1] < losses[0]
