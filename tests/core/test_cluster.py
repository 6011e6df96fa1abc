"""The sets of cards that a job may be given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Node, legal_card_sets, legal_groups


def node(name: str, accelerator: Accelerator = Accelerator.HPU, cards: int = 8) -> Node:
    return Node(
        node_id=name,
        name=name,
        accelerator=accelerator,
        card_indices=tuple(range(cards)),
        server_cards=cards,
    )


def test_gaudi_pairs_and_quads_are_aligned() -> None:
    """Two cards are {0,1}, {2,3}, …; four are {0-3} or {4-7}."""
    assert legal_groups(Accelerator.HPU, 2, 8) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert legal_groups(Accelerator.HPU, 4, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_gaudi_has_no_job_of_three_cards() -> None:
    """Only powers of two and whole servers are legal on Gaudi."""
    assert legal_groups(Accelerator.HPU, 3, 8) == ()


def test_gpu_servers_take_any_number() -> None:
    """NVIDIA servers run jobs of three cards."""
    assert (0, 1, 2) in legal_groups(Accelerator.GPU, 3, 8)


def test_more_cards_than_a_node_means_whole_nodes() -> None:
    """Sixteen cards are two whole servers; twelve are not to be had."""
    nodes = [node("a"), node("b"), node("c")]
    sets = legal_card_sets(nodes, Accelerator.HPU, 16)
    assert sets and all(len(cards) == 16 for cards in sets)
    assert legal_card_sets(nodes, Accelerator.HPU, 12) == []


def test_a_shared_server_gives_only_groups_that_are_wholly_ours() -> None:
    """When another user holds card 1, the pair {0,1} is not offered."""
    partial = Node(
        node_id="a", name="a", accelerator=Accelerator.HPU, card_indices=(0, 2, 3), server_cards=8
    )
    pairs = legal_card_sets([partial], Accelerator.HPU, 2)
    assert [[card.index for card in cards] for cards in pairs] == [[2, 3]]


@given(
    accelerator=st.sampled_from(list(Accelerator)),
    count=st.integers(-2, 40),
    size=st.integers(1, 16),
    servers=st.integers(1, 4),
)
def test_every_legal_set_has_the_size_asked_for_and_no_card_twice(
    accelerator: Accelerator, count: int, size: int, servers: int
) -> None:
    """Whatever is asked, a set holds exactly that many distinct cards of that kind."""
    nodes = [node(f"n{i}", accelerator, size) for i in range(servers)]
    for cards in legal_card_sets(nodes, accelerator, count):
        assert len(cards) == count == len(set(cards))
        assert {card.accelerator for card in cards} == {accelerator}
