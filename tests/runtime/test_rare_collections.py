"""Garbage collection is rare while a run is driven, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from orchestrator.runtime.garbage import RARELY, rare_collections


def test_within_the_block_collections_are_rare_and_what_was_there_is_left_out() -> None:
    """The thresholds are the rare ones, and objects from before are frozen."""
    with rare_collections():
        assert gc.get_threshold() == RARELY
        assert gc.get_freeze_count() > 1_000


def test_an_error_in_the_block_leaves_the_collector_as_it_was() -> None:
    """A run that fails changes nothing for who goes on in the process."""
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), rare_collections():
        raise RuntimeError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_made_in_the_block_are_still_found() -> None:
    """Garbage of the run itself is collected."""

    class Node:
        """One object that refers to itself."""

    with rare_collections():
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        del node
        assert gc.collect() > 0
