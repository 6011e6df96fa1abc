"""This machine's own cards, as their vendors' tools list them; the tools are scripts here, which
print what was recorded on real cards. No card is used: that needs one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from odd_files import a_program
from recorded_hl_smi import GAUDI3_CSV

from orchestrator.cli.main import main
from orchestrator.core.errors import ClusterError
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import legal_card_sets
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
    for name in ("NVIDIA_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvidia, "nvml_telemetry", dict)  # those of a machine that has a card
    monkeypatch.setattr(gaudi, "hlml_telemetry", dict)
    return tmp_path / "tools"


def installs(tools: Path, name: str, printed: str) -> None:
    a_program(tools / name, f"cat <<'END'\n{printed}END")


def test_cards_are_found_and_hidden_ones_left_alone(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_cards(GPU) == own_cards(HPU) == {} and own_nodes([GPU, HPU]) == []
    installs(tools, "nvidia-smi", NVIDIA_CSV)
    installs(tools, "hl-smi", GAUDI3_CSV)
    assert own_cards(GPU) == {0: "", 1: ""} and len(own_cards(HPU)) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    [node] = own_nodes([GPU])
    assert node.card_indices == (1,) and node.server_cards == 2 and not node.emulated
    [node] = own_nodes([HPU, CPU])  # the processor drives the cards, and is none beside them
    assert node.accelerator is HPU and node.server_cards == 8
    assert {each.accelerator for each in own_machine()} == {GPU, HPU}


UUIDS = "index, uuid\n0, GPU-8dcb4b4c-0000-1111\n1, GPU-8dff3a85-2222-3333\n"


@pytest.mark.parametrize(
    ("value", "cards"),
    [
        ("1", (1,)),
        (" 1 , 0", (0, 1)),
        ("all", (0, 1)),
        ("0,-1,1", (0,)),
        ("GPU-8dff3a85-2222-3333", (1,)),
        ("gpu-8dc", (0,)),
        ("", "hides every card"),
        ("-1", "hides every card"),
        ("NoDevFiles", "hides every card"),
        ("0,2", "'2' is no card of this machine, which has the cards 0, 1"),
        ("GPU-8d", "'GPU-8d' is the beginning of several UUIDs"),
        ("GPU-9", "'GPU-9' is no card"),
        ("MIG-377e0049-554c-540b-93c6-d0976f8426cb", "names a MIG instance"),
        ("0,,1", "'' is no card"),
        ("0,0", "names card 0 twice"),
    ],
)
def test_visible_devices_are_resolved_or_refused_by_what_they_are(
    value: str, cards: tuple[int, ...] | str, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = f"case $1 in *uuid) cat <<'END'\n{UUIDS}END\n;; *) cat <<'END'\n{NVIDIA_CSV}END\nesac"
    a_program(tools / "nvidia-smi", printed)
    monkeypatch.setattr(nvidia, "uuid", lambda index: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    if isinstance(cards, tuple):
        assert tuple(own_cards(GPU)) == cards
        return
    with pytest.raises(ClusterError, match=cards) as refused:
        planned_nodes([GPU], None)
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in str(refused.value)


def test_what_hides_all_cards_is_not_answered_by_eight_assumed(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    with pytest.raises(ClusterError, match="NVIDIA_VISIBLE_DEVICES='void' hides every card"):
        planned_nodes([GPU], None)


def test_gaudi_modules_are_read_and_not_counted(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, *lines = GAUDI3_CSV.splitlines(keepends=True)
    installs(tools, "hl-smi", "".join([header, *lines[4:]]))
    here = list(own_cards(HPU))
    assert len(here) == 4 and set(here) != set(range(4))
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", f" {here[1]}, {here[0]} ")
    [node] = own_nodes([HPU])
    assert node.card_indices == tuple(sorted(here[:2])) and node.server_cards == 8


def test_seven_gaudi_cards_of_a_failing_tool_are_a_node_of_seven(tools: Path) -> None:
    """hl-smi ends with an error for the lost one, and has printed the others."""
    rows = GAUDI3_CSV.splitlines(keepends=True)
    a_program(tools / "hl-smi", f"cat <<'END'\n{''.join(rows[:3] + rows[4:])}END\nexit 1")
    [node] = own_nodes([HPU])
    assert len(node.card_indices) == 7 and node.server_cards == 8
    [lost] = {*range(8)} - {*node.card_indices}
    pairs = legal_card_sets([node], HPU, 2)
    assert len(pairs) == 3 and all(lost not in {card.index for card in pair} for pair in pairs)
    assert len(legal_card_sets([node], HPU, 4)) == 1 and not legal_card_sets([node], HPU, 8)


LOST = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n"


@pytest.mark.parametrize("listed", [True, False], ids=["others listed", "nothing else printed"])
def test_a_lost_card_is_named_and_the_others_run(
    listed: bool,
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nvidia-smi's words for a GPU that has fallen off the bus, mostly instead of all others."""
    gpus = tmp_path / "gpus"
    buses = [f"0000:{bus}:00.0" for bus in ("1b", "3b", "5c")]
    for bus in buses:
        (gpus / bus).mkdir(parents=True)
    monkeypatch.setattr(nvidia, "GPUS", gpus)
    rows = {bus: f"{n}, 71.3, 34, 0, 4, 81559" for n, bus in enumerate(buses) if n != 1}
    one = "".join(f"*id={bus}) printf '{QUERY}\\n{row}\\n' ;;\n" for bus, row in rows.items())
    all_others = f"printf '{QUERY}\\n' ; echo '{rows[buses[0]]}'; echo '{rows[buses[2]]}'"
    lost = f"echo '{LOST.strip()}'; {all_others if listed else ':'}; exit 15"
    a_program(tools / "nvidia-smi", f'case "$3" in {one}*) {lost};; esac')
    [node] = own_nodes([GPU])
    assert node.card_indices == (0, 2)
    assert node.faults == ("GPU1 is left out: Unknown Error",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    [node] = own_nodes([GPU])
    assert node.card_indices == (2,)


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
