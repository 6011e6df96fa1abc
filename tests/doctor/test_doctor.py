"""Judging a cluster's facts, and what a node can say of itself; nothing here starts Ray."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from orchestrator.core import errors
from orchestrator.core.job import Accelerator
from orchestrator.doctor.checks import (
    as_json,
    exit_code,
    finding_lines,
    finding_of,
    judge,
    summary_lines,
)
from orchestrator.doctor.probe import (
    engine_modules,
    examine,
    hugepages_asked,
    import_errors,
    look_into,
)
from orchestrator.on_ray.examination import (
    ClockOffset,
    ClusterFacts,
    NodeFacts,
    Probe,
    SharedFacts,
    Space,
    Versions,
)
from orchestrator.util.host import MemoryUse
from workloads.devices import CardFacts, Finding, Level
from workloads.devices.cuda import CudaDevice
from workloads.devices.monitor.host import CardTelemetry

GIB = 2**30
HERE = Versions(ray="2.60.0", python="3.10.12")
GAUDI_VERSIONS = {
    "nightgrid": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.10.0a0+git1234567",
    "transformers": "4.55.4",
    "optimum-habana": "1.21.2",
    "habana-torch-plugin": "1.24.0.505",
}


def gaudi_probe(**changes: Any) -> Probe:
    fields: dict[str, Any] = {
        "hostname": "gaudi-01",
        "python": "3.10.12",
        "versions": GAUDI_VERSIONS,
        "import_errors": {},
        "cards": cards(range(8)),
        "driver_version": "1.24.0-b336d5e",
        "kernel": "Linux 5.15.0-139-generic",
        "hugepages_total": 153_600,
        "hugepage_bytes": 2 * 2**20,
        "memory_bytes": 1024 * GIB,
        "shared_memory_bytes": 512 * GIB,
        "open_files": 1_048_576,
        "locked_bytes": -1,
        "spaces": (Space(purpose="results", path="/r", free_bytes=900 * GIB),),
    }
    return Probe(**fields | changes)


def cards(indices: Iterable[int], **facts: Any) -> tuple[CardFacts, ...]:
    return tuple(CardFacts(index=index, **facts) for index in indices)


def gaudi(name: str = "gaudi-01", probe: Probe | None = None, **changes: Any) -> NodeFacts:
    fields: dict[str, Any] = {
        "name": name,
        "node_id": name,
        "cards": {Accelerator.HPU: 8},
        "cards_free": 8,
        "device_name": "Intel-GAUDI2",
        "probe": probe or gaudi_probe(),
        "clock": ClockOffset(offset_s=0.002, bound_s=0.001),
    }
    return NodeFacts(**fields | changes)


def cluster(*nodes: NodeFacts, **changes: Any) -> ClusterFacts:
    fields: dict[str, Any] = {
        "address": "10.0.0.1:6379",
        "driver": HERE,
        "nodes": nodes,
        "token": True,
        "dashboard": "127.0.0.1:8265",
    }
    return ClusterFacts(**fields | changes)


def memory(used: int) -> MemoryUse:
    return MemoryUse(used_bytes=used, limit_bytes=100, killed_from=0.95)


def test_a_cluster_as_it_should_be_has_no_findings() -> None:
    software = {"nightgrid": "0.1.0", "ray": "2.60.0", "torch": "2.13.0"}
    probe = gaudi_probe(versions=software, driver_version="580.65.06")
    gpu = gaudi("gpu-01", probe, cards={Accelerator.GPU: 8})
    found = judge(cluster(gaudi(), gaudi("gaudi-02"), gpu))
    assert [finding for finding in found if finding.level > Level.NOTE] == []


W, E, N = Level.WARNING, Level.ERROR, Level.NOTE

#: A node that is not as it should be, and the finding: its check, its level, words of it.
NODES: list[tuple[NodeFacts, str, Level, str]] = [
    (gaudi(cards_free=5), "cards-free", W, "3 of 8 cards are held in Ray's accounts"),
    (gaudi(clock=ClockOffset(offset_s=-2.0, bound_s=0.01)), "clock", W, "2.00 s (±0.010 s) behind"),
    (gaudi(clock=ClockOffset(offset_s=0.9, bound_s=0.01)), "clock", W, "ahead of"),
    (
        gaudi(cards={Accelerator.HPU: 8, Accelerator.GPU: 2}, cards_free=10),
        *("cards", E, "GPU and HPU cards"),
    ),
    # Two- and four-card jobs then have fewer groups to run on.
    (
        gaudi(
            probe=gaudi_probe(cards=cards(range(4, 8))), cards={Accelerator.HPU: 4}, cards_free=4
        ),
        *("cards", N, "4 of a Gaudi server's 8 cards"),
    ),
    *(
        (dataclasses.replace(gaudi(), probe=None, clock=None, **changes), *finding)
        for changes, *finding in [
            ({"trouble": "it did not answer within 20 s"}, "answer", E, "not answer within 20 s"),
            ({"trouble": "no module named x"}, "answer", E, "no module named x"),
            ({"alive": False}, "nodes", W, "was in the cluster and is dead"),
        ]
    ),
]

#: The same, where the probe tells it.
PROBES: list[tuple[dict[str, Any], str, Level, str]] = [
    ({"import_errors": {"peft": "ImportError: gone"}}, "imports", E, "peft does not import"),
    (
        {"versions": GAUDI_VERSIONS | {"transformers": "5.23.0"}},
        *("imports", E, "transformers 5.23.0 is too new for optimum-habana 1.21.2"),
    ),
    ({"cards": ()}, "cards", E, "Ray has 8 HPU cards, but hl-smi shows none"),
    ({"cards": cards(range(7))}, "cards", E, "Ray has 8 HPU cards, but hl-smi shows 7"),
    (
        {"cards": cards({*range(8)} - {5})},
        *("cards", W, "7 of the server's 8 cards; the module ids 5 are missing"),
    ),
    ({"cards": (*cards(range(7)), *cards([7], occupied="by X"))}, "cards-free", W, "by X"),
    ({"driver_version": "1.22.1-7e"}, "driver", E, "the driver is 1.22.1-7e, Habana's PyTorch is"),
    ({"cards": (*cards(range(7)), *cards([7], temperature_c=0.0))}, "cards", E, "card 7 has 0 °C"),
    ({"cards": (*cards(range(7)), *cards([7], lost="gone"))}, "cards", W, "card 7 is lost: gone"),
    ({"hugepages_total": 0}, "hugepages", W, "no huge pages are reserved"),
    (
        {"hugepages_asked": {"/etc/sysctl.d/90-gaudi.conf": 47_500}},
        *("hugepages", W),
        "90-gaudi.conf asks for 47500 huge pages, and 153600 (300 GiB) are reserved",
    ),
    (
        {
            "cards": (
                *cards(range(7), product="HL-225", links=21, links_up=21),
                *cards([7], product="HL-225", links=21, links_up=18),
            )
        },
        *("ports", E, "(card 7 has 18 of 21 up)"),
    ),
    (
        {"cards": cards(range(8), product="HL-325L")},
        *("cards", W, "Ray calls its cards Intel-GAUDI2, hl-smi says Gaudi3"),
    ),
    (
        {"governors": {"powersave": 150, "performance": 10}},
        *("governor", W, "(powersave on 150 of 160 cores)"),
    ),
    ({"max_cstate": 9}, "idle-states", W, "down to state C9"),
    ({"versions": GAUDI_VERSIONS | {"torch": "2.10.0+cpu"}}, "torch", N, "is the stock one"),
    ({"versions": GAUDI_VERSIONS | {"deepspeed": "0.19.8"}}, "deepspeed", W, "does not know hpu"),
    ({"kernel": "Linux 6.8.0-45-generic"}, "iommu", W, "without IOMMU passthrough"),
    ({"open_files": 1024}, "limits", W, "may open 1,024 files"),
    ({"locked_bytes": 8 * 2**20}, "limits", W, "may lock 8192 KiB"),
    ({"shared_memory_bytes": 64 * 2**20}, "limits", W, "/dev/shm has 0.1 GiB free"),
    (
        {"spaces": (Space(purpose="Ray's files", path="/tmp/ray", free_bytes=5 * GIB),)},
        *("disk", W, "5.0 GiB are free for Ray's files at /tmp/ray, less than 10"),
    ),
    *(
        (
            {"spaces": (Space(purpose="results", path="/r", free_bytes=GIB << 9, unlocked=why),)},
            *("locks", level, f"the file system of /r has no {what} ({why})"),
        )
        for what, why, level in [
            ("locks", "flock: No locks available", W),
            ("hard links", "link: Operation not permitted", E),
        ]
    ),
    ({"home_problem": "the home directory / of user 7 …"}, "home", E, "the home directory /"),
    ({"memory": memory(90)}, "memory", W, "90% of 0.0 GiB of memory are in use; from 95% on"),
    ({"memory": memory(96)}, "memory", E, "96% of 0.0 GiB"),
    ({"python": "3.12.1"}, "ray-version", E, "it has Ray 2.60.0 and Python 3.12.1"),
    ({"python": "3.10.14"}, "ray-version", W, "and Python 3.10.14"),
]
NODES += [(gaudi(probe=gaudi_probe(**changes)), *finding) for changes, *finding in PROBES]


@pytest.mark.parametrize(("node", "check", "level", "words"), NODES)
def test_one_change_to_a_node_is_one_finding(node, check, level, words) -> None:
    findings = judge(cluster(node, gaudi("gaudi-02")))
    about = [f for f in findings if (f.where, f.check) == (node.name, check) and words in f.message]
    assert [(finding.level, bool(finding.remedy)) for finding in about] == [(level, True)]


@pytest.mark.parametrize(("purpose", "limit"), [("results", 5), ("models", 30)])
def test_a_disk_has_room_from_its_limit_on(purpose: Any, limit: int) -> None:
    free = (limit * GIB, limit * GIB - 1, limit * GIB // 10, limit * GIB // 10 - 1)
    found = []
    for free_bytes in free:
        spaces = (Space(purpose=purpose, path="/p", free_bytes=free_bytes),)
        node = gaudi(probe=gaudi_probe(spaces=spaces))
        found.append([f.level for f in judge(cluster(node)) if f.check == "disk"])
    assert found == [[], [W], [W], [E]]


CLUSTERS: list[tuple[dict[str, Any], str, Level, str]] = [
    ({"token": False}, "token", E, "asks for no token"),
    ({"dashboard": "10.0.0.1:8265"}, "dashboard", W, "listens on 10.0.0.1:8265"),
    ({"dashboard": "10.0.0.1:8265", "token": False}, "dashboard", E, "listens on"),
    ({"expected_nodes": 3}, "nodes", E, "2 of 3 expected nodes"),
    ({"shared_dir": "/shared", "shared_trouble": "read-only"}, "shared", E, "cannot write"),
]


@pytest.mark.parametrize(("changes", "check", "level", "words"), CLUSTERS)
def test_what_is_wrong_with_a_cluster_is_found(changes, check, level, words) -> None:
    found = judge(cluster(gaudi(), gaudi("gaudi-02"), **changes))
    assert [
        (f.level, f.remedy != "") for f in found if f.check == check and words in f.message
    ] == [(level, True)]


@pytest.mark.parametrize("dashboard", [None, "", "127.0.0.1:8265", "localhost:8265", "[::1]:8265"])
def test_a_dashboard_on_loopback_is_no_finding(dashboard: str | None) -> None:
    assert judge(cluster(gaudi(), dashboard=dashboard)) == []


@pytest.mark.parametrize(
    ("shared", "levels"),
    [
        (SharedFacts(readable=True, written="x"), []),
        (SharedFacts(readable=False, written="x"), [E]),
        (SharedFacts(readable=True, written="", trouble="read-only"), [W]),
    ],
)
def test_the_shared_directory_is_seen_and_written_by_all(shared, levels) -> None:
    """An own empty directory at the same place would take writes and show nothing."""
    facts = cluster(gaudi(probe=gaudi_probe(shared=shared)), shared_dir="/shared")
    assert [f.level for f in judge(facts) if f.check == "shared"] == levels


def test_nodes_of_one_kind_with_other_versions_are_told_apart() -> None:
    other = gaudi("gaudi-02", gaudi_probe(versions=GAUDI_VERSIONS | {"torch": "2.9.0a0+git7"}))
    (found,) = judge(cluster(gaudi(), other, gaudi("gaudi-03")))
    assert found.check == "versions" and found.level is W
    on = "2.10.0a0+git1234567 on gaudi-01, gaudi-03, 2.9.0a0+git7 on gaudi-02"
    assert found.message == f"torch is {on}"


def test_a_clock_within_the_bound_of_its_measurement_is_no_finding() -> None:
    assert judge(cluster(gaudi(clock=ClockOffset(offset_s=3.0, bound_s=2.9)))) == []


def test_emulated_cards_are_not_taken_for_real_ones() -> None:
    host = gaudi_probe(cards=(), driver_version=None, hugepages_total=0, open_files=256)
    node = gaudi(probe=host, emulated=True)
    facts = cluster(node, token=False)
    assert judge(facts) == []
    said = summary_lines(facts)
    assert "emulated cards on this machine: what concerns real cards is not checked" in said


def test_a_cluster_without_cards_is_unfit() -> None:
    head = NodeFacts(name="head", node_id="head", head=True, probe=gaudi_probe(cards=()))
    (found,) = judge(cluster(head))
    assert found.level is E and "no node has registered a" in found.message


# ---------------------------------------------------------------- telling


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([], errors.OK),
        ([N], errors.OK),
        ([W, N], errors.CLUSTER_DOUBTFUL),
        ([N, E, W], errors.CLUSTER_UNFIT),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(levels: list[Level], code: int) -> None:
    found = [Finding("c", "m", "r", level, where="w") for level in levels]
    assert exit_code(found) == code


def test_json_carries_every_fact_and_finding() -> None:
    facts = cluster(gaudi(), token=False)
    found = judge(facts)
    value = json.loads(json.dumps(as_json(facts, found)))
    assert value["worst"] == "error"
    assert [finding_of(told) for told in value["findings"]] == found
    assert value["facts"]["nodes"][0]["probe"]["versions"]["torch"].startswith("2.10")
    assert value["facts"]["nodes"][0]["cards"] == {"HPU": 8}


def test_findings_are_told_with_their_remedies_worst_first() -> None:
    facts = cluster(gaudi(probe=gaudi_probe(hugepages_total=0)), token=False)
    told = "\n".join([*summary_lines(facts), *finding_lines(judge(facts))])
    assert told.index("ERROR   cluster:") < told.index("WARNING gaudi-01:")
    assert "install the driver's package again" in told
    assert told.endswith("1 error, 1 warning")


# ---------------------------------------------------------------- on a node


def test_packages_that_do_not_import_say_why(tmp_path, monkeypatch) -> None:
    (tmp_path / "ng_raises.py").write_text("raise ValueError('no such card')\n")
    (tmp_path / "ng_dies.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = import_errors(["json", "ng_missing", "ng_raises", "ng_dies", "csv"], 60)
    assert found["ng_missing"].startswith("ModuleNotFoundError")
    assert found["ng_raises"] == "ValueError: no such card"
    assert found["ng_dies"] == found["csv"] == "the interpreter ended with 7"
    assert "json" not in found


def test_a_node_says_which_of_its_cards_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {0: CardTelemetry(lost="it has fallen off the bus"), 1: CardTelemetry()}
    monkeypatch.setattr(CudaDevice, "telemetry", staticmethod(lambda: readings))
    monkeypatch.setattr(CudaDevice, "inventory", staticmethod(dict))
    monkeypatch.setattr(CudaDevice, "occupied", staticmethod(lambda index: None))
    monkeypatch.setattr("orchestrator.doctor.probe.import_errors", lambda *_: {})  # takes seconds
    nothing: dict[str, Any] = {"packages": (), "engines": (), "places": (), "shared": None}
    probe = examine(kind=Accelerator.GPU, timeout_s=60, **nothing)
    found = judge(cluster(gaudi("gpu-01", probe, cards={Accelerator.GPU: 2}, cards_free=2)))
    assert any("card 0 is lost: it has fallen" in one.message for one in found)


def test_imports_that_hang_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ng_hangs.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    limit_s = patience(0.3)
    told = f"not imported within {limit_s:.0f} s"
    assert import_errors(["json", "ng_hangs"], limit_s) == {"ng_hangs": told}


def test_a_directory_of_ones_own_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("secret", encoding="ascii")
    seen = look_into(str(tmp_path), "f", "secret")
    assert seen.readable and (tmp_path / seen.written).read_text(encoding="ascii") == "secret"
    other = look_into(str(tmp_path), "f", "another", patience_s=0)
    assert not other.readable and "another file" in other.trouble
    missing = look_into(str(tmp_path / "nowhere"), "f", "secret", patience_s=0)
    assert not missing.readable and not missing.written and "No such file" in missing.trouble


@pytest.mark.parametrize(
    ("cuda", "driver", "oldest"),
    [
        ("13.0", "575.57.08", "580"),
        ("13.0", "580.65.06", ""),
        ("12.8", "535.247.01", ""),
        ("12.8", "470.256.02", "525"),
        (None, "470.256.02", ""),  # a torch without CUDA
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_found(cuda, driver, oldest) -> None:
    versions = {"ray": "2.60.0", "torch": "2.13.0"} | ({"cuda": cuda} if cuda else {})
    probe = gaudi_probe(versions=versions, driver_version=driver)
    found = judge(cluster(gaudi("gpu-01", probe, cards={Accelerator.GPU: 8})))
    assert [one.check for one in found] == (["driver"] if oldest else [])
    assert all(f"needs {oldest} or newer" in one.message for one in found)


@pytest.mark.parametrize(
    ("needed", "installed", "modules", "left_out"),
    [
        ((), {"vllm", "vllm-gaudi"}, {"vllm", "vllm_gaudi"}, "optimum.habana"),
        ((), {"optimum-habana"}, {"optimum.habana"}, "vllm"),
        (("vllm-gaudi",), set(), {"vllm", "vllm_gaudi"}, "optimum.habana"),
    ],
)
def test_only_engines_that_the_grid_needs_or_the_node_has_are_imported(
    needed, installed, modules, left_out
) -> None:
    """Habana's image of vLLM has no optimum-habana, and needs none."""
    imported = engine_modules(Accelerator.HPU, needed, installed)
    assert modules <= set(imported) and left_out not in imported


def test_a_missing_engine_comes_with_its_own_remedy() -> None:
    errors = {"vllm_gaudi": "ModuleNotFoundError: no module", "torch": "ImportError: gone"}
    found = judge(cluster(gaudi(probe=gaudi_probe(import_errors=errors))))
    remedies = {one.message.split()[0]: one.remedy for one in found}
    assert remedies["vllm_gaudi"].startswith("for the engine vllm-gaudi: take the image of")
    assert "never let pip replace" in remedies["torch"]


def test_files_that_ask_for_huge_pages_are_found(tmp_path: Path) -> None:
    """The last line of each file counts, as sysctl reads them."""
    (tmp_path / "etc/sysctl.d").mkdir(parents=True)
    (tmp_path / "etc/sysctl.conf").write_text("vm.nr_hugepages=10\nvm.nr_hugepages = 15000\n")
    (tmp_path / "etc/sysctl.d/10-a.conf").write_text("# vm.nr_hugepages=7\nnet.x=1\n")
    (tmp_path / "etc/sysctl.d/90-b.conf").write_text("-vm/nr_hugepages = 47500\n")
    assert {Path(name).name: pages for name, pages in hugepages_asked(tmp_path).items()} == {
        "sysctl.conf": 15_000,
        "90-b.conf": 47_500,
    }
