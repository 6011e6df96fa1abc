"""Code that comes with a model is never run unless whoever starts the run has named that model.

A checkpoint may bring Python files, and transformers would run them on every card with the rights
of the worker. A grid file travels and is only data, so it cannot allow that. The command line can:
``nightgrid run --remote-code MODEL``, once for each model, which reaches the workers as a variable
of their environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from workloads.base import BadConfiguration
from workloads.environment import variables
from workloads.models import hub

#: Names of models that may run their own code, separated like the directories of PATH.
VARIABLE = "NIGHTGRID_REMOTE_CODE"


def allowed(model: str) -> bool:
    """Tell if the model of this name, as the job writes it, may run its own code here. A repository
    of the hub that is named stands for the commit that the plan found, too."""
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    repository, revision = hub.split(model)
    pinned = hub.COMMIT.fullmatch(revision) and not os.path.exists(model)
    return model in named or bool(pinned and repository in named)


@contextlib.contextmanager
def permitted(models: Sequence[str]) -> Iterator[None]:
    """Let exactly these models run their code during the block, here and in processes that are
    given what ``passed_on`` says; with none named, what the environment says stays in force."""
    with variables({VARIABLE: os.pathsep.join(models)} if models else {}):
        yield


def passed_on() -> Mapping[str, str]:
    """This process's permission, for the environment of a process that it starts elsewhere."""
    return {VARIABLE: os.environ.get(VARIABLE, "")}


def refusal(model: str, error: Exception) -> BadConfiguration | None:
    """The error to raise instead, if ``error`` says that the model wants to run its own code."""
    if "trust_remote_code" not in str(error):
        return None
    return BadConfiguration(
        f"{model} brings Python code of its own, which is not run unless the model is named: "
        f"read that code, then give `nightgrid run --remote-code {model}`"
    )
