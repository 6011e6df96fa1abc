"""Translates Ray's exceptions about an agent into the failure of all that ran on its node."""

from __future__ import annotations

import os

from orchestrator.domain.failure import Failure, FailureClass
from orchestrator.worker.redaction import redact


def agent_failure(error: Exception) -> Failure:
    """The failure of a node whose agent is gone, with Ray's exception."""
    from ray.exceptions import ActorUnavailableError, NodeDiedError, OutOfMemoryError

    text = redact(str(error).strip(), os.environ)
    line = " ".join(text.split())[:500]
    kind = FailureClass.NODE_LOST
    # Ray 2.60 puts its words about memory into whatever exception the call has.
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        kind = FailureClass.HOST_OUT_OF_MEMORY
        message = f"Ray killed its agent for want of host memory: {line}"
    elif isinstance(error, NodeDiedError) or "node has died" in text.lower():
        message = f"Ray declared it dead: {line}"
    elif isinstance(error, ActorUnavailableError):
        message = f"its agent does not answer: {line}"
    else:
        message = f"its agent died: {line}"
    return Failure(failure_class=kind, message=message, tail=text[-4000:])


def node_lost(reason: str) -> Failure:
    """The failure of a node that is given up for this reason."""
    return Failure(failure_class=FailureClass.NODE_LOST, message=reason)
