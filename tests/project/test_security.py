"""Files that may run code or leave their directory: nothing that was not asked for."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from command_line import Nightgrid
from schedule_cases import node
from source_tree import PRODUCT, imported, modules, place, syntax

from orchestrator.core.errors import StoreError
from orchestrator.core.events import StartWorker
from orchestrator.core.job import Accelerator
from orchestrator.core.topology import Card
from orchestrator.store.schema import schema
from orchestrator.store.store import Store
from orchestrator.worker.environment import start_request
from orchestrator.worker.protocol import HostFacts, Start
from workloads.models import loading

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
#: What a model may be told of the code that comes with it.
ALLOWED_CODE = ("False", "own_code", "source.remote_code")


@pytest.mark.slow
def test_nothing_is_unpickled() -> None:
    """No module imports a pickle library (one catches torch's error, two pickle what processes of
    a run send each other, one reads names of tensors and builds nothing else), every
    ``torch.load`` and every model is restricted to tensors, and no numpy file may hold objects."""
    for path in modules(*PRODUCT):
        own = {name.split(".")[0] for name in imported(path)} & PICKLES
        catches = path.name == "checkpoints.py" and "pickle.load" not in path.read_text()
        allowed = (
            "orchestrator/worker/protocol.py",
            "workloads/inspection/headers.py",
            "workloads/serving/client.py",
        )
        assert not own or catches or place(path) in allowed, path
        for call in (one for one in syntax(path) if isinstance(one, ast.Call)):
            called = ast.unparse(call.func)
            arguments = {word.arg: ast.unparse(word.value) for word in call.keywords}
            where = f"{path}:{call.lineno}"
            assert "allow_pickle" not in arguments, where
            if called.rpartition(".")[2] == "from_pretrained" and "Peft" not in called:
                assert arguments.get("trust_remote_code") in ALLOWED_CODE, where
            of_model = called == "AutoModelForCausalLM.from_pretrained"
            if called == "torch.load" or (of_model and "gguf_file" not in arguments):
                assert arguments.get("weights_only") == "True", where


def test_result_columns_hold_no_objects() -> None:
    """Every column is a number, a truth value, a time or text, or a list or record of those. The
    one column of bytes is an image, which no library of ours opens: a browser is given what begins
    as a PNG does."""

    def check(kind: pa.DataType, name: str) -> None:
        if pa.types.is_nested(kind):
            for number in range(kind.num_fields):
                check(kind.field(number).type, f"{name}.{kind.field(number).name}")
        elif name != "image":
            assert not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind), name
            assert not isinstance(kind, pa.BaseExtensionType), name

    for field in schema():
        check(field.type, field.name)


def launch(node_name: str, passed_on: Mapping[str, str]) -> Start:
    facts = HostFacts(threads=1, version="", server="s", log_dir="/logs")
    card = Card(node_id=node_name, accelerator=Accelerator.HPU, index=0)
    start = StartWorker(worker_id="w1", card=card)
    return start_request(start, node(node_name, emulated=True), facts, "m:f", passed_on)


def test_workers_get_the_permission_of_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment() -> str:
        return launch("n", loading.passed_on()).environments[""][loading.VARIABLE]

    monkeypatch.delenv(loading.VARIABLE, raising=False)
    assert environment() == ""
    with loading.permitted(["org/model"]):
        assert environment() == "org/model"


def test_a_permission_for_no_model_of_the_grid_is_refused(
    tmp_path: Path, nightgrid: Nightgrid
) -> None:
    (tmp_path / "g.yaml").write_text(
        "name: g\nexperiments:\n"
        "  - {name: e, workload: text-generation, model: tiny-chatglm3, accelerator: CPU}\n"
    )
    command = ("run", tmp_path / "g.yaml", "--in-process", "--results", tmp_path / "r")
    refused = nightgrid(*command, "--remote-code", "tiny-chatglm", code=2)
    assert "no job has this model" in refused.err and not (tmp_path / "r").exists()


@pytest.mark.parametrize("part", ["", "rows", "quarantine", "logs"])
def test_no_part_of_a_run_may_lead_elsewhere(tmp_path: Path, part: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "results" / "night" / part
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="leads out of"):
        Store(tmp_path / "results", "night")


def test_the_results_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "disk")
    with Store(tmp_path / "results", "night"):
        assert (tmp_path / "disk" / "night" / "rows").is_dir()


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", "a/../../b", "..", "a\nb", "夜/間"])
def test_logs_of_workers_stay_in_their_directory(name: str) -> None:
    log = Path(launch(name, {}).log)
    assert log.parent == Path("/logs") and ".." not in log.parts and log.name.endswith(".log")


@pytest.mark.parametrize("name", ["../x", "/tmp/x", ".", "a/b", ""])
def test_a_grid_cannot_lead_results_or_adapters_elsewhere(
    tmp_path: Path, name: str, nightgrid: Nightgrid
) -> None:
    def plan(grid: str, adapter: str, *options: object, code: int) -> None:
        settings = f"workload: finetuning, model: tiny-chatglm3, save_adapter: {adapter}"
        (tmp_path / "g.yaml").write_text(
            f"name: {grid}\nexperiments:\n  - {{name: e, accelerator: CPU, {settings}}}\n"
        )
        nightgrid("plan", tmp_path / "g.yaml", "--results", tmp_path / "r", *options, code=code)

    plan(json.dumps(name), "fine", code=2)
    plan("fine", json.dumps(name), code=2)
    plan("fine", "fine", "--run", name, code=4 if name else 0)
