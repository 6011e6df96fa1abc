"""From the grid to the row: Ray, worker processes, the real optimum-habana, emulated Gaudi cards.

One run answers all the questions here, since starting processes is what takes the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patience

ROOT = Path(__file__).resolve().parents[2]
#: Twenty jobs in some ten processes, each of which imports for ten seconds, on two cores or fewer.
pytestmark = pytest.mark.timeout(1200)

#: What stands in the place of an address.
CARDS = ("--emulate", "1x2:HPU:hpu")
MEASURE = {"warmup": 1, "min_repeats": 1, "max_repeats": 1, "time_limit_s": 60, "repeat_flagged": 0}


def nightgrid(*words: str, directory: Path = ROOT) -> str:
    """Run the command line as a user does, in a directory; what it printed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [*(str(Path(path).resolve()) for path in given if path), str(ROOT)]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words],
        cwd=directory,
        env={**os.environ, **variables, "STANDIN_WORKSPACE_ROWS": "64"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=patience(900),
        check=False,
    )
    fit = (0, 12) if words[0] == "doctor" else (0,)
    assert done.returncode in fit, f"{words}: {done.stdout[-6000:]}"
    return done.stdout


def rows_of(results: Path, run: str) -> list[dict[str, Any]]:
    from orchestrator.report.run_report import read_summary
    from orchestrator.store.store import Store

    _, measurements = read_summary(Store(results, run))
    return [measurement for measurement in measurements if measurement.final]


def experiment(
    name: str, engine: str | None, workload: str = "text-generation", **more: Any
) -> dict[str, Any]:
    """An experiment; without an engine the plan chooses by what this machine has."""
    return {"name": name, "workload": workload, **({"engine": engine} if engine else {}), **more}


def grid(llama: str, calm_llama: str, four_bit_llama: str, original: str) -> dict[str, Any]:
    habana, stock, tiny = "optimum-habana", "transformers", {"model": "tiny-chatglm3"}
    few = {"batch_size": 2, "output_tokens": 4}
    compared = {"workload": "verification", "prompts": 4, "output_tokens": 16, "batch_size": 3}
    lora = {"workload": "finetuning", "method": "lora", "learning_rate": 2e-3, "steps": 3}
    lora |= {"batch_size": 2, "samples": 16}
    experiments = [
        experiment(
            "generation",
            habana,
            **few | {"prompts": 4, "output_tokens": 8},
            zip={"model": [original, llama], "ignore_eos": [True, False]},
        ),
        # Each model in each precision and each mode, two and two together.
        experiment(
            "agreement",
            habana,
            **compared,
            zip={
                "model": [original, original, llama, llama],
                "precision": ["fp32", "bf16", "fp32", "bf16"],
                "hpu_mode": ["lazy", "compile", "compile", "lazy"],
            },
        ),
        experiment(
            "stock",
            stock,
            **compared,
            precision="fp32",
            zip={"model": [llama, llama, original], "hpu_mode": ["eager", "compile", "compile"]},
        ),
        experiment("train-stock", stock, **lora, **tiny, max_length=64, save_adapter="adverts"),
        experiment("gang", stock, **lora, **tiny, max_length=48, cards=2, strategy="ddp"),
        experiment("adapted", habana, **compared, **tiny, precision="fp32", adapter="adverts"),
        experiment(
            "eight-bits",
            habana,
            **compared,
            precision="fp8",
            axes={"model": [original, calm_llama]},
        ),
        experiment("four-bits", habana, **few, prompts=2, precision="int4", model=four_bit_llama),
        experiment(
            "images",
            habana,
            "text-to-image",
            model="tiny-stable-diffusion",
            dataset="image-prompts",
            precision="fp32",
            steps=3,
            batch_size=2,
        ),
        experiment(
            "open", None, **few, prompts=3, model=llama, axes={"precision": ["bf16", "fp16"]}
        ),
        experiment(
            "too-large",
            None,
            prompts=1,
            output_tokens=2,
            model=llama,
            axes={"batch_size": [80, 96]},
        ),
    ]
    return {
        "name": "gaudi",
        "defaults": {"dataset": "advertisegen-synthetic", "accelerator": "HPU"},
        "measure": MEASURE,
        "experiments": experiments,
    }


@pytest.fixture(scope="module")
def night(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: str,
    calm_llama: str,
    four_bit_llama: str,
    original_chatglm3: str,
) -> Any:
    results = tmp_path_factory.mktemp("results")
    file = results / "gaudi.json"
    content = grid(tiny_llama, calm_llama, four_bit_llama, original_chatglm3)
    file.write_text(json.dumps(content))
    nightgrid("run", str(file), *CARDS, "--quiet", "--results", str(results))
    rows: dict[str, list[Any]] = {}
    for row in rows_of(results, "gaudi"):
        rows.setdefault(row.experiment, []).append(row)
    return rows


def details(row: Any) -> dict[str, str]:
    return dict(row.details)


def test_every_row_says_that_no_card_was_there(night: Any) -> None:
    ran = [row for rows in night.values() for row in rows if row.state == "SUCCEEDED"]
    assert ran and all(row.emulated for row in ran)
    assert {row.device_name for row in ran} == {"GAUDI2 (stand-in on CPU)"}


def test_generation_runs_on_the_classes_made_for_the_card(night: Any) -> None:
    rows = night["generation"]
    assert [str(row.state) for row in rows] == ["SUCCEEDED"] * 2
    classes = {details(row)["architecture"] for row in rows}
    assert classes == {"ChatGLMForConditionalGeneration", "GaudiLlamaForCausalLM"}
    for row in rows:
        assert details(row)["static_shapes"] == "true" and details(row)["hpu_mode"] == "lazy"
        timed = [sample for _, sample in row.samples if not sample.warmup]
        assert all(sample.ttft_s and sample.ttft_s < sample.wall_s for sample in timed)
        if dict(row.parameters)["ignore_eos"]:
            assert all(sample.output_tokens == 2 * 8 for sample in timed)
            # Two prompts of 128 or 256 positions each, and all tokens but the last were fed back.
            assert all((sample.computed_tokens // 2 - 7) % 128 == 0 for sample in timed)
        else:
            assert all(0 < sample.output_tokens <= 2 * 8 for sample in timed)


def test_numbers_agree_with_stock_transformers(night: Any) -> None:
    """In fp32 every greedy token and all logits up to rounding; in bf16 all but near ties. In lazy
    mode and compiled."""
    assert len(night["agreement"]) == 4
    for row in night["agreement"]:
        said = details(row)
        if row.precision == "fp32":
            assert said["agrees"] == "yes", said
            assert row.workload_metrics["largest_logit_difference"] < 1e-4
        else:
            assert said["agrees"] in ("yes", "yes, but for near ties"), said


def test_stock_transformers_run_on_the_card_too(night: Any) -> None:
    """The engine next door is not touched by the library's patches: it has its own process. With
    static shapes and compiled it writes the same tokens: two graphs for the one shape there is."""
    rows = {(row.model, row.parameters["hpu_mode"]): row for row in night["stock"]}
    assert len(rows) == 3
    for (_, mode), row in rows.items():
        said = details(row)
        assert said["agrees"] == "yes" and row.workload_metrics["largest_logit_difference"] < 1e-4
        assert said["architecture"] in ("LlamaForCausalLM", "GlmForCausalLM")
        assert said.get("static_shapes") == ("true" if mode == "compile" else None)


def test_the_plan_chooses_the_engine_that_is_made_for_the_card(night: Any) -> None:
    """Where a grid names none: optimum-habana, since this machine has it, and what it lacks runs on
    stock transformers, compiled. The row says which."""
    found = {row.precision: (row.engine, row.parameters.get("hpu_mode")) for row in night["open"]}
    assert found == {"bf16": ("optimum-habana", None), "fp16": ("transformers", "compile")}
    for row in night["open"]:
        assert str(row.state) == "SUCCEEDED", row.reason
        assert row.timed_compilations == 0 and row.shapes_unmet == 0


def test_a_batch_whose_workspace_does_not_fit_prunes_larger_ones(night: Any) -> None:
    states = {row.batch_size: str(row.state) for row in night["too-large"]}
    assert states == {80: "OUT_OF_MEMORY", 96: "PRUNED"}
    assert "workspace Allocation" in next(
        r.reason for r in night["too-large"] if r.batch_size == 80
    )


def test_fp8_shares_no_process_with_other_precisions(night: Any) -> None:
    """Inference mode is a switch of the process, which fp8 and its calibration throw for good."""
    processes: dict[bool, set[int]] = {True: set(), False: set()}
    for row in (row for rows in night.values() for row in rows if row.worker_pid is not None):
        switched = row.precision == "fp8" or row.workload == "fp8-calibration"
        processes[switched].add(row.worker_pid)
    assert processes[True] and processes[False] and not processes[True] & processes[False]


def test_an_adapter_of_the_native_layout_works_on_the_original_one(night: Any) -> None:
    """LoRA trained on transformers' GLM class, put on the library's ChatGLM: the same tokens."""
    assert str(night["train-stock"][0].state) == "SUCCEEDED"
    (row,) = night["adapted"]
    assert (night["train-stock"][0].engine, row.engine) == ("transformers", "optimum-habana")
    said = details(row)
    assert "query_key_value" in said["adapter"]
    assert said["agrees"] == "yes"
    assert row.workload_metrics["largest_logit_difference"] < 1e-3


def test_a_gang_trains_over_hccl(night: Any) -> None:
    """Two processes, each of which was shown the modules of both and told its own: else the
    stand-in's hccl makes no communicator."""
    (row,) = night["gang"]
    assert str(row.state) == "SUCCEEDED", row.reason
    assert {rank for rank, _ in row.samples} == {0, 1}
    assert details(row)["strategy"] == "ddp"


def test_fp8_runs_by_the_scales_that_a_job_before_it_has_measured(night: Any) -> None:
    """The plan adds the measuring jobs; the compressor's fp8 layers give the reference's logits up
    to rounding to 8 bits. ChatGLM3's cache, which its class keeps in bf16, is left in bf16."""
    rows = {row.model: row for row in night["eight-bits"] if row.precision == "fp8"}
    measured = {row.model for row in night["eight-bits"] if row.workload == "fp8-calibration"}
    assert set(rows) == measured and len(rows) == 2
    for row in rows.values():
        assert str(row.state) == "SUCCEEDED", row.reason
        said = details(row)
        assert said["agrees"] in ("quantised", "yes", "yes, but for near ties")
        assert "fp8 (e4m3)" in row.precision_detail and "Neural Compressor" in row.precision_detail
        # Unrelated logits would differ by more than their spread.
        difference = row.workload_metrics["mean_logit_difference"]
        assert 0 < difference < 0.25 * row.workload_metrics["logit_spread"]


def test_a_gptq_checkpoint_runs_in_four_bits(night: Any) -> None:
    """With AutoRound's layers for Gaudi, whose only operation on the card is expanding weights."""
    (row,) = night["four-bits"]
    assert str(row.state) == "SUCCEEDED", row.reason
    assert row.precision_detail.startswith("uint4 weights of a checkpoint")
    # 21 layers' 442,368 weights in 4 bits, with a scale of 2 bytes and a zero of half a byte for
    # each 32 of them; embeddings, output layer and norms in bf16.
    assert row.parameter_count == 1_639_296
    assert row.weight_bytes == 442_368 // 2 + 442_368 // 32 * 5 // 2 + (1_639_296 - 442_368) * 2


def test_the_cards_order_of_four_bit_weights_means_the_checkpoints_numbers(
    four_bit_llama: str, calm_llama: str
) -> None:
    """Packed for the card and expanded again, weights are those before rounding, to half a step."""
    import torch
    from auto_round_extension.hpu.qlinear_hpu_gptq import QuantLinear
    from safetensors.torch import load_file

    from workloads.engines.optimum_habana.quantization import pack_for_the_card

    name = "model.layers.1.mlp.down_proj"
    (file,) = Path(four_bit_llama).glob("*.safetensors")
    stored = {key: value for key, value in load_file(file).items() if key.startswith(name)}
    before = load_file(Path(calm_llama) / "model.safetensors")[f"{name}.weight"].float().T
    layer = QuantLinear(4, 32, *before.shape, bias=False, weight_dtype=torch.bfloat16)
    for key in ("qweight", "qzeros", "scales"):
        setattr(layer, key, stored[f"{name}.{key}"])
    for _ in range(2):  # a second time changes nothing
        pack_for_the_card(torch.nn.Sequential(layer))
    expanded = torch.ops.hpu.convert_from_uint4(
        layer.qweight, layer.scales, layer.qzeros, torch.float32
    )
    step = layer.scales.float().abs().repeat_interleave(32, 0)
    assert expanded.shape == before.shape
    within = (expanded - before).abs() <= 0.51 * step
    assert within.float().mean() > 0.99  # the largest of a group may be clipped by a whole step
    assert ((expanded - before).abs() <= 1.01 * step).all()


def test_images_are_painted_after_language_models_ran(night: Any) -> None:
    """In a process whose CLIP the library may have replaced; the rows keep the first image."""
    (row,) = night["images"]
    assert str(row.state) == "SUCCEEDED", row.reason
    said = details(row)
    assert said["pipeline"] == "GaudiStableDiffusionPipeline" and said["hpu_graphs"] == "yes"
    assert row.image is not None and row.image.startswith(b"\x89PNG")
    assert row.workload_metrics["seconds_per_image"] > 0
