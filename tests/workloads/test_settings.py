"""Declarations of settings and workloads: what is refused, and what a job's id takes from them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import core_cases
import pytest
from outside_device import offer
from pydantic import Field, ValidationError

from orchestrator.core.job import Job
from workloads import registry
from workloads.base import BadConfiguration
from workloads.engines import ENGINES
from workloads.registry import WORKLOADS, Declared, WorkloadSpec
from workloads.settings import WorkloadParameters, setting


def test_a_setting_without_one_of_the_three_roles_does_not_import() -> None:
    for default in (Field(default=1, description="Lines."), 1):
        with pytest.raises(TypeError, match=r"setting lines of .* has no role; write `lines: "):
            type(
                "Bare",
                (WorkloadParameters,),
                {"__annotations__": {"lines": int}, "lines": default, "__module__": __name__},
            )
    with pytest.raises(TypeError, match="'free' of a setting is none of work, choice, neutral"):
        setting(1, role="free", description="Lines.")


class FirstEdition(WorkloadParameters):
    """A workload's settings in the version that introduced it."""

    size: int = setting(64, role="work", always_in_id=True, description="Size.")
    mode: Literal["a", "b"] = setting("a", role="choice", always_in_id=True, description="Mode.")
    quick: bool = setting(False, role="choice", always_in_id=True, description="Quick.")


class SecondEdition(WorkloadParameters):
    """The same with a setting more, a value renamed, and one moved to an engine."""

    size: int = setting(64, role="work", always_in_id=True, description="Size.")
    mode: Literal["first", "b"] = setting(
        "first", role="choice", always_in_id=True, renamed={"a": "first"}, description="Mode."
    )
    depth: int | None = setting(1, role="work", description="Depth.")


@pytest.fixture
def id_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The id of a job with these parameters, all given, in an edition."""

    def id_of(edition: type[WorkloadParameters], **given: object) -> str:
        moved = {"quick": False} if edition is SecondEdition else {}
        changes: Any = {"name": "editions", "parameters": edition, "moved": moved}
        entry = replace(WORKLOADS["text-generation"], **changes)
        entries = MappingProxyType({**WORKLOADS, "editions": entry})
        monkeypatch.setattr(registry, "WORKLOADS", entries)
        registry.declared_in_rows.cache_clear()
        parameters = edition.model_validate(given).model_dump()
        return a_job("editions", **parameters).job_id

    return id_of


def a_job(workload: str, **parameters: Any) -> Job:
    given = tuple(sorted(parameters.items()))
    return core_cases.a_job(workload=workload, engine="transformers", parameters=given)


def test_a_later_setting_enters_the_id_only_with_another_value(id_of: Any) -> None:
    old = id_of(FirstEdition)
    assert id_of(SecondEdition) == id_of(SecondEdition, depth=1) == old
    assert len({old, id_of(SecondEdition, depth=2), id_of(SecondEdition, depth=None)}) == 3


def test_a_renamed_value_keeps_its_id(id_of: Any) -> None:
    assert id_of(SecondEdition, mode="first") == id_of(FirstEdition, mode="a")
    assert id_of(SecondEdition, mode="b") == id_of(FirstEdition, mode="b") != id_of(FirstEdition)


def test_a_setting_that_moved_keeps_the_ids_of_jobs_without_it(id_of: Any) -> None:
    first = {quick: id_of(FirstEdition, quick=quick) for quick in (False, True)}
    assert id_of(SecondEdition) == first[False]
    assert a_job("editions", size=64, mode="first", depth=1, quick=True).job_id == first[True]


@pytest.mark.parametrize("name", registry.WORKLOADS)
def test_every_workload_can_be_loaded(name: str) -> None:
    assert callable(registry.load(name))


def test_an_unknown_workload_is_refused_with_what_is_close() -> None:
    with pytest.raises(BadConfiguration, match="did you mean 'text-generation'"):
        registry.load("text-generaton")


WRONG: dict[str, list[tuple[str, object]]] = {
    "text-generation": [
        *(("output_token", 5), ("output_tokens", 0), ("output_tokens", "64")),
        *(("output_tokens", 6.5), ("ignore_eos", 1), ("attention", "paged"), ("keep_texts", -1)),
    ],
    "finetuning": [
        *(("rank", 0), ("rank", "8"), ("method", "prefix"), ("steps", 0), ("learning_rate", 0.0)),
        *(("save_adapter", "../elsewhere"), ("gradient_accumulation", 0), ("freeze_layers", -1)),
        *(("padding", "left"), ("torch_compile", 1), ("accumulate", 2)),
    ],
}


@pytest.mark.parametrize("workload", WRONG)
def test_unknown_names_and_values_of_other_types_and_ranges_are_refused(workload: str) -> None:
    for name, value in WRONG[workload]:
        with pytest.raises(ValidationError, match=name):
            registry.WORKLOADS[workload].validate({name: value})


ENTRY = """\
from workloads.settings import WorkloadParameters
from workloads.registry import WorkloadSpec
SPEC = WorkloadSpec(
    name="waiting", function="waiting:run", parameters=WorkloadParameters, summary="waits"
)
"""


@pytest.mark.parametrize(
    ("entry", "point", "known"),
    [
        pytest.param(ENTRY, "waiting", True, id="sound"),
        pytest.param("import nothing_of_that_name", "waiting", False, id="does not import"),
        pytest.param("SPEC = 3", "waiting", False, id="no entry"),
        pytest.param(ENTRY, "other-name", False, id="another name"),
        pytest.param(ENTRY.replace("waiting", "finetuning"), "finetuning", False, id="ours"),
    ],
)
def test_another_package_adds_a_workload_and_takes_none_of_ours(
    entry: str,
    point: str,
    known: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "waiting_entry.py").write_text(entry)
    offer(tmp_path, {point: "waiting_entry:SPEC"}, "nightgrid.workloads")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "waiting_entry", raising=False)
    ours = registry.WORKLOADS
    fresh = Declared(ours.where, WorkloadSpec, "nightgrid.workloads")
    assert set(fresh) == {*ours, *(["waiting"] if known else [])}
    assert all(fresh[name] is ours[name] for name in ours)
    assert (f"workload {point}" in caplog.text) == (not known and point != "finetuning")


ENGINE = """\
from workloads.engines.base import Ability, EngineSpec
from workloads.settings import Settings, setting
class Clashing(Settings):
    rank: int = setting(1, role="choice", description="One more.")
SPEC = EngineSpec(
    name="clashing", summary="clashes", needs="native_eager", install="pip install clashing",
    abilities={"train": Ability(function="nowhere:run", settings=Clashing)},
)
"""


def test_an_engine_whose_setting_is_called_as_a_workloads_costs_only_its_own_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clashing_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.import_module("clashing_engine").SPEC
    monkeypatch.setattr(registry, "ENGINES", {**ENGINES, "clashing": spec})
    finetuning = registry.WORKLOADS["finetuning"]
    with pytest.raises(BadConfiguration, match=r"clashing_engine\.Clashing.*both have 'rank'"):
        finetuning.model("clashing")
    assert finetuning.validate({"rank": 4}, "transformers")["rank"] == 4
