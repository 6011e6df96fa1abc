"""Escape sequences from elsewhere: no command lets one through to the terminal."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_cases import STATUS
from measurements import row
from source_tree import ROOT, modules, syntax

from orchestrator.cli.main import main
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
        changes = {f.name: hostile(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


#: Texts of a row that have a form of their own, by which rows are found.
KEPT = {"job_id", "attempt_id", "invocation_id", "state", "accelerator", "workload", "cards"}


def hostile_row(number: int, **changes: Any) -> Any:
    """A row with every text hostile that is not refused."""
    plain = row(number)
    texts = {
        field.name: HOSTILE
        for field in dataclasses.fields(plain)
        if type(getattr(plain, field.name)) is str and field.name not in KEPT
    }
    return dataclasses.replace(plain, **{**texts, **changes})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which all is hostile."""
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "NIGHTGRID_RESULTS", "NIGHTGRID_NOTIFY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "grid.yaml").write_text(GRID)
    (tmp_path / "wrong.yaml").write_text(WRONG_GRID)
    (tmp_path / f"{HOSTILE}.yaml").write_text(WRONG_GRID)
    for run in ("night", "other"):
        with Store.open(tmp_path / "results", run) as store:
            store.append(hostile_row(0))
            store.append(hostile_row(1))
            store.append(
                hostile_row(2, state=State.FAILED, failure_class="crash", failure_tail=HOSTILE)
            )
        (store.tables_path / f"{HOSTILE}.parquet").write_text(HOSTILE)
        status = hostile(dataclasses.replace(STATUS, stopping="x", paused="y"))
        status = dataclasses.replace(status, run=run, counts={HOSTILE: 3}, finished=False)
        store.write_file("status.json", status.to_json())
        store.write_file("options.json", json.dumps({"emulate": HOSTILE}))
        store.write_file("grid.yaml", GRID)
    (tmp_path / "results" / HOSTILE / "rows").mkdir(parents=True)
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": HOSTILE, "architectures": [HOSTILE], HOSTILE: HOSTILE}
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / HOSTILE / "config.json").write_text("{" + HOSTILE)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.json", "dev.json"):
        (data / name).write_text(json.dumps({"content": HOSTILE, HOSTILE: 1}) + "\n" + HOSTILE)
    return tmp_path


def locked(place: Path) -> None:
    """Let somebody elsewhere hold the run, as long as nobody knows better."""
    me = dataclasses.asdict(Holder.this_process())
    other = me | {"host": HOSTILE, "boot_id": "x", "machine_id": HOSTILE, "token": HOSTILE}
    (place / "results/night/driver.lock").write_text(json.dumps(other))


def broken_lock(place: Path) -> None:
    """A lock that says what nobody understands."""
    (place / "results/night/driver.lock").write_text(json.dumps({"host": HOSTILE, "pid": HOSTILE}))


def nothing(place: Path) -> None:
    """All is there already."""


#: What is asked, and what is done before. Where it ends does not matter, but as ours.
TEXTS: list[tuple[str, Callable[[Path], None]]] = [
    ("status night", nothing),
    ("status", nothing),
    ("status nihgt", nothing),
    ("status HOSTILE", nothing),
    ("status ID --address HOSTILE", nothing),
    ("logs HOSTILE --address http://HOSTILE:1", nothing),
    ("plan grid.yaml --emulate 1x2:HPU", nothing),
    ("plan grid.yaml --emulate HOSTILE", nothing),
    ("plan grid.yaml --run HOSTILE", nothing),
    ("plan wrong.yaml", nothing),
    ("plan HOSTILE.yaml", nothing),
    ("plan HOSTILE/none.yaml", nothing),
    ("simulate grid.yaml --emulate 1x2:HPU", nothing),
    ("run wrong.yaml --in-process", nothing),
    ("run --resume --in-process", nothing),
    ("run --resume --run night --in-process", locked),
    ("run grid.yaml --in-process", locked),
    ("run grid.yaml --in-process", broken_lock),
    ("run grid.yaml --in-process --remote-code HOSTILE", nothing),
    ("run grid.yaml --in-process --notify @HOSTILE", nothing),
    ("verify wrong.yaml", nothing),
    ("submit wrong.yaml --address http://HOSTILE", nothing),
    ("report night", nothing),
    ("report night --format terminal", nothing),
    ("report night --format md", nothing),
    ("report night --format csv", nothing),
    ("report night --format vendor", nothing),
    ("report HOSTILE", nothing),
    ("report night --format HOSTILE", nothing),
    ("report night --output /proc/HOSTILE/x", nothing),
    ("compare night other --all", nothing),
    ("compare night HOSTILE", nothing),
    ("compare night other --allow HOSTILE", nothing),
    ("query select*from'HOSTILE'", nothing),
    ("query SELECT", nothing),
    ("query SELECT --run night", nothing),
    ("query SELECT --csv --run night", nothing),
    ("export /proc/HOSTILE --to datasets", nothing),
    ("describe model", nothing),
    ("describe HOSTILE", nothing),
    ("describe HOSTILE-none", nothing),
    ("describe ./HOSTILE-none/x", nothing),
    ("convert model out", nothing),
    ("convert HOSTILE out", nothing),
    ("convert none-HOSTILE out", nothing),
    ("dataset advertisegen data", nothing),
    ("dataset advertisegen HOSTILE", nothing),
    ("doctor --emulate HOSTILE", nothing),
    ("doctor --address http://HOSTILE:1", nothing),
    ("watch night --host HOSTILE", nothing),
    ("schema HOSTILE", nothing),
    ("completion HOSTILE", nothing),
    ("HOSTILE", nothing),
    ("plan grid.yaml --HOSTILE", nothing),
    ("simulate grid.yaml --faults HOSTILE", nothing),
]


def words_of(command: str) -> list[str]:
    words = [word.replace("HOSTILE", HOSTILE) for word in command.split()]
    return ["select * from rows" if word == "SELECT" else word for word in words]


def asked(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """A command's output on its two streams."""
    try:
        code = main(words_of(command))
    except SystemExit as ended:  # of argparse
        code = int(str(ended.code))
    said = capsys.readouterr()
    assert code in MEANINGS, (code, said.err)
    return said.out, said.err


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "before"), TEXTS, ids=[f"{c}-{b.__name__}" for c, b in TEXTS])
def test_no_command_lets_a_control_character_through(
    place: Path,
    command: str,
    before: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_host)
    before(place)
    out, err = asked(command, capsys)
    for said in (out, err):
        assert visible(said) == said, repr(said)
    if before is locked:
        assert "a\\x1b]0;t\\x07" in err, err  # it is named, and by its name


def _no_such_host(*_: Any, **__: Any) -> Any:
    raise socket.gaierror(-2, f"no {HOSTILE}")


@pytest.mark.parametrize(
    ("command", "exact"),
    [
        ("status night --json", lambda told: told["status"]["stopping"]),
        ("report night --format json", lambda told: told["rows"][0]["model"]),
        ("query SELECT --json --run night", lambda told: told[0]["model"]),
        ("plan grid.yaml --json", None),
        ("compare night other --json", None),
        ("simulate grid.yaml --json", None),
    ],
)
def test_json_is_exact_and_harmless(
    place: Path,
    command: str,
    exact: Callable[[Any], object] | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = asked(command, capsys)
    assert visible(out) == out, repr(out)
    told = json.loads(out)
    if exact is not None:
        assert exact(told) == HOSTILE


def test_all_that_is_printed_goes_one_way() -> None:
    allowed = {"orchestrator/util/output.py"}
    found = []
    for path in modules("orchestrator"):
        for node in syntax(path.read_text(encoding="utf-8")):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name in ("print", "sys.stdout.write", "sys.stderr.write", "Console"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert [each for each in found if each.partition(":")[0] not in allowed] == []


def test_names_of_files_may_be_no_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"grid-\xff\x9b.yaml")
    (place / name).write_text("a: [")
    out, err = asked(f"plan {name}", capsys)
    assert "grid-\\udcff\\udc9b.yaml" in err and visible(out + err) == out + err
