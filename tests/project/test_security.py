"""Files that may run code or leave their directory: nothing that was not asked for."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from source_tree import ROOT, imported, modules, syntax

from orchestrator.cli.main import main
from orchestrator.core.errors import StoreError
from orchestrator.core.events import StartWorker
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Card, Node
from orchestrator.store.schema import schema
from orchestrator.store.store import Store
from orchestrator.worker.environment import launch_of
from orchestrator.worker.protocol import HostFacts
from workloads.models import loading

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


@pytest.mark.slow
@pytest.mark.parametrize("package", ["orchestrator", "workloads"])
def test_nothing_is_unpickled(package: str) -> None:
    """No module imports a pickle library (one catches torch's error, one pickles what processes of
    a run send each other), every ``torch.load`` and every model is restricted to tensors, and no
    numpy file may hold objects."""
    for path in modules(package):
        own = {name.split(".")[0] for name in imported(path)} & PICKLES
        catches = path.name == "checkpoints.py" and "pickle.load" not in path.read_text()
        assert not own or catches or path == ROOT / "orchestrator/worker/protocol.py", path
    calls = (
        (path, node)
        for path in modules(package)
        for node in syntax(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.Call)
    )
    for path, node in calls:
        called = ast.unparse(node.func)
        arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called == "torch.load":
            assert arguments.get("weights_only") == "True", f"{path}:{node.lineno}"
        assert "allow_pickle" not in arguments, f"{path}:{node.lineno}"
        if called.rpartition(".")[2] == "from_pretrained" and "Peft" not in called:
            assert arguments.get("trust_remote_code") in (
                "False",
                "own_code",
                "source.remote_code",
            ), f"{path}:{node.lineno}"
        if called == "AutoModelForCausalLM.from_pretrained" and "gguf_file" not in arguments:
            assert arguments.get("weights_only") == "True", f"{path}:{node.lineno}"


def test_result_columns_hold_no_objects() -> None:
    """Every column is a number, a truth value, a time or text, or a list or record of those. The
    one column of bytes is an image, which no library of ours opens: a browser is given what begins
    as a PNG does."""
    import pyarrow as pa

    def check(kind: pa.DataType, name: str) -> None:
        if pa.types.is_nested(kind):
            for number in range(kind.num_fields):
                check(kind.field(number).type, f"{name}.{kind.field(number).name}")
            return
        if name == "image":
            return
        assert not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind), name
        assert not isinstance(kind, pa.BaseExtensionType), name

    for field in schema():
        check(field.type, field.name)


def test_workers_get_the_permission_of_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loading.VARIABLE, raising=False)
    card = Card(node_id="n", accelerator=Accelerator.HPU, index=0)
    node = Node(
        node_id="n",
        name="n",
        accelerator=Accelerator.HPU,
        card_indices=(0,),
        server_cards=8,
        emulated=True,
    )
    facts = HostFacts(
        hostname="h", address="a", cores=1, threads=1, version="", server="s", log_dir="/logs"
    )
    start = StartWorker(worker_id="w1", card=card)

    def environment() -> str:
        launch = launch_of(start, node, facts, "m:f", loading.passed_on())
        return launch.environments[""][loading.VARIABLE]

    assert environment() == ""
    with loading.permitted(["org/model"]):
        assert environment() == "org/model"


def test_a_permission_for_no_model_of_the_grid_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "g.yaml"
    grid.write_text(
        "name: g\nexperiments:\n"
        "  - {name: e, workload: text-generation, model: tiny-chatglm3, accelerator: CPU}\n"
    )
    command = ["run", str(grid), "--in-process", "--results", str(tmp_path / "r")]
    assert main([*command, "--remote-code", "tiny-chatglm"]) == 2
    assert "no job has this model" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("part", ["rows", "quarantine", "logs"])
def test_no_part_of_a_run_may_lead_elsewhere(tmp_path: Path, part: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "results" / "night").mkdir(parents=True)
    (tmp_path / "results" / "night" / part).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="leads out of"):
        Store.open(tmp_path / "results", "night")


def test_links_that_stay_inside_are_fine(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "disk")
    with Store.open(tmp_path / "results", "night"):
        pass
    assert (tmp_path / "disk" / "night" / "rows").is_dir()


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", "a/../../b", "..", "a\nb", "夜/間"])
def test_logs_of_workers_stay_in_their_directory(name: str) -> None:
    card = Card(node_id="n", accelerator=Accelerator.HPU, index=0)
    node = Node(
        node_id="n",
        name=name,
        accelerator=Accelerator.HPU,
        card_indices=(0,),
        server_cards=8,
        emulated=True,
    )
    facts = HostFacts(
        hostname="h", address="a", cores=1, threads=1, version="", server="s", log_dir="/logs"
    )
    launch = launch_of(StartWorker(worker_id="w1", card=card), node, facts, "m:f", {})
    log = Path(launch.log)
    assert log.parent == Path("/logs") and ".." not in log.parts and log.name.endswith(".log")


@pytest.mark.parametrize("name", ["../x", "/tmp/x", ".", "a/b", ""])
def test_a_grid_cannot_lead_results_or_adapters_elsewhere(tmp_path: Path, name: str) -> None:
    grid = tmp_path / "g.yaml"
    text = (
        "name: {name}\nexperiments:\n"
        "  - {{name: e, workload: finetuning, model: tiny-chatglm3, accelerator: CPU, "
        "save_adapter: {adapter}}}\n"
    )
    quoted = json.dumps(name)
    grid.write_text(text.format(name=quoted, adapter="fine"))
    assert main(["plan", str(grid)]) == 2
    grid.write_text(text.format(name="fine", adapter=quoted))
    assert main(["plan", str(grid)]) == 2
    grid.write_text(text.format(name="fine", adapter="fine"))
    results = ["--results", str(tmp_path / "results")]
    assert main(["plan", str(grid), "--run", name, *results]) == (4 if name else 0)
