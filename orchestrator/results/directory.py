"""Default directory of results.

``./results`` suits a checkout. Inside a Ray job the working directory is a copy that Ray throws
away with the job, so results go to the home directory of the node that drives the run, and the run
says so. ``NIGHTGRID_RESULTS`` settles it for a machine or a job. It may be the address of an
object store, to which a copy goes (``mirror.py``); the results themselves lie where they do
without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "NIGHTGRID_RESULTS"
#: Ray sets this for the entrypoint of a job and for nothing else.
RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: How an address of results begins that is no directory.
SCHEMES = ("s3://", "gs://", "gcs://")
_RAY_WORKING_DIRS = "runtime_resources/working_dir_files"


def default_results_dir(
    environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> Path:
    """The results directory for a process with this environment in this working directory."""
    environment = os.environ if environment is None else environment
    chosen = environment.get(VARIABLE)
    if chosen and not is_address(chosen):
        return Path(chosen).expanduser()
    if inside_ray_job(environment, directory):
        return Path.home() / "nightgrid-results"
    return Path("results")


def directory_of(text: str) -> Path:
    """The directory that a text names; ``~`` is expanded here, as no shell does in a Ray job.

    Raises:
        ValueError: it begins with the home directory of a user that this machine does not have.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise ValueError(f"{text}: this machine has no home directory {user}") from None


def is_address(text: str) -> bool:
    """Return whether this names an object store, and no directory."""
    return text.startswith(SCHEMES)


def default_address() -> str:
    """The address for a copy of results that the environment names; empty without one."""
    chosen = os.environ.get(VARIABLE, "")
    return chosen if is_address(chosen) else ""


def inside_ray_job(
    environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> bool:
    """Return whether this process is the entrypoint of a Ray job, with a temporary working
    directory."""
    environment = os.environ if environment is None else environment
    directory = directory or Path.cwd()
    return RAY_JOB_VARIABLE in environment or _RAY_WORKING_DIRS in directory.as_posix()
