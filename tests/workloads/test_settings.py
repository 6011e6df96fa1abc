"""Declarations of settings: what does not import, and what a job's id takes from them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import core_cases
import pytest
from pydantic import Field

from orchestrator.core.job import Job
from workloads import registry
from workloads.registry import WORKLOADS
from workloads.settings import ROLES, WorkloadParameters, declarations, setting


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


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_setting_is_declared_once_and_whole(workload: str) -> None:
    entry = WORKLOADS[workload]
    declared = declarations(entry.parameters)
    assert entry.validate({}), "a grid may leave all of them out"
    assert list(declared) == list(entry.parameters.model_fields)
    for name, declaration in declared.items():
        info = entry.parameters.model_fields[name]
        assert [role for role in ROLES if declaration.role == role] == [declaration.role], name
        assert declaration.description == info.description and declaration.description, name
        assert declaration.default == info.default, name


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
