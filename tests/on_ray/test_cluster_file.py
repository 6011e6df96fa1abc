"""The files of real clusters are ones that Ray accepts, and open nothing to strangers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from odd_files import a_program

from workloads.devices.monitor.gaudi import PRODUCTS

ROOT = Path(__file__).resolve().parents[2]
FILES = ["cluster.yaml", "clusters/gpu.yaml", "clusters/mixed.yaml"]
GAUDI2, GAUDI3 = ({"HPU": 8, f"accelerator_type:{product.ray_type}": 1} for product in PRODUCTS)


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", FILES)
def test_the_cluster_launcher_accepts_the_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load(name))
    validate_config(config)
    node = config["available_node_types"]["local.cluster.node"]
    servers = len(config["provider"]["worker_ips"])
    assert node["min_workers"] == node["max_workers"] == config["max_workers"] == servers


@pytest.mark.parametrize("name", FILES)
def test_every_node_asks_for_the_token(name: str) -> None:
    config = load(name)
    in_containers = "-e RAY_AUTH_MODE=token" in config.get("docker", {}).get("run_options", ())
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert in_containers or "RAY_AUTH_MODE=token" in commands[-1]
    ((remote, local),) = config["file_mounts"].items()
    assert local == "~/.ray/auth_token"
    assert remote in ("~/.ray/auth_token", "/root/.ray/auth_token", "/home/ray/.ray/auth_token")
    assert "chmod 600 ~/.ray/auth_token" in config["setup_commands"]


@pytest.mark.parametrize("name", FILES)
def test_no_node_listens_for_jobs_on_the_network(name: str) -> None:
    config = load(name)
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    hosts = [
        word.partition("=")[2]
        for command in commands
        for word in command.split()
        if word.startswith("--dashboard-host")
    ]
    assert hosts == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("name", "tools", "expected"),
    [
        ("cluster.yaml", ["hl-smi", "HL-225"], GAUDI2),
        ("cluster.yaml", ["hl-smi", "HL-325L"], GAUDI3),
        ("cluster.yaml", ["hl-smi", "HL-338"], GAUDI3),
        ("clusters/mixed.yaml", ["hl-smi", "HL-225"], GAUDI2),
        ("clusters/mixed.yaml", ["hl-smi", "HL-338"], GAUDI3),
        ("clusters/mixed.yaml", ["hl-smi", "HL-325L"], GAUDI3),
        ("clusters/mixed.yaml", ["nvidia-smi"], {}),
        ("clusters/gpu.yaml", ["nvidia-smi"], None),
    ],
)
@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_server_declares_the_cards_it_has(name, tools, expected, role, tmp_path) -> None:
    said = tmp_path / "said"
    for directory in ("bin", "nightgrid-venv/bin"):
        (tmp_path / directory).mkdir(parents=True)
        a_program(tmp_path / directory / "ray", f"printf '%s\\n' \"$@\" > {said}")
    a_program(tmp_path / "bin" / tools[0], f"for card in 1 2; do echo {tools[-1]}; done")
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.1"}
    for command in load(name)[f"{role}_start_ray_commands"]:
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment | {"HOME": str(tmp_path)},
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    words = said.read_text(encoding="utf-8").splitlines()
    assert words[0] == "start"
    assert ("--head" in words) == (role == "head")
    assert ("--address=10.0.0.1:6379" in words) == (role == "worker")
    resources = [word.partition("=")[2] for word in words if word.startswith("--resources=")]
    assert [json.loads(text) for text in resources] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("name", "dockerfile"),
    [
        ("cluster.yaml", "clusters/gaudi.Dockerfile"),
        ("clusters/gpu.yaml", "clusters/gpu.Dockerfile"),
    ],
)
def test_the_image_is_the_one_that_the_dockerfile_makes(name: str, dockerfile: str) -> None:
    image = load(name)["docker"]["image"]
    build = f"docker build -t {image} -f {dockerfile}"
    text = (ROOT / dockerfile).read_text(encoding="utf-8")
    assert build in text and build in (ROOT / name).read_text(encoding="utf-8")
    pin = next(
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("ray==")
    )
    assert f'"ray[default]=={pin.removeprefix("ray==")}"' in text


@pytest.mark.parametrize("name", ["gaudi", "gaudi-vllm"])
def test_an_image_keeps_the_torch_of_its_vendor(name: str) -> None:
    text = (ROOT / f"clusters/{name}.Dockerfile").read_text(encoding="utf-8")
    steps = re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    installs = [part for part in re.split(r"&&|\n", steps) if "pip install" in part]
    assert installs and all("-c /opt/keep.txt" in each for each in installs)
    assert "grep -iE '^(torch|habana" in steps
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    (base,) = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    image = re.sub(r"\$\{(\w+)\}", lambda named: arguments[named[1]], base)
    kind = r"(pytorch-(upstream-)?installer|vllm-[\d.]+-ptupstream)-2\.1[01]\.0"
    directory = r"vault\.habana\.ai/gaudi-docker/1\.24\.[01]/ubuntu2[24]\.04/habanalabs"
    assert re.fullmatch(f"{directory}/{kind}:latest", image)


def test_the_images_of_vllm_leave_the_command_to_ray() -> None:
    """Ray's launcher ends its `docker run` with `bash`; the entry point of Habana's image starts a
    server with it. Ray's own image has none."""
    gaudi, gpu = (
        (ROOT / f"clusters/{name}-vllm.Dockerfile").read_text(encoding="utf-8")
        for name in ("gaudi", "gpu")
    )
    assert re.findall(r"^ENTRYPOINT (.*)$", gaudi, re.MULTILINE) == ["[]"]
    assert re.findall(r"^FROM (\S+)$", gpu, re.MULTILINE) == ["rayproject/ray:2.60.0-py312-gpu"]
    assert "vllm==" in gpu and "ENTRYPOINT" not in gpu


def test_servers_with_nvidia_cards_have_the_package_that_reads_their_energy() -> None:
    for name in ("gpu.Dockerfile", "gpu-vllm.Dockerfile"):
        text = (ROOT / "clusters" / name).read_text(encoding="utf-8")
        assert re.search(r"/opt/nightgrid\[(\w+,)*gpu\b", text), name
    assert "--extras gpu," in (ROOT / "clusters/mixed.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("there", [True, False])
def test_a_container_has_the_infiniband_devices_of_its_server(there: bool, tmp_path: Path) -> None:
    """The launcher's shell on the server evaluates the option."""
    devices = tmp_path / "infiniband"
    if there:
        devices.mkdir()
    (option,) = (o for o in load("clusters/gpu.yaml")["docker"]["run_options"] if "infiniband" in o)
    line = f"echo run {option} image".replace("/dev/infiniband", str(devices))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["run", *([f"--device={devices}"] if there else []), "image"]


# ---------------------------------------------------------------- manifests for Kubernetes

# ``rayjob.schema.json`` is KubeRay's own definition of a RayJob (v1 of release 1.7.0), closed
# against unknown keys; ``tools/make_rayjob_schema.py`` made it.

RAYJOBS = ["clusters/rayjob-gaudi.yaml", "clusters/rayjob-gpu.yaml"]
SCHEMA = json.loads((ROOT / "tests" / "rayjob.schema.json").read_text(encoding="utf-8"))


def groups(name: str) -> list[dict[str, Any]]:
    cluster = load(name)["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("name", RAYJOBS)
def test_the_manifest_is_a_rayjob(name: str) -> None:
    jsonschema.validate(load(name), SCHEMA)


@pytest.mark.parametrize("name", RAYJOBS)
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


@pytest.mark.parametrize("name", RAYJOBS)
def test_every_pod_mounts_what_it_names_and_has_the_results(name: str) -> None:
    for group in groups(name):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {
            mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]
        }
        assert set(mounts) == volumes and mounts["results"] == "/results"


@pytest.mark.parametrize("name", RAYJOBS)
def test_strangers_are_refused_and_the_entrypoint_exists(name: str) -> None:
    spec = load(name)["spec"]
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    words = spec["entrypoint"].split()
    assert words[:4] == ["python", "-m", "orchestrator", "run"]
    assert (ROOT / Path(words[4]).relative_to("/opt/nightgrid")).exists()
