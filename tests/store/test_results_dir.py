"""Results land where they outlive the run, whoever started it."""

from pathlib import Path

import pytest

from orchestrator.store.files import default_results_dir, inside_ray_job


def test_a_checkout_keeps_results_beside_it(tmp_path: Path) -> None:
    """Nothing set, no Ray job: ./results."""
    assert default_results_dir({}, tmp_path) == Path("results")


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "somewhere"),
        ({}, "ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0123"),
    ],
)
def test_inside_a_ray_job_results_leave_the_working_directory(
    tmp_path: Path, environment: dict[str, str], directory: str
) -> None:
    """Ray throws the working directory away, so the home directory has to do."""
    assert inside_ray_job(environment, tmp_path / directory)
    expected = Path.home() / "nightgrid-results"
    assert default_results_dir(environment, tmp_path / directory) == expected


def test_the_variable_settles_it(tmp_path: Path) -> None:
    """NIGHTGRID_RESULTS comes before everything but --results."""
    environment = {"NIGHTGRID_RESULTS": "~/kept", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    assert default_results_dir(environment, tmp_path) == Path.home() / "kept"
