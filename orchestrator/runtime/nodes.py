"""Nodes that a run had before, and that come back one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ClusterError
from orchestrator.runtime.options import RunOptions, kinds_of

if TYPE_CHECKING:
    from orchestrator.domain.topology import Node
    from orchestrator.runtime.session import Session

#: Time that nodes may take to join a restarted head.
NODES_PATIENCE_S = 180.0


def cards_by_kind(nodes: Sequence[Node]) -> dict[str, int]:
    """Count the cards of each kind."""
    found: dict[str, int] = {}
    for node in nodes:
        found[node.accelerator.value] = found.get(node.accelerator.value, 0) + len(
            node.card_indices
        )
    return found


def with_its_nodes(
    options: RunOptions, session: Session, say: Callable[[str], None], run: Path
) -> Session:
    """The session with the nodes that the cluster had before its head died: they come back one
    after the other, and a plan for those that happen to be there would give up jobs for good.

    A run that somebody resumes may have fewer cards than before, but waits for each kind it had: it
    may be resumed while the cluster comes up.

    Raises:
        ClusterError: a kind of card does not come back at all.
    """
    if session.look is None:
        return session
    expected: Mapping[str, int] = {}
    if options.charge is not None and options.charge.again:
        expected = options.charge.cards
    elif options.resume:
        expected = dict.fromkeys(kinds_of(run), 1)
    deadline, told = time.monotonic() + NODES_PATIENCE_S, False
    while True:
        there = cards_by_kind(session.nodes)
        missing = {k: n - there.get(k, 0) for k, n in expected.items() if n > there.get(k, 0)}
        if not missing:
            return session
        what = ", ".join(f"{n} {k}" if n > 1 else k for k, n in missing.items())
        if time.monotonic() > deadline:
            if gone := [kind for kind in missing if kind not in there]:
                raise ClusterError(f"no node with {', '.join(gone)} has come back to the cluster")
            say(f"going on without {what} cards that the cluster had before")
            return session
        if not told:
            say(f"waiting for the cluster's nodes: {what} cards are not back yet")
            told = True
        time.sleep(1.0)
        session = replace(session, nodes=session.look())
