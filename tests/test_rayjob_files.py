"""The Kubernetes manifests are RayJobs that KubeRay accepts.

``SCHEMA`` is what our manifests use of KubeRay's RayJob (v1 of 1.7.0) and of Kubernetes' pods, with
every other key refused, as ``kubectl apply`` does: a misspelt or misplaced key is found. The whole
definition is over a megabyte and is not kept here; name a copy of it, such as ``kubectl get crd
rayjobs.ray.io -o yaml`` prints, in ``NIGHTGRID_RAYJOB_CRD`` to check against that as well.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = ["clusters/rayjob-gaudi.yaml", "clusters/rayjob-gpu.yaml"]
CRD_VARIABLE = "NIGHTGRID_RAYJOB_CRD"


def record(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these keys only."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


STRING = {"type": "string"}
WHOLE = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": STRING}  # rayStartParams: texts, not numbers
QUANTITY = {"anyOf": [WHOLE, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[KMGT]i?)?$"}]}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = record(
    "name image",
    name=STRING,
    image=STRING,
    env=array(record("name value", name=STRING, value=STRING)),
    resources=record("", requests=QUANTITIES, limits=QUANTITIES),
    securityContext=record("", capabilities=record("", add=array(STRING))),
    volumeMounts=array(record("name mountPath", name=STRING, mountPath=STRING)),
)
VOLUME = record(
    "name persistentVolumeClaim",
    name=STRING,
    persistentVolumeClaim=record("claimName", claimName=STRING),
)
POD = record(
    "spec",
    spec=record("containers", hostIPC=FLAG, containers=array(CONTAINER), volumes=array(VOLUME)),
)
SCHEMA = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record(
        "name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}
    ),
    spec=record(
        "entrypoint rayClusterSpec",
        entrypoint=STRING,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=WHOLE,
        submitterConfig=record("", backoffLimit=WHOLE),
        rayClusterSpec=record(
            "headGroupSpec rayVersion",
            rayVersion=STRING,
            authOptions=record("", mode={"enum": ["disabled", "token"]}),
            headGroupSpec=record("template rayStartParams", rayStartParams=TEXTS, template=POD),
            workerGroupSpecs=array(
                record(
                    # Without an autoscaler, KubeRay wants both bounds.
                    "groupName template rayStartParams minReplicas maxReplicas",
                    groupName=STRING,
                    replicas=WHOLE,
                    minReplicas=WHOLE,
                    maxReplicas=WHOLE,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
)


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return loaded


def groups(name: str) -> list[dict[str, Any]]:
    cluster = load(name)["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("name", FILES)
def test_the_manifest_is_a_rayjob(name: str) -> None:
    """Every key is one that exists, where it stands, with a value of its type."""
    jsonschema.validate(load(name), SCHEMA)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(shutdownAfterJobFinished=True),
        lambda spec: spec["rayClusterSpec"].update(rayVersion=2.6),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(cpus=0),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("maxReplicas"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(change: Any) -> None:
    """The check can fail: a misspelt key, a number for a text, a missing bound."""
    manifest = load(FILES[0])
    change(manifest["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


@pytest.mark.skipif(CRD_VARIABLE not in os.environ, reason=f"{CRD_VARIABLE} names no file")
@pytest.mark.parametrize("name", FILES)
def test_the_whole_definition_accepts_the_manifest(name: str) -> None:
    """KubeRay's own schema, closed against unknown keys as the API server closes it."""
    definition = yaml.safe_load(Path(os.environ[CRD_VARIABLE]).read_text(encoding="utf-8"))
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    jsonschema.validate(load(name), closed(versions["v1"]["schema"]["openAPIV3Schema"]))


def closed(schema: Any) -> Any:
    """The schema with unknown keys refused, in the words of JSON Schema."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    open_ended = made.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(made.get("properties"), dict) and not open_ended:
        made.setdefault("additionalProperties", False)
    return made


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
    """The driver writes rows on the head; other pods read adapters and checkpoints there."""
    for group in groups(name):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert set(mounts) == volumes and mounts["results"] == "/results"


@pytest.mark.parametrize("name", FILES)
def test_strangers_are_refused_and_the_entrypoint_exists(name: str) -> None:
    """Ray's token is on; the grid that is run is one of the image's, which holds this tree."""
    spec = load(name)["spec"]
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    words = spec["entrypoint"].split()
    assert words[:4] == ["python", "-m", "orchestrator", "run"]
    assert (ROOT / Path(words[4]).relative_to("/opt/nightgrid")).exists()
