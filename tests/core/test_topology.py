"""Kinds of cards as values, and the sets of cards that a job may be given."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import node, nodes

from orchestrator.core.job import Accelerator
from orchestrator.core.topology import legal_card_sets, legal_groups

HPU, GPU = Accelerator.HPU, Accelerator.GPU
KINDS = st.sampled_from(list(Accelerator))


@given(kind=KINDS, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_there_is_one_object_for_each(kind: Accelerator, protocol: int) -> None:
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
    with pytest.raises(ValueError, match="there is: HPU, GPU, CPU"):
        Accelerator(name)
    assert not hasattr(Accelerator, "TPU")


@pytest.mark.parametrize(
    ("kind", "count", "groups"),
    [
        (HPU, 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (HPU, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (HPU, 3, ()),
        (GPU, 3, ((0, 1, 2),)),
    ],
)
def test_groups_are_aligned_on_gaudi_and_of_any_size_on_nvidia_servers(
    kind: Accelerator, count: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert set(groups) <= set(legal_groups(kind, count, 8))
    assert kind is GPU or legal_groups(kind, count, 8) == groups


def test_more_cards_than_a_node_means_whole_nodes() -> None:
    sets = legal_card_sets(nodes(3), HPU, 16)
    assert sets and all(len(cards) == 16 for cards in sets)
    assert legal_card_sets(nodes(3), HPU, 12) == []


@given(
    accelerator=KINDS, count=st.integers(-2, 40), size=st.integers(1, 16), servers=st.integers(1, 4)
)
def test_every_legal_set_has_the_size_asked_for_and_no_card_twice(
    accelerator: Accelerator, count: int, size: int, servers: int
) -> None:
    equal = [node(f"n{number}", size, accelerator=accelerator) for number in range(servers)]
    for cards in legal_card_sets(equal, accelerator, count):
        assert len(cards) == count == len(set(cards))
        assert {card.accelerator for card in cards} == {accelerator}
