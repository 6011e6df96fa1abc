"""This machine's own cards, as their vendors' tools list them; the tools are scripts here, which
print what was recorded on real cards. No card is used: that needs one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from recorded_hl_smi import GAUDI3_CSV

from orchestrator.cli.main import main
from orchestrator.core.errors import ClusterError
from orchestrator.core.job import Accelerator
from orchestrator.driver.plan import own_cards, own_machine, own_nodes, planned_nodes
from orchestrator.driver.session import own_session
from workloads.devices.monitor import gaudi, nvidia
from workloads.devices.monitor.nvidia import QUERY

GPU, HPU, CPU = map(Accelerator, ("GPU", "HPU", "CPU"))
NVIDIA_CSV = QUERY + "\n" + "".join(f"{n}, 71.3, 34, 0, 4, 81559\n" for n in range(2))
GRID = (
    "name: own\ndefaults: {workload: text-generation, model: tiny-chatglm3}\nexperiments:\n"
    "  - {name: e, accelerator: GPU}\n"
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the vendors' tools, which is all that the path has, and none in it."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    for name in ("CUDA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvidia, "nvml_telemetry", dict)  # those of a machine that has a card
    monkeypatch.setattr(gaudi, "hlml_telemetry", dict)
    return tmp_path / "tools"


def installs(tools: Path, name: str, printed: str) -> None:
    tool = tools / name
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}END\n")
    tool.chmod(0o755)


def test_cards_are_found_and_hidden_ones_left_alone(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_cards(GPU) == own_cards(HPU) == () and own_nodes([GPU, HPU]) == []
    installs(tools, "nvidia-smi", NVIDIA_CSV)
    installs(tools, "hl-smi", GAUDI3_CSV)
    assert own_cards(GPU) == (0, 1) and len(own_cards(HPU)) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    [node] = own_nodes([GPU])
    assert node.card_indices == (1,) and node.server_cards == 2 and not node.emulated
    [node] = own_nodes([HPU, CPU])  # the processor drives the cards, and is none beside them
    assert node.accelerator is HPU and node.server_cards == 8
    assert {each.accelerator for each in own_machine()} == {GPU, HPU}


def test_a_machine_without_cards_is_its_processor(tools: Path) -> None:
    [node] = own_machine()
    assert node.accelerator is CPU and node.card_indices == (0,) and not node.emulated
    assert own_nodes([CPU]) == [node]


def test_a_plan_is_for_the_cards_that_are_there(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installs(tools, "nvidia-smi", NVIDIA_CSV)
    (tmp_path / "grid.yaml").write_text(GRID)
    assert main(["plan", str(tmp_path / "grid.yaml"), "--json"]) == 0
    [node] = json.loads(capsys.readouterr().out)["nodes"]
    assert node["cards"] == 2 and not node["emulated"]
    own, assumed = planned_nodes([GPU, HPU], None)
    assert own.card_indices == (0, 1) and assumed.device_name == "assumed HPU"
    [host] = planned_nodes([CPU], None)  # one card, the whole host
    assert host.device_name == "assumed CPU" and host.card_indices == (0,)


def test_a_run_says_what_is_missing(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ClusterError, match=r"no GPU card \(nvidia-smi lists none\); give --emulate"),
        own_session([GPU]),
    ):
        pass
    installs(tools, "nvidia-smi", NVIDIA_CSV)
    monkeypatch.setattr("orchestrator.driver.session.local_address", lambda: "10.0.0.1:6379")
    with pytest.raises(ClusterError, match=r"runs on this machine, at 10\."), own_session([GPU]):
        pass
    monkeypatch.setattr("orchestrator.driver.session.local_address", str)
    with own_session([GPU]) as session:
        assert session.description == "this machine's own cards" and len(session.nodes) == 1
