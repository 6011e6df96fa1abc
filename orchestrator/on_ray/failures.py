"""What Ray's exceptions about an actor say, as the failure of a row."""

from __future__ import annotations

from typing import Any

from orchestrator.failure import Failure, FailureClass


def actor_failure(error: Any, node_alive: bool) -> Failure:
    """The failure of a worker whose actor is gone. ``error`` is Ray's exception, or None when the
    actor did not answer."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        NodeDiedError,
        OutOfMemoryError,
        RayTaskError,
    )

    text = str(error).strip()
    line = " ".join(text.split())[:500]
    # Ray 2.60 puts its words about memory into whatever exception the call has.
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        kind = FailureClass.HOST_OUT_OF_MEMORY
        message = f"Ray killed the worker's actor for want of host memory: {line}"
    elif not node_alive or isinstance(error, NodeDiedError) or "node has died" in text.lower():
        kind, message = FailureClass.NODE_LOST, f"the worker's node was lost: {line}"
    elif isinstance(error, ActorUnavailableError):
        kind, message = FailureClass.NODE_LOST, f"the worker's node does not answer: {line}"
    elif error is None:
        kind, message = FailureClass.HANG, "the worker's actor did not answer"
    elif isinstance(error, RayTaskError) and not isinstance(error, ActorDiedError):
        kind, message = FailureClass.ERROR, f"the worker's actor failed: {line}"
    else:
        kind, message = FailureClass.CRASH, f"the worker's actor died: {line}"
    return Failure(failure_class=kind, message=message, tail=text[-4000:])
