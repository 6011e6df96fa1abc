"""Several cards learn what one card learns: every strategy and gradient compression, on processes
over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finetuning_cases import PRETRAINING, SUMMARIES, losses, trained
from generation_cases import PROMPTS, Worker, write_dataset
from patience import patience

#: Some 75 s of one core, all in the first test that runs.
pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
GLOBAL_BATCH = 4

#: Rates at which three steps change the loss by more than a tenth.
FULL: dict[str, Any] = {"method": "full", "learning_rate": 1e-3}
LORA: dict[str, Any] = {"targets": "all-linear", "learning_rate": 1e-2}
CLIPPED: dict[str, Any] = FULL | {"max_gradient_norm": 0.5}
PIPELINE: dict[str, Any] = {"strategy": "pipeline"}
#: The jobs that all others compute in another way; those of further settings come first.
PLAIN = {
    "masked words": PRETRAINING,
    "pairs": SUMMARIES,
    "clipped": CLIPPED,
    "full": FULL,
    "lora": LORA,
}
GENERATION = {"batch_size": 3, "output_tokens": 12}
_REPEATS = {"min_repeats": 3, "max_repeats": 4, "relative_half_width": 1e-9}
SHARED = {
    "batch_size": 3,
    "output_tokens": 8,
    "measure": {"warmup": 1, "time_limit_s": 600, **_REPEATS},
}

has_deepspeed = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not has_deepspeed, reason="deepspeed is not installed: pip install 'nightgrid[deepspeed]'"
)

ZERO: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"strategy": f"zero{stage}"} for stage in range(4)},
    "zero2 in two passes": {"strategy": "zero2", "gradient_accumulation": 2},
    "zero3, all offloaded": {
        "strategy": "zero3",
        "offload_optimizer": True,
        "offload_parameters": True,
    },
}
TWO_PASSES: dict[str, Any] = CLIPPED | {"batch_size": 2, "gradient_accumulation": 2}
FOUR_PASSES: dict[str, Any] = {"batch_size": 4, "gradient_accumulation": 4}
LOOPED: dict[str, Any] = PIPELINE | {"pipeline_schedule": "interleaved", "held_out": 5}
ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": FULL | {"batch_size": 2},
    "ddp in two passes": TWO_PASSES | {"save_model": "from-ddp"},
    "tensor": FULL | {"batch_size": 4, "strategy": "tensor-parallel"},
    "tensor, lora": LORA | {"batch_size": 4, "strategy": "tensor-parallel"},
    "masked words": PRETRAINING | {"batch_size": 2},
    "pairs": SUMMARIES | {"batch_size": 2},
    "fsdp2 in two passes": TWO_PASSES
    | {"strategy": "fsdp2", "held_out": 5, "save_model": "from-fsdp2"},
    "fsdp2, lora": LORA | {"batch_size": 2, "strategy": "fsdp2", "save_adapter": "from-fsdp2"},
    "pipeline, lora": LORA | PIPELINE | FOUR_PASSES | {"gradient_checkpointing": True},
    "interleaved": TWO_PASSES | LOOPED | {"batch_size": 4},
}
ON_TWO_BY_DEEPSPEED: dict[str, dict[str, Any]] = {
    name: FULL | {"batch_size": 2} | settings for name, settings in ZERO.items()
} | {
    "zero3, lora": LORA | {"batch_size": 2, "strategy": "zero3", "save_adapter": "from-zero3"},
    "masked words, zero3": PRETRAINING | {"batch_size": 2, "strategy": "zero3"},
    "pairs, zero1": SUMMARIES | {"batch_size": 2, "strategy": "zero1"},
    "pairs, zero3": SUMMARIES
    | {"batch_size": 2, "strategy": "zero3", "gradient_checkpointing": True},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "data x tensor": FULL | {"batch_size": 2, "tensor_parallel": 2},
    "data x tensor, lora": LORA | {"batch_size": 2, "strategy": "ddp", "tensor_parallel": 2},
    "pipeline x data": TWO_PASSES | PIPELINE | {"data_parallel": 2},
}
ON_EIGHT: dict[str, dict[str, Any]] = {
    "data x tensor x pipeline": TWO_PASSES
    | PIPELINE
    | {"data_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2},
}
ON_FOUR_BY_DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero3": FULL | {"batch_size": 1, "strategy": "zero3"},
    "tensor x zero1": FULL | {"batch_size": 2, "strategy": "zero1", "tensor_parallel": 2},
}

#: Six steps on two cards, at rates at which a changed gradient would show in the losses.
_EXACT: dict[str, Any] = {"batch_size": 2, "steps": 6, "learning_rate": 1e-2}
COMPRESSED: dict[str, dict[str, Any]] = {
    "exact": _EXACT,
    "fp16": _EXACT | {"gradient_compression": "fp16"},
    "bf16": _EXACT | {"gradient_compression": "bf16", "gradient_accumulation": 2},
    "powersgd": _EXACT | {"gradient_compression": "powersgd", "powersgd_rank": 1},
}

#: Jobs that signal 9 ends in the middle, each beside the one that nothing ends.
KILLED: dict[str, dict[str, Any]] = {
    f"killed, {name}": ON_TWO[name] | {"save_every": 1, "dies_at": 1} for name in ("ddp", "tensor")
}
KILLED_BY_DEEPSPEED: dict[str, dict[str, Any]] = {
    "killed, zero3": ON_TWO_BY_DEEPSPEED["zero3"] | {"save_every": 1, "dies_at": 1}
}
_ALONE: dict[str, Any] = PRETRAINING | {
    "batch_size": 4,
    "steps": 5,
    "learning_rate_schedule": "linear",
    "measure": {"warmup": 1, "time_limit_s": 600},
}
ON_ONE: dict[str, dict[str, Any]] = {
    "alone": _ALONE,
    "killed, alone": _ALONE | {"save_every": 2, "save_mode": "async", "dies_at": 3},
}

#: Fused and separate MLPs, tied embeddings, norms of heads, fused attention.
ARCHITECTURES = ("glm", "llama", "qwen3", "phi3", "gemma2")


def run_gangs(gangs: list[tuple[int, dict[str, Any]]], cache: Path) -> list[Any]:
    """The results of each rank of each gang."""
    environment = os.environ | {
        "NIGHTGRID_CACHE": str(cache),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "gang_rank.py"), json.dumps(gangs)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=patience(800),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    """Losses of one card at the same global batch."""
    return {name: losses(trained(**case, batch_size=GLOBAL_BATCH)) for name, case in PLAIN.items()}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("data") / "prompts.json")


@pytest.fixture(scope="module")
def gangs(cache: Path, prompts: str) -> list[Any]:
    two: dict[str, Any] = ON_TWO | COMPRESSED | (ON_TWO_BY_DEEPSPEED if has_deepspeed else {})
    two |= KILLED | (KILLED_BY_DEEPSPEED if has_deepspeed else {})
    two |= {name: {"architecture": name} for name in ARCHITECTURES}
    two["generation"] = {"generate": GENERATION | {"dataset": prompts, "tensor_parallel": 2}}
    two["shared prompts"] = {"generate": SHARED | {"dataset": prompts}, "slow_rank_s": 0.002}
    four = ON_FOUR | (ON_FOUR_BY_DEEPSPEED if has_deepspeed else {})
    return run_gangs([(2, two), (4, four), (1, ON_ONE), (8, ON_EIGHT)], cache)


@pytest.fixture
def two(gangs: list[Any]) -> list[dict[str, Any]]:
    """The results of each of two ranks, by case."""
    return list(gangs[0])


@pytest.fixture
def four(gangs: list[Any]) -> list[dict[str, Any]]:
    """The results of each of four ranks, by case."""
    return list(gangs[1])


def check(
    name: str, case: dict[str, Any], ranks: list[dict[str, Any]], alone: dict[str, list[float]]
) -> None:
    """The mean loss of the ranks is one card's at every step; the gang counts each sample once."""
    expected = next(alone[plain] for plain, job in PLAIN.items() if job.items() <= case.items())
    by_step = zip(*(rank[name]["losses"] for rank in ranks), strict=True)
    assert [sum(step) / len(ranks) for step in by_step] == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < 0.95 * expected[0]  # else any curve would do
    assert sum(rank[name]["items"] for rank in ranks) == GLOBAL_BATCH * len(expected)
    assert len({rank[name]["trainable"] for rank in ranks}) == 1
    for rank in ranks:  # what cards waited for each other is a part of each step
        waited = zip(rank[name]["communication_s"], rank[name]["wall_s"], strict=True)
        assert all(0 < seconds < whole for seconds, whole in waited)


def of_gangs(*cases: tuple[str, dict[str, Any]]) -> Any:
    """The cases of gangs, each with the fixture of its gang."""
    named = [
        pytest.param(gang, n, c, id=f"{gang}-{n}") for gang, all in cases for n, c in all.items()
    ]
    return pytest.mark.parametrize(("gang", "name", "case"), named)


@pytest.mark.slow
@of_gangs(("two", ON_TWO), ("four", ON_FOUR))
def test_cards_learn_as_one(
    gang: str, name: str, case: dict[str, Any], alone: Any, request: pytest.FixtureRequest
) -> None:
    """DDP and tensor parallelism at the same global batch, with and without an adapter; also where
    pairs of four cards split matrices and the pairs split the batch."""
    check(name, case, request.getfixturevalue(gang), alone)


@pytest.mark.slow
@needs_deepspeed
@of_gangs(("two", ON_TWO_BY_DEEPSPEED), ("four", ON_FOUR_BY_DEEPSPEED))
def test_cards_under_deepspeed_learn_as_one(
    gang: str, name: str, case: dict[str, Any], alone: Any, request: pytest.FixtureRequest
) -> None:
    """Every stage of ZeRO, with accumulation and offload; the row keeps the configuration."""
    ranks = request.getfixturevalue(gang)
    check(name, case, ranks, alone)
    config = json.loads(ranks[0][name]["details"]["deepspeed_config"])
    assert config["zero_optimization"]["stage"] == int(case["strategy"][-1])
    assert config["train_batch_size"] == GLOBAL_BATCH


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_EIGHT)
def test_eight_cards_learn_as_one(
    name: str, gangs: list[Any], alone: dict[str, list[float]]
) -> None:
    """Two copies of the model, each in two stages, each stage's matrices over two cards."""
    check(name, ON_EIGHT[name], gangs[3], alone)
    whole, part = 12_300_000, int(gangs[3][0][name]["details"]["weight_bytes_per_card"])
    assert part < 0.45 * whole  # embeddings and the output layer are whole over two


@pytest.mark.slow
def test_fsdp2_and_a_pipeline_divide_model_and_optimizer(two: list[dict[str, Any]]) -> None:
    """Half of both on each card, the same loss on answers that are held out, and the idle share
    in the row of the pipeline."""
    state, weights = (
        {name: int(two[0][name]["details"][f"{what}"]) for name in ON_TWO}
        for what in ("optimizer_state_bytes", "weight_bytes_per_card")
    )
    names = ("fsdp2 in two passes", "interleaved")
    for name in names:
        assert state[name] == pytest.approx(state["ddp"] / 2, rel=0.01)
        assert weights[name] == pytest.approx(weights["ddp"] / 2, rel=0.01)
    held_out = [two[0][name]["metrics"]["held_out_loss"] for name in names]
    assert held_out[0] == pytest.approx(held_out[1], abs=2e-5)
    shares = [two[0][name]["metrics"].get("pipeline_idle_share") for name in ON_TWO]
    assert dict(zip(ON_TWO, shares, strict=True))["interleaved"] == pytest.approx(1 / 5)
    assert sum(share is not None for share in shares) == 2
    assert two[0]["interleaved"]["details"]["padded_to"].startswith("160 tokens")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            "adapters/from-fsdp2/adapter_", "adapters/from-zero3/adapter_", marks=needs_deepspeed
        ),
        ("models/from-fsdp2/", "models/from-ddp/"),
    ],
)
def test_parts_are_put_together_as_they_would_be_whole(
    one: str, other: str, two: list[dict[str, Any]], cache: Path
) -> None:
    """FSDP2 gathers for saving what ZeRO 3 gathers and DDP never divides."""
    from safetensors.torch import load_file

    saved, expected = (load_file(cache / f"{name}model.safetensors") for name in (one, other))
    assert saved.keys() == expected.keys() and len(saved) > 8
    for name, tensor in saved.items():  # Adam makes much of gradients that are nearly nothing
        assert (tensor - expected[name]).norm() < 1e-3 * expected[name].norm(), name


@pytest.mark.slow
@needs_deepspeed
def test_zero_divides_the_optimizer_state(two: Any, four: Any) -> None:
    """Stage 0 holds all of it on every card, from stage 1 on each holds half; also of what tensor
    parallelism leaves."""
    state = {
        name: int(case["details"]["optimizer_state_bytes"])
        for name, case in (two[0] | four[0]).items()
        if "details" in case
    }
    for name in ("zero1", "zero2"):
        assert state[name] == pytest.approx(state["zero0"] / 2, rel=0.01)
    assert int(two[0]["zero3"]["details"]["optimizer_state_bytes"]) == pytest.approx(
        state["zero0"] / 2, rel=0.01
    )
    assert state["tensor x zero1"] == pytest.approx(state["data x tensor"] / 2, rel=0.01)


@pytest.mark.slow
def test_matrices_are_really_split(two: list[dict[str, Any]]) -> None:
    """All layers of attention and MLP, and the output layer; the optimizer's state shrinks."""
    details = two[0]["tensor"]["details"]
    assert details["tensor_parallel_plan"].startswith("25 layers split over 2 cards")
    whole = int(two[0]["ddp"]["details"]["optimizer_state_bytes"])
    assert int(details["optimizer_state_bytes"]) < 0.7 * whole  # embeddings stay whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_usual_architecture_can_be_split(name: str, two: list[dict[str, Any]]) -> None:
    """The library's plan, carried out here, changes neither logits nor the gradients of what
    stays whole, nor the norm of all gradients."""
    for rank in two:
        assert rank[name]["compared"] >= 3
        assert rank[name]["logits"] < 1e-5 and rank[name]["gradients"] < 1e-5
        whole, split = rank[name]["norms"]
        assert split == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
def test_split_over_two_cards_a_model_says_what_it_says_on_one(
    two: list[dict[str, Any]], prompts: str
) -> None:
    """Greedy tokens are the same, and the first rank alone counts them."""
    here = Worker().run(prompts, **GENERATION)
    there = dict(two[0]["generation"]["texts"])
    assert there == {item.index: item.output_text for item in here.items}
    assert len(there) == len(PROMPTS) and two[1]["generation"]["texts"] == []


@pytest.mark.slow
def test_two_ranks_share_the_prompts_and_stop_together(
    two: list[dict[str, Any]], prompts: str
) -> None:
    """Prompt i is generated by rank i mod 2, as it would be alone; both end at the same repeat,
    though one of them is slower."""
    alone = Worker().run(prompts, batch_size=1, output_tokens=8)
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


@pytest.mark.slow
@needs_deepspeed
def test_an_adapter_whose_parts_lay_on_two_cards_is_kept_whole(
    two: list[dict[str, Any]], prompts: str
) -> None:
    """ZeRO 3 gathers it for saving; text generation then uses it, and says other things."""
    plain = Worker().run(prompts, **GENERATION)
    tuned = Worker().run(prompts, **GENERATION, adapter="from-zero3")
    assert tuned.details["adapter"].startswith("from-zero3: LORA, rank 8")
    assert [i.output_text for i in tuned.items] != [i.output_text for i in plain.items]


def goes_on(name: str, ranks: list[dict[str, Any]], first: int) -> None:
    """The second attempt takes the steps that are left, with the losses of an unbroken job."""
    for rank in ranks:
        whole, again = rank[name.removeprefix("killed, ")], rank[name]
        assert again["steps"] == whole["steps"][first:] and first > 0
        assert again["losses"] == pytest.approx(whole["losses"][first:], rel=1e-6)
        assert again["details"]["resumed"] == f"from step {first} of {len(whole['steps'])}"
        before = [float(loss) for loss in again["details"]["losses_before"].split()]
        assert before == pytest.approx(whole["losses"][:first], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*KILLED, *(pytest.param(name, marks=needs_deepspeed) for name in KILLED_BY_DEEPSPEED)],
)
def test_killed_ranks_go_on_from_the_step_that_all_have(
    name: str, two: list[dict[str, Any]]
) -> None:
    """Rank 0 had written step 1 and rank 1 only step 0; weights whole, split over the ranks, or in
    the parts that each has written."""
    goes_on(name, two, 1)


@pytest.mark.slow
def test_a_killed_job_goes_on_and_leaves_nothing(gangs: list[Any], cache: Path) -> None:
    """Weights, optimizer, learning rate and masked words are those of the job that was not
    killed, and so is every loss; checkpoints are gone when the jobs have succeeded."""
    goes_on("killed, alone", gangs[2], 4)
    assert list((cache / "checkpoints").iterdir()) == []


def numbers(case: dict[str, Any]) -> tuple[int, int]:
    """The numbers or bytes sent, and those that they stand for."""
    text = case["details"]["gradient_compression"]
    sent, given = re.findall(r"(\d+) (?:bytes|numbers) sent for (\d+)", text)[0]
    return int(sent), int(given)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp16", "bf16"])
def test_sixteen_bits_halve_the_bytes_and_keep_the_curve(
    case: str, two: list[dict[str, Any]]
) -> None:
    """Gradients go through the hook, in 16 bits; losses stay near those without."""
    sent, given = numbers(two[0][case])
    assert sent * 2 == given > 0
    assert two[0][case]["losses"] == pytest.approx(two[0]["exact"]["losses"], rel=2e-3)
    assert "gradient_compression" not in two[0]["exact"]["details"]


@pytest.mark.slow
def test_powersgd_sends_thin_matrices(two: list[dict[str, Any]]) -> None:
    """It begins after two exchanges, which are exact, sends far less, and learns."""
    sent, given = numbers(two[0]["powersgd"])
    assert 0 < sent < given / 2
    losses, exact = two[0]["powersgd"]["losses"], two[0]["exact"]["losses"]
    assert losses[:3] == pytest.approx(exact[:3], rel=1e-5)
    assert losses[3:] != pytest.approx(exact[3:], rel=1e-7)
    assert losses == pytest.approx(exact, rel=5e-2) and losses[-1] < losses[0]
