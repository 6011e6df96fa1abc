"""Failures of attempts: their classes, and the record that a row keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workloads import errors


class FailureClass(str, Enum):
    """Each class has a row and a policy (``retry.py``)."""

    OUT_OF_MEMORY = "out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    UNSUPPORTED = "unsupported"
    BAD_CONFIGURATION = "bad_configuration"
    DATA_MISSING = "data_missing"
    COMPILE = "compile"
    ACQUIRE = "acquire"
    CARD_FAULTY = "card_faulty"
    COLLECTIVE = "collective"
    HANG = "hang"
    CRASH = "crash"  # the process died of a signal or exit
    NODE_LOST = "node_lost"
    IMPORT = "import"
    ERROR = "error"  # an exception of no known class

    __str__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of an attempt, as its row keeps it."""

    failure_class: FailureClass
    message: str  # one line
    tail: str = ""  # end of the traceback or of stderr
    log: str = ""  # where the whole log lies, as host:path


_BY_TYPE: tuple[tuple[type[BaseException], FailureClass], ...] = (
    (errors.OutOfMemory, FailureClass.OUT_OF_MEMORY),
    (errors.Unsupported, FailureClass.UNSUPPORTED),
    (errors.BadConfiguration, FailureClass.BAD_CONFIGURATION),
    (errors.DataMissing, FailureClass.DATA_MISSING),
    (errors.CompileFailed, FailureClass.COMPILE),
    (errors.CardNotAcquired, FailureClass.ACQUIRE),
    (errors.CardFaulty, FailureClass.CARD_FAULTY),
    (errors.CollectiveFailed, FailureClass.COLLECTIVE),
    (MemoryError, FailureClass.HOST_OUT_OF_MEMORY),
    (ImportError, FailureClass.IMPORT),
    (FileNotFoundError, FailureClass.DATA_MISSING),
)


def classify(exception: BaseException) -> FailureClass:
    """The failure class of an exception that a worker caught, after ``Device.classify``."""
    for kind, failure_class in _BY_TYPE:
        if isinstance(exception, kind):
            return failure_class
    return FailureClass.ERROR
