"""A kind of card as a value: a name that a device declares."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.job import Accelerator, default_accelerator

KINDS = st.sampled_from(list(Accelerator))


@given(kind=KINDS, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_there_is_one_object_for_each(kind: Accelerator, protocol: int) -> None:
    """However it travels, it is the same kind, and plain text where text is wanted."""
    for again in (
        Accelerator(kind.value),
        Accelerator(kind),
        copy.copy(kind),
        copy.deepcopy(kind),
        pickle.loads(pickle.dumps(kind, protocol)),
    ):
        assert again is kind
    assert type(kind.value) is str and kind == kind.value and hash(kind) == hash(kind.value)
    assert json.loads(json.dumps({"accelerator": kind})) == {"accelerator": kind.value}
    assert f"{kind}" == kind.value == kind.spec.accelerator


@given(name=st.text(max_size=6).filter(lambda name: name not in set(Accelerator)))
def test_no_other_text_is_one(name: str) -> None:
    """A row, a grid or an option with another name is refused, whatever it is."""
    with pytest.raises(ValueError, match="there is: HPU, GPU, CPU"):
        Accelerator(name)
    assert not hasattr(Accelerator, "TPU")


def test_the_default_is_one() -> None:
    """Of a grid that names no kind."""
    assert default_accelerator() in set(Accelerator)
