"""Fixtures of workloads: a cache of made models, a worker that keeps them, a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import nightgrid  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def cache(made: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIGHTGRID_CACHE", str(made))
        patch.delenv("NIGHTGRID_ADAPTERS", raising=False)
        yield made


@pytest.fixture(scope="session")
def small_model(made: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first layer of the embedded model, which is compiled and exported in less time."""
    from generation_cases import MODEL, one_layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIGHTGRID_CACHE", str(made))
        return one_layer(MODEL, tmp_path_factory.mktemp("models") / "one-layer")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    from generation_cases import write_dataset

    return write_dataset(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("shared")
        for variable in ("NIGHTGRID_MODELS", "NIGHTGRID_ADAPTERS"):
            patch.setenv(variable, str(root))
        yield root


@pytest.fixture(scope="module")
def worker() -> Any:
    from generation_cases import Worker

    return Worker()
