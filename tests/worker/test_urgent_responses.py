"""Responses that a worker may wait for the answer to: the driver waits for no others with them."""

from __future__ import annotations

import pytest

from orchestrator.worker.messages import Ended, Halted, Response, ResponseBatch, Stopped


def batch_of(*responses: Response, server_gone: bool = False) -> ResponseBatch:
    return ResponseBatch(1, responses, 0, None, None, server_gone)


def ended(*, more: bool) -> Ended:
    return Ended("w", "a-1", None, False, more=more)


def test_ends_of_jobs_with_others_behind_them_are_not_urgent() -> None:
    """Their workers go on. Nor is a batch of nothing."""
    assert not batch_of(ended(more=True), ended(more=True)).urgent
    assert not batch_of().urgent


@pytest.mark.parametrize(
    "response", [ended(more=False), Stopped("w"), Halted("w", "a-1", "stopped")], ids=repr
)
def test_all_else_is_urgent(response: Response) -> None:
    """Also beside an end that is not."""
    assert batch_of(ended(more=True), response).urgent


def test_the_end_of_a_process_server_is_urgent() -> None:
    """Every worker went with it."""
    assert batch_of(server_gone=True).urgent
