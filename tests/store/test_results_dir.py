"""Results land where they outlive the run, whoever started it."""

from pathlib import Path

import pytest

from orchestrator.store.files import default_results_dir, inside_ray_job


@pytest.mark.parametrize(
    ("environment", "directory", "results"),
    [
        ({}, "checkout", Path("results")),
        # Ray throws the working directory away, so the home directory has to do.
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "x", Path.home() / "nightgrid-results"),
        ({}, "ray/runtime_resources/working_dir_files/_pkg", Path.home() / "nightgrid-results"),
        (
            {"NIGHTGRID_RESULTS": "~/there", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},
            "x",
            Path.home() / "there",
        ),
    ],
)
def test_where_results_go(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    directory: str,
    results: Path,
) -> None:
    for name in ("NIGHTGRID_RESULTS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / directory).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / directory)
    assert default_results_dir() == results
    assert inside_ray_job() == (results != Path("results"))
