"""Software of a job: packages of other versions in a layer over those of its node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from wheels import make_source, make_wheel, use_only

from orchestrator.core.job import Accelerator, Job
from orchestrator.worker.layers import (
    available_versions,
    layer_findings,
    layer_if_made,
    layer_notes,
    layer_versions,
    make_layer,
)
from workloads import registry
from workloads.base import BadConfiguration
from workloads.devices import Level
from workloads.util.processes import started_ticks

WORKLOAD = "text-encoding"
BACKEND = """\
import os, subprocess, time
from pathlib import Path

def get_requires_for_build_wheel(config_settings=None):
    child = subprocess.Popen(["sleep", "600"])
    Path({aside!r}).write_text(str(child.pid))
    os.replace({aside!r}, {number!r})
    time.sleep(600)
"""


def a_job(software: str) -> Job:
    parameters = registry.find_workload(WORKLOAD).validate({"software": software}, "transformers")
    return Job(
        experiment="e",
        workload=WORKLOAD,
        model="tiny-bert",
        dataset="english-prompts",
        accelerator=Accelerator("CPU"),
        cards=1,
        precision="fp32",
        batch_size=1,
        engine="transformers",
        parameters=tuple(sorted(parameters.items())),
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "wheels"
    make_wheel(directory, "planted", "1.0", "", requires=["planted_below>=1", "pyyaml"])
    make_wheel(directory, "planted", "1.10", "")
    make_wheel(directory, "planted", "1.9", "")
    make_wheel(directory, "planted_below", "1.2", "")
    use_only(directory, tmp_path / "cache", monkeypatch)
    return directory


@pytest.mark.slow
def test_a_layer_has_the_named_package_and_what_is_missing_below_it(wheels: Path) -> None:
    """pyyaml is the node's own."""
    assert layer_if_made("planted==1.0") is None
    layer = make_layer("planted==1.0")
    assert layer_versions(layer) == {"planted": "1.0", "planted_below": "1.2"}
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert make_layer("planted==1.0") == layer == layer_if_made("planted==1.0")


@pytest.mark.slow
def test_a_refused_layer_is_not_tried_again(wheels: Path) -> None:
    make_wheel(wheels, "planted", "0.9", "")
    refused = (
        r"planted==3\.1 cannot be installed: Could not .* \(from versions: …, 1.0, 1.9, 1.10\)"
    )
    with pytest.raises(BadConfiguration, match=refused):
        make_layer("planted==3.1")
    make_wheel(wheels, "planted", "3.1", "")
    with pytest.raises(BadConfiguration, match=r"No matching distribution"):
        make_layer("planted==3.1")


@pytest.mark.slow
def test_an_index_that_does_not_answer_may_be_asked_again(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    silent = r"planted==4\.0 cannot be installed: the index did not answer: .*Connection refused"
    with pytest.raises(ImportError, match=silent):
        make_layer("planted==4.0")
    make_wheel(wheels, "planted", "4.0", "")
    assert layer_versions(make_layer("planted==4.0")) == {"planted": "4.0"}


@pytest.mark.slow
def test_an_installation_ends_with_what_it_started_when_its_worker_is_stopped(wheels: Path) -> None:
    """A package that builds for hours in a process below pip's."""
    number = wheels.parent / "pid"
    make_source(
        wheels, "endless", "1.0", BACKEND.format(number=str(number), aside=f"{number}.part")
    )
    with pytest.raises(ImportError, match="stopped"):
        make_layer("endless==1.0", number.exists)
    assert layer_if_made("endless==1.0") is None
    patience_s = time.monotonic() + 10
    while started_ticks(int(number.read_text())) is not None:
        assert time.monotonic() < patience_s
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("wheels")
def test_versions_are_listed_in_their_order() -> None:
    assert available_versions("planted") == ["1.0", "1.9", "1.10"]


def test_default_software_stays_out_of_ids_and_other_software_has_its_own_process() -> None:
    plain, layered = a_job("default"), a_job("planted==1.0")
    without = tuple(pair for pair in plain.parameters if pair[0] != "software")
    assert Job(**{**vars(plain), "parameters": without}).job_id == plain.job_id != layered.job_id
    assert (plain.process_kind, layered.process_kind) == ("", "@planted==1.0")
    assert plain.residency_key != layered.residency_key


@pytest.mark.parametrize("software", ["planted", "planted>=1", "planted==1.0,x==2", "a==1 @ b"])
def test_software_that_is_not_pinned_is_refused(software: str) -> None:
    with pytest.raises(ValueError, match="NAME==VERSION"):
        a_job(software)


def test_a_plan_says_what_nodes_install() -> None:
    notes = layer_notes([a_job("numpy==1.0"), a_job("default"), a_job("planted==1.0 numpy==1.0")])
    assert [note.partition(",")[0] for note in notes] == [
        "software numpy==1.0",
        "software planted==1.0 numpy==1.0",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("wheels")
def test_doctor_names_what_would_be_installed_and_what_cannot_be() -> None:
    able, unable = layer_findings([a_job("planted==1.0"), a_job("planted==7.0"), a_job("default")])
    assert able.level is Level.NOTE
    assert able.message.startswith("planted==1.0 would install planted==1.0, planted_below==1.2")
    assert unable.level is Level.ERROR and "planted==7.0 cannot be installed" in unable.message
