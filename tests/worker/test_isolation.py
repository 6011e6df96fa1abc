"""The environment and a model's generation config start every job as they were."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from workloads.isolation import ProcessState, ResidentModel


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NIGHTGRID_TEST_KEPT", "NIGHTGRID_TEST_GONE"):
        monkeypatch.setenv(name, "before")
    clean = ProcessState.now()
    before = dict(os.environ)
    os.environ["NIGHTGRID_TEST_KEPT"] = "changed"
    os.environ["NIGHTGRID_TEST_NEW"] = "new"
    del os.environ["NIGHTGRID_TEST_GONE"]
    clean.restore()
    assert dict(os.environ) == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "putenv", lambda *_: pytest.fail("written"))
        clean.restore()


def config_of_a_model() -> SimpleNamespace:
    """Attributes only, as transformers' is."""
    return SimpleNamespace(max_length=20, stop=[1])


class Model:
    def __init__(self) -> None:
        self.generation_config = config_of_a_model()


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """An engine's belongings: a model and things beside it, frozen."""

    model: Model
    name: str = "tiny"


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    generation_config: SimpleNamespace


@pytest.mark.parametrize(
    ("wrap", "config"),
    [
        (lambda model: model, lambda loaded: loaded.generation_config),
        (lambda model: Loaded(model), lambda loaded: loaded.model.generation_config),
        (lambda model: (model, "tokenizer"), lambda loaded: loaded[0].generation_config),
        (lambda model: {"model": model}, lambda loaded: loaded["model"].generation_config),
        (lambda model: Holder(model.generation_config), lambda h: h.generation_config),
    ],
)
def test_changes_in_place_are_undone(
    wrap: Callable[[Model], Any], config: Callable[[Any], SimpleNamespace]
) -> None:
    resident = ResidentModel()
    loaded = resident.load("key", lambda: wrap(Model()))
    for _ in range(2):
        config(loaded).max_length = 99
        config(loaded).stop.append(2)
        config(loaded).static_shapes = True
        resident.clean()
        assert vars(config(loaded)) == {"max_length": 20, "stop": [1]}


def test_a_config_that_was_replaced_comes_back() -> None:
    resident, model = ResidentModel(), Model()
    original = model.generation_config
    resident.load("key", lambda: model)
    model.generation_config = config_of_a_model()
    resident.clean()
    assert model.generation_config is original


class Engine:
    def generation_config(self) -> None:
        """Make a config for each call."""


@pytest.mark.parametrize(
    "loaded", [SimpleNamespace(generation_config=None), "text", Loaded, Engine()]
)
def test_what_has_no_config_is_left_alone(loaded: Any) -> None:
    resident = ResidentModel()
    assert resident.load("key", lambda: loaded) is loaded
    resident.clean()
