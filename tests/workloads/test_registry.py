"""Workloads by name, and the parameters they take."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from workloads import registry
from workloads.errors import BadConfiguration


@pytest.mark.parametrize("name", registry.WORKLOADS)
def test_every_workload_can_be_loaded(name: str) -> None:
    """The function named in the entry is there and takes a request and a context."""
    assert callable(registry.load(name))


def test_an_unknown_workload_is_refused_with_what_is_close() -> None:
    """The message suggests the name that was probably meant."""
    with pytest.raises(BadConfiguration, match="did you mean 'text-generation'"):
        registry.load("text-generaton")


@pytest.mark.parametrize("name", registry.WORKLOADS)
def test_every_parameter_has_a_default_and_a_description(name: str) -> None:
    """A grid may leave all parameters out, and the schema explains each."""
    entry = registry.WORKLOADS[name]
    assert entry.validate({})
    for field in entry.parameters.model_fields.values():
        assert field.description


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_token": 5},
        {"output_tokens": 0},
        {"output_tokens": "64"},
        {"output_tokens": 6.5},
        {"ignore_eos": 1},
        {"attention": "paged"},
        {"keep_texts": -1},
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, object]) -> None:
    """Unknown names, values out of range and values of another type are errors, not guesses."""
    with pytest.raises(ValidationError):
        registry.WORKLOADS["text-generation"].validate(wrong)
