"""The exceptions a workload raises; each is one class of failure in a row.

    WorkloadError
    ├── Unsupported        this combination cannot run on this device; not a fault
    ├── BadConfiguration   the job's settings contradict each other or the model
    ├── DataMissing        a model, checkpoint or dataset is not there or is incomplete
    ├── OutOfMemory        device memory is exhausted
    ├── CompileFailed      graph compilation failed
    ├── CardNotAcquired    the card is held by another process or not there
    ├── CardFaulty         the card computes something else than it should
    └── CollectiveFailed   a collective operation between ranks failed

``Device.classify`` turns a backend's own errors into these.
"""

from __future__ import annotations


class WorkloadError(Exception):
    """Base of all errors whose message is meant for the user as it stands."""


class Unsupported(WorkloadError):
    """This combination of settings cannot run on this device."""


class BadConfiguration(WorkloadError):
    """The settings contradict each other or the model."""


class DataMissing(WorkloadError):
    """A model, checkpoint or dataset is not there, or incomplete."""


class OutOfMemory(WorkloadError):
    """The device's memory is exhausted."""


class CompileFailed(WorkloadError):
    """Graph compilation failed."""


class CardNotAcquired(WorkloadError):
    """The card is held by another process or does not exist."""


class CardFaulty(WorkloadError):
    """The card is there, but what it computes or remembers is wrong."""


class CollectiveFailed(WorkloadError):
    """A collective operation between the ranks of a gang failed."""
