"""The engine for a job whose grid names none: by the kind of card and what its nodes have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from grid_cases import HEAD, grid, one
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.job import Accelerator, Job
from orchestrator.core.plan import Action, Plan
from orchestrator.core.topology import Node, assumed_servers, parse_emulation
from orchestrator.driver.plan import packages_lacking
from orchestrator.planning.engine_choice import with_engines
from orchestrator.planning.planner import make_plan
from orchestrator.planning.verification import verification_grid
from workloads.engines import ENGINES

HPU = Accelerator.HPU
FORK, STOCK = "2.10.0a0+gitc1e5ed4", "2.11.0"
#: The image of docs/gaudi.md.
IMAGE = {
    "torch": FORK,
    "habana-torch-plugin": "1.24.0",
    "transformers": "4.55.4",
    "optimum-habana": "1.21.2",
}


def gaudi(*packages: Mapping[str, str]) -> list[Node]:
    """A node of eight cards for each set of packages."""
    (node,) = assumed_servers([HPU])
    return [
        replace(node, name=f"gaudi-{n}", node_id=f"n{n}", packages=tuple(found.items()))
        for n, found in enumerate(packages, 1)
    ]


def without(*names: str, **others: str) -> dict[str, str]:
    return {n: v for n, v in (IMAGE | others).items() if n not in names}


def chosen(plan: Plan) -> dict[str, tuple[str, object]]:
    """Engine and mode of each precision's job of a plan, without implied jobs."""
    jobs = [item.job for item in plan.jobs if item.job.workload != "fp8-calibration"]
    return {job.precision: (job.engine, dict(job.parameters).get("hpu_mode")) for job in jobs}


ALL = "axes: {precision: [fp32, fp16, bf16, fp8, int8, int4]}"


def test_on_gaudi_its_own_library_is_taken_wherever_it_can_do_the_job() -> None:
    plan = make_plan(one(ALL), gaudi(IMAGE), [])
    assert chosen(plan) == {
        "fp32": ("optimum-habana", None),
        "fp16": ("transformers", "compile"),
        "bf16": ("optimum-habana", None),
        "fp8": ("optimum-habana", None),
        "int8": ("transformers", None),
        "int4": ("transformers", None),
    }
    actions = {item.job.precision: item.action for item in plan.jobs}
    assert [p for p, action in actions.items() if action is not Action.RUN] == ["int8"]
    assert [item.job.workload for item in plan.jobs].count("fp8-calibration") == 1
    (note,) = plan.notes
    assert "optimum-habana (lazy) for 3 jobs" in note and "assumed" not in note


@pytest.mark.parametrize(
    ("packages", "engine", "mode"),
    [
        (IMAGE, "optimum-habana", None),
        (without(torch=STOCK), "optimum-habana", "compile"),
        (without("optimum-habana", **{"vllm": "0.26", "vllm-gaudi": "0.26"}), "vllm-gaudi", None),
        (IMAGE | {"vllm": "0.26", "vllm-gaudi": "0.26"}, "optimum-habana", None),
        (without("optimum-habana"), "transformers", "compile"),
        (without(transformers="5.2.0"), "transformers", "compile"),
    ],
)
def test_what_the_nodes_have_decides(
    packages: Mapping[str, str], engine: str, mode: str | None
) -> None:
    plan = make_plan(one("precision: bf16"), gaudi(packages), [])
    (item,) = plan.jobs
    assert item.action is Action.RUN and chosen(plan) == {"bf16": (engine, mode)}
    assert item.job.identity()["engine"] == engine
    parameters = item.job.identity()["parameters"]
    assert isinstance(parameters, dict) and parameters.get("hpu_mode") == mode


def test_without_a_cluster_the_usual_image_is_assumed_and_the_plan_says_so() -> None:
    plan = make_plan(one("precision: bf16"), assumed_servers([HPU]), [])
    assert chosen(plan) == {"bf16": ("optimum-habana", None)}
    assert any("assumed" in note for note in plan.notes)


def test_nodes_that_differ_are_named_and_none_gets_what_it_cannot_run() -> None:
    plan = make_plan(one("precision: bf16"), gaudi(IMAGE, without("optimum-habana")), [])
    assert chosen(plan) == {"bf16": ("transformers", "compile")}
    said = "HPU nodes differ in optimum-habana: 1.21.2 on gaudi-1, none on gaudi-2"
    assert said in plan.notes


@pytest.mark.parametrize(
    ("body", "packages", "words"),
    [
        ("engine: optimum-habana", without("optimum-habana"), "gaudi-1: optimum-habana is not in"),
        ("engine: optimum-habana", without(torch=STOCK), "needs Intel's fork of torch"),
        ("hpu_mode: lazy", without(torch=STOCK), "needs Intel's fork of torch"),
        ("engine: optimum-habana", without(transformers="5.2.0"), "needs transformers below 4.56"),
    ],
)
def test_what_a_grid_names_and_no_node_can_run_is_said_by_the_plan(
    body: str, packages: Mapping[str, str], words: str
) -> None:
    (item,) = make_plan(one(f"precision: bf16\n{body}"), gaudi(packages), []).jobs
    assert item.action is Action.UNSUPPORTED and words in item.reason


def test_the_jobs_of_an_experiment_share_an_engine_where_one_can_run_them_all() -> None:
    """A method that the library's trainer lacks takes the whole comparison to Nightgrid's loop;
    LoRA alone runs with the trainer."""
    tuning = "workload: finetuning\nprecision: bf16\n"
    plain = make_plan(one(f"{tuning}method: lora"), gaudi(IMAGE), [])
    assert {item.job.engine for item in plain.jobs} == {"optimum-habana"}
    varied = one(f"{tuning}axes: {{method: [lora, dora]}}")
    assert {item.job.engine for item in make_plan(varied, gaudi(IMAGE), []).jobs} == {
        "transformers"
    }


def test_where_no_engine_runs_all_of_them_each_job_has_the_first_that_runs_it() -> None:
    asked = one("precision: bf16\naxes: {attention: [sdpa, flash_attention_2]}")
    sdpa, flash = make_plan(asked, gaudi(without("optimum-habana")), []).jobs
    assert (sdpa.action, sdpa.job.engine) == (Action.RUN, "transformers")
    assert flash.action is Action.UNSUPPORTED and "no hpu kernels" in flash.reason


def test_a_job_that_is_asked_for_open_and_by_name_is_planned_as_both_say() -> None:
    both = "  - {{name: open, precision: bf16}}\n  - {{name: named, engine: {}, precision: bf16}}\n"
    for engine, count in (("transformers", 2), ("optimum-habana", 1)):
        made = grid(HEAD + both.format(engine))
        plan = make_plan(made, gaudi(IMAGE), [])
        assert len(plan.jobs) == count == len({item.job.job_id for item in plan.jobs})
        emulated = make_plan(made, parse_emulation("1x1:HPU", ()), [])
        assert len({item.job.job_id for item in emulated.jobs}) == len(emulated.jobs)


def test_where_nothing_is_to_choose_jobs_stay_what_they_are() -> None:
    made = one("precision: bf16\naccelerator: [HPU, GPU]")
    for nodes in (parse_emulation("1x8:HPU,1x8:GPU", ()), assumed_servers([Accelerator.GPU])):
        jobs, notes = with_engines(made.jobs(), made.open_engines, nodes)
        assert notes == ()
        assert [j.job_id for j in jobs if j.accelerator is not HPU or nodes[0].emulated] == [
            j.job_id for j in made.jobs() if j.accelerator is not HPU or nodes[0].emulated
        ]


def test_verification_leaves_the_choice_open_too() -> None:
    made = one("precision: bf16")
    sizes = {"prompts": 2, "output_tokens": 4, "batch_size": 2}
    asked = verification_grid("g", made.jobs(), open_engines=made.open_engines, **sizes)
    assert asked is not None and "engine" not in asked["experiments"][0]
    named = one("precision: bf16\nengine: transformers")
    asked = verification_grid("g", named.jobs(), open_engines=named.open_engines, **sizes)
    assert asked is not None and asked["experiments"][0]["engine"] == "transformers"


PACKAGES = st.fixed_dictionaries(
    {"torch": st.sampled_from([FORK, STOCK]), "habana-torch-plugin": st.just("1.24.0")},
    optional={
        "transformers": st.sampled_from(["4.55.4", "5.2.0"]),
        "optimum-habana": st.just("1.21.2"),
        "vllm": st.just("0.26.0"),
        "vllm-gaudi": st.just("0.26.0"),
    },
)


@given(
    nodes=st.lists(PACKAGES, min_size=1, max_size=3),
    case=st.sampled_from(
        [
            *[("text-generation", p) for p in ("fp32", "fp16", "bf16", "fp8", "int8", "int4")],
            *[("finetuning", precision) for precision in ("fp32", "bf16")],
        ]
    ),
)
def test_what_is_chosen_is_there(nodes: list[dict[str, str]], case: tuple[str, str]) -> None:
    """Whatever the nodes have: a job runs with an engine, in a mode, that all of them have, unless
    there is none; then its reason, or a note, says who lacks what. Choosing again changes nothing.
    """
    workload, precision = case
    made = one(f"workload: {workload}\nprecision: {precision}")
    servers = gaudi(*nodes)
    jobs, _ = with_engines(made.jobs(), made.open_engines, servers)

    def lacking(job: Job) -> bool:
        spec = ENGINES[job.engine]
        mode = spec.mode("hpu", dict(job.parameters))
        return any(spec.lacks("hpu", mode, found) for found in nodes)

    plan = make_plan(made, servers, [])
    for item in plan.jobs:
        if item.action is Action.RUN and lacking(item.job):
            named = any("nodes differ in" in note for note in plan.notes)
            assert named and len(nodes) > 1, "the nodes that differ are named"
            stock = any("transformers" not in found for found in nodes)
            assert stock or precision == "fp8", "stock transformers would have run everywhere"
    assert with_engines(jobs, made.open_engines, servers)[0] == jobs


#: A processor's node with OpenVINO GenAI, which multiplies in bfloat16.
PROCESSOR = {
    "transformers": "5.23",
    "openvino": "2026.4.1",
    "openvino-genai": "2026.4.1",
    "cpu_bf16": "amx_bf16",
    "cpu_cores": "3",
}


def planned(body: str, *has: Mapping[str, str] | None, nodes: str = "") -> tuple[set[str], Plan]:
    """Precisions and engines of an experiment on a node for each set of packages, and the plan."""
    (node,) = parse_emulation(nodes, []) if nodes else assumed_servers([Accelerator.CPU])
    servers = [
        replace(node, name=f"n{n}", packages=None if found is None else tuple(found.items()))
        for n, found in enumerate(has)
    ]
    model = "" if "model:" in body else "model: smollm2-135m-instruct\n"
    plan = make_plan(one(f"{model}accelerator: CPU\n{body}"), servers, [])
    return {f"{item.job.precision} {item.job.engine}" for item in plan.jobs}, plan


def test_processors_that_have_openvino_run_it_where_it_is_faster() -> None:
    """fp32, and bf16 with instructions for it and two threads for a job; quantised jobs are another
    format with it."""
    every = "axes: {precision: [fp32, bf16, fp16, int8, int4]}"
    rest = {f"{precision} transformers" for precision in ("fp16", "int8", "int4")}
    found, plan = planned(every, PROCESSOR)
    assert found == {"fp32 openvino", "bf16 openvino"} | rest
    assert any("on CPU openvino for 2 jobs, transformers for 3 jobs" in note for note in plan.notes)
    older = {name: version for name, version in PROCESSOR.items() if name != "cpu_bf16"}
    for slower in (older, PROCESSOR | {"cpu_cores": "2"}):
        assert planned(every, PROCESSOR, slower)[0] == {"fp32 openvino", "bf16 transformers"} | rest
    assert planned("precision: bf16\nthreads: 1", PROCESSOR)[0] == {"bf16 transformers"}


@pytest.mark.parametrize(
    "body",
    [
        "axes: {torch_compile: [false, true]}",
        "torch_compile: true",
        "attention: eager",
        "profile: true",
        "model: tiny-chatglm3",
        "workload: finetuning",
    ],
)
def test_what_openvino_lacks_keeps_transformers(body: str) -> None:
    found, plan = planned(f"precision: fp32\n{body}", PROCESSOR)
    assert found == {"fp32 transformers"}
    assert not any("names no engine" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("has", "nodes"),
    [
        ([{"transformers": "5.23"}], ""),
        ([PROCESSOR, {"transformers": "5.23"}], ""),
        ([None], ""),
        ([PROCESSOR], "1x2:CPU"),
    ],
)
def test_processors_without_openvino_plan_what_they_did(
    has: list[Mapping[str, str] | None], nodes: str
) -> None:
    _, open_plan = planned("precision: bf16", *has, nodes=nodes)
    _, named = planned("precision: bf16\nengine: transformers", *has, nodes=nodes)
    assert [i.job.job_id for i in open_plan.jobs] == [i.job.job_id for i in named.jobs]
    assert open_plan.notes == named.notes


@pytest.mark.parametrize(
    ("setting", "absent", "more"),
    [
        ("precision: int4", "bitsandbytes", ""),
        ("method: qlora", "bitsandbytes", "precision: bf16\nworkload: finetuning"),
        ("optimizer: adamw-8bit-torchao", "torchao", "precision: bf16\nworkload: finetuning"),
        ("attention: xformers", "xformers", "precision: bf16"),
    ],
)
def test_a_package_of_a_precision_or_setting_that_no_node_has_is_named_by_the_plan(
    setting: str, absent: str, more: str
) -> None:
    """With the command that installs it; a node that said nothing of it is given the job."""
    text = f"accelerator: GPU\n{more}\n{setting}"
    words = f"{setting.replace(':', '')} needs the package {absent}"
    (server,) = assumed_servers([Accelerator.GPU])
    nodes = [replace(server, name=name, node_id=name) for name in ("gpu-1", "gpu-2")]

    def planned(*versions: str | None) -> list[str]:
        usual = (("torch", "2.13.0"), ("transformers", "5.23.0"))
        own = [usual if one is None else (*usual, (absent, one)) for one in versions]
        asked = [replace(node, packages=has) for node, has in zip(nodes, own, strict=True)]
        reasons = [
            item.reason
            for item in make_plan(one(text), asked, []).jobs
            if item.action is Action.UNSUPPORTED
        ]
        sentences, all_jobs = packages_lacking(one(text), asked)
        assert all_jobs == bool(reasons)
        assert all(words in sentence for sentence in sentences)
        return reasons

    (reason,) = planned("", "")
    assert words in reason and f"not installed on gpu-1, gpu-2: pip install {absent}" in reason
    assert planned("1.0", "") == planned("1.0", "1.0") == planned(None, None) == []
