"""The Kubernetes manifests are RayJobs that KubeRay accepts.

``rayjob.schema.json`` is KubeRay's own definition of a RayJob (v1 of release 1.7.0) to the last key
of its pods, closed against unknown keys; ``tools/make_rayjob_schema.py`` made it of the 1.4 MB that
KubeRay publishes. A misspelt or misplaced key is found by it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = ["clusters/rayjob-gaudi.yaml", "clusters/rayjob-gpu.yaml"]
SCHEMA = json.loads((ROOT / "tests" / "rayjob.schema.json").read_text(encoding="utf-8"))


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return loaded


def pod(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    return found


def groups(name: str) -> list[dict[str, Any]]:
    cluster = load(name)["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("name", FILES)
def test_the_manifest_is_a_rayjob(name: str) -> None:
    jsonschema.validate(load(name), SCHEMA)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(shutdownAfterJobFinished=True),
        lambda spec: spec["rayClusterSpec"].update(rayVersion=2.6),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(cpus=0),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: pod(spec)["containers"][0]["securityContext"].update(capability={}),
        lambda spec: pod(spec)["containers"][0].update(volumeMounts={}),
        lambda spec: pod(spec).update(hostIPC="yes"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(change: Any) -> None:
    manifest = load(FILES[0])
    change(manifest["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize("name", FILES)
def test_what_kuberay_checks_beyond_its_schema(name: str) -> None:
    """Both bounds of every group of workers, where no autoscaler runs; and a name that leaves room
    for those of the objects that are made for it."""
    manifest = load(name)
    for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert re.fullmatch("[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest["metadata"]["name"])


def test_gaudi_cards_are_told_to_ray_and_taken_from_kubernetes() -> None:
    """KubeRay does not know them. It puts the parameter on a shell's command line as it stands, and
    reads it itself after taking off single quotes."""
    head, worker = groups("clusters/rayjob-gaudi.yaml")
    parameter = worker["rayStartParams"]["resources"]
    resources = json.loads(parameter.strip("'"))
    assert [json.loads(word) for word in shlex.split(parameter)] == [resources]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert resources["HPU"] == limits["habana.ai/gaudi"] == 8
    assert worker["template"]["spec"]["hostIPC"] is True
    assert "hugepages-2Mi" in limits
    assert head["rayStartParams"] == {"num-cpus": "0"}  # else it would count as a CPU card


@pytest.mark.parametrize("name", FILES)
def test_every_pod_mounts_what_it_names_and_has_the_results(name: str) -> None:
    for group in groups(name):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert set(mounts) == volumes and mounts["results"] == "/results"


@pytest.mark.parametrize("name", FILES)
def test_strangers_are_refused_and_the_entrypoint_exists(name: str) -> None:
    spec = load(name)["spec"]
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    words = spec["entrypoint"].split()
    assert words[:4] == ["python", "-m", "orchestrator", "run"]
    assert (ROOT / Path(words[4]).relative_to("/opt/nightgrid")).exists()
