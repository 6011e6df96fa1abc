"""Escape sequences from elsewhere: no command lets one through to the terminal."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Nightgrid, Printed
from driver_cases import STATUS
from measurements import row
from source_tree import ROOT, modules, syntax

from orchestrator.core.errors import MEANINGS
from orchestrator.core.job import State
from orchestrator.store.lock import Holder
from orchestrator.store.store import Store
from orchestrator.util.output import visible

#: A title, a cleared screen, a colour in C1, a bell, an overwritten line, bidirectional overrides,
#: other line breaks, markup of rich. In names of files, too: no slash, no NUL.
HOSTILE = "a\x1b]0;t\x07\x1b[2J\x9b31m\r\x08\x7f\u202eb\u2066\u2028\x85\ufeff[bold][red]"
#: The same where YAML refuses the characters themselves.
ESCAPED = json.dumps(HOSTILE)

GRID = """\
name: night
experiments:
  - name: tiny
    workload: text-generation
    model: tiny-chatglm3
    accelerator: HPU
    axes: {batch_size: [1, 2]}
"""
WRONG_GRID = f"""\
name: {ESCAPED}
{ESCAPED}: 1
experiments:
  - name: x
    workload: {ESCAPED}
    model: {ESCAPED}
    dataset: {ESCAPED}
    precision: {ESCAPED}
    accelerator: HPU
    {ESCAPED}: {ESCAPED}
"""


def hostile(value: Any) -> Any:
    """The value with hostile text in the place of every text that may be anything."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, tuple):
        return tuple(hostile(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {name: hostile(one) for name, one in vars_of(value).items()}
        return dataclasses.replace(value, **changes)
    return value


#: Texts of a row that have a form of their own, by which rows are found.
KEPT = {"job_id", "attempt_id", "invocation_id", "state", "accelerator", "workload", "cards"}


def hostile_row(number: int, **changes: Any) -> Any:
    """A row with every text hostile that is not refused."""
    texts = {name for name, value in vars_of(row(number)).items() if type(value) is str} - KEPT
    return dataclasses.replace(row(number), **(dict.fromkeys(texts, HOSTILE) | changes))


def vars_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("place")
    (place / "grid.yaml").write_text(GRID)
    (place / "wrong.yaml").write_text(WRONG_GRID)
    (place / f"{HOSTILE}.yaml").write_text(WRONG_GRID)
    failed = {"state": State.FAILED, "failure_class": "crash", "failure_tail": HOSTILE}
    status = hostile(dataclasses.replace(STATUS, stopping="x", paused="y"))
    status = dataclasses.replace(status, counts={HOSTILE: 3}, finished=False)
    for run in ("night", "other"):
        with Store(place / "results", run) as store:
            store.append(hostile_row(0), hostile_row(1), hostile_row(2, **failed))
        (store.tables_path / f"{HOSTILE}.parquet").write_text(HOSTILE)
        store.write_file("status.json", dataclasses.replace(status, run=run).to_json())
        store.write_file("options.json", json.dumps({"emulate": HOSTILE}))
        store.write_file("grid.yaml", GRID)
    for directory in (f"results/{HOSTILE}/rows", "model", HOSTILE, "data"):
        (place / directory).mkdir(parents=True)
    config = {"model_type": HOSTILE, "architectures": [HOSTILE], HOSTILE: HOSTILE}
    (place / "model" / "config.json").write_text(json.dumps(config))
    (place / HOSTILE / "config.json").write_text("{" + HOSTILE)
    for name in ("train.json", "dev.json"):
        record = json.dumps({"content": HOSTILE, HOSTILE: 1})
        (place / "data" / name).write_text(f"{record}\n{HOSTILE}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("RAY_ADDRESS", "NIGHTGRID_RESULTS", "NIGHTGRID_NOTIFY"):
            patch.delenv(name, raising=False)
        yield place


#: Where they end does not matter, but as ours.
COMMANDS = """\
status night
status
status HOSTILE
status ID --address HOSTILE
logs HOSTILE --address http://HOSTILE:1
plan grid.yaml --run HOSTILE
plan wrong.yaml
plan HOSTILE.yaml
run wrong.yaml --in-process
run --resume --in-process
run grid.yaml --in-process --notify @HOSTILE
verify wrong.yaml
submit wrong.yaml --address http://HOSTILE
report night
report night --format terminal
report night --format md
report night --format csv
report night --format vendor
report HOSTILE
report night --output /proc/HOSTILE/x
compare night other --all
compare night HOSTILE
query select*from'HOSTILE'
query SELECT
query SELECT --csv --run night
export /proc/HOSTILE --to datasets
describe model
describe HOSTILE
convert model out
convert HOSTILE out
dataset advertisegen data
dataset advertisegen HOSTILE
doctor --address http://HOSTILE:1
watch night --host HOSTILE
schema HOSTILE
completion HOSTILE
HOSTILE
plan grid.yaml --HOSTILE
simulate grid.yaml --faults HOSTILE
""".splitlines()


def typed(command: str, nightgrid: Nightgrid) -> Printed:
    words = [word.replace("HOSTILE", HOSTILE) for word in command.split()]
    words = ["select * from rows" if word == "SELECT" else word for word in words]
    printed = nightgrid(*words, code=None)
    assert printed.code in MEANINGS, printed
    for text in (printed.out, printed.err):
        assert visible(text) == text, repr(text)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_lets_a_control_character_through(
    place: Path, command: str, nightgrid: Nightgrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such_host(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, f"no {HOSTILE}")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_host)
    typed(command, nightgrid)


@pytest.mark.parametrize("command", ["run --resume --run night", "run grid.yaml"])
@pytest.mark.parametrize("broken", [False, True])
def test_who_holds_a_run_is_named_visibly(
    place: Path, command: str, broken: bool, nightgrid: Nightgrid
) -> None:
    me = dataclasses.asdict(Holder.this_process())
    other = me | {"host": HOSTILE, "boot_id": "x", "machine_id": HOSTILE, "token": HOSTILE}
    lock = place / "results/night/driver.lock"
    lock.write_text(json.dumps({"host": HOSTILE, "pid": HOSTILE} if broken else other))
    err = typed(f"{command} --in-process", nightgrid).err
    lock.unlink()
    assert broken or "a\\x1b]0;t\\x07" in err, err


@pytest.mark.parametrize(
    ("command", "exact"),
    [
        ("status night --json", lambda answer: answer["status"]["stopping"]),
        ("report night --format json", lambda answer: answer["rows"][0]["model"]),
        ("query SELECT --json --run night", lambda answer: answer[0]["model"]),
        ("plan grid.yaml --json", None),
        ("compare night other --json", None),
        ("simulate grid.yaml --json", None),
    ],
)
def test_json_is_exact_and_harmless(
    place: Path, command: str, exact: Callable[[Any], object] | None, nightgrid: Nightgrid
) -> None:
    answer = typed(command, nightgrid).json
    assert exact is None or exact(answer) == HOSTILE


@pytest.mark.slow
def test_all_that_is_printed_goes_one_way() -> None:
    """Only ``output.py`` prints, and makes rich's consoles."""
    printers = {"print", "sys.stdout.write", "sys.stderr.write", "Console"}
    others = [path for path in modules("orchestrator") if path.name != "output.py"]
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in others
        for node in syntax(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in printers
    ]
    assert calls == []


def test_names_of_files_may_be_no_text(place: Path, nightgrid: Nightgrid) -> None:
    name = os.fsdecode(b"grid-\xff\x9b.yaml")
    (place / name).write_text("a: [")
    assert "grid-\\udcff\\udc9b.yaml" in typed(f"plan {name}", nightgrid).err
