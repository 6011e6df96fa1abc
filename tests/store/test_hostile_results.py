"""Commands on result directories that rotted, were mixed up or were made by somebody else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measurements import row
from odd_files import a_directory, a_link_to_a_device, a_pipe

from orchestrator.analysis import hardware
from orchestrator.cli.main import main
from orchestrator.core.errors import MEANINGS
from orchestrator.driver.options import RunOptions, with_cards_of
from orchestrator.store import files as run_files
from orchestrator.store.disk import digest
from orchestrator.store.store import Store
from workloads.base import BadConfiguration, DataMissing
from workloads.inspection.checkpoints import index_shards
from workloads.models.chatglm3.layout import from_original_config, sizes_of

pytestmark = pytest.mark.timeout(300)

GRID = """\
name: night
experiments:
  - {name: tiny, workload: text-generation, model: tiny-chatglm3, accelerator: HPU}
"""
STATUS = """\
{"version": 1, "run": "night", "at": 1.0, "started_at": 0.0, "total": 3, "done": 1, "counts": {},
 "attempts": 1, "emulated": true, "cards": [{"card": "hpu-1/HPU0", "job": "x"}], "eta_s": null}
"""
ROWS = 3
JSON_TRAPS = [
    *(b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000),
    *(b'{"version": 1}', b'{"version": 1, "cards": null}'),
    b'{"version": 1, "at": ' + b"9" * 5000 + b"}",
    *(
        STATUS.replace(old, new).encode()
        for old, new in [
            *(
                ('"at": 1.0', f'"at": {at}')
                for at in ('"now"', "1e400", "NaN", "9" * 400, "-1e300")
            ),
            ('"counts": {}', '"counts": {"SUCCEEDED": "many"}'),
            *(('"total": 3', f'"total": {total}') for total in ("null", "9" * 400)),
            ('"cards": [', '"cards": [[], 5, null, '),
        ]
    ),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("sound")
    for run in ("night", "other"):
        with Store(results, run) as store:
            for number in range(ROWS):
                store.append(row(number))
                store.to_parquet()
            store.write_file("grid.yaml", GRID)
            store.write_file("status.json", STATUS)
            store.write_file("options.json", '{"emulate": "1x2:HPU"}')
    return results


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "results"))


#: Every command that reads results, cheap ones first.
COMMANDS: dict[str, list[str]] = {
    "status": ["status", "night"],
    "plan": ["plan", "GRID", "--emulate", "1x2:HPU"],
    "report": ["report", "night", "--format", "json"],
    "compare": ["compare", "other", "night"],
    "query": ["query", "select count(*) from rows", "--csv"],
}
SLOW = {
    "page": ["report", "night"],
    "status of the newest": ["status"],
    "compare with damage before": ["compare", "night", "other", "--json"],
    "export": ["export", "DEST", "--to", "datasets"],
}


def ask(results: Path, words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    grid = results.parent / "grid.yaml"
    grid.write_text(GRID)
    given_words = {"GRID": str(grid), "DEST": str(results.parent / "export")}
    words = [given_words.get(word, word) for word in words]
    shutil.rmtree(results.parent / "export", ignore_errors=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*words, "--results", str(results)])
    return code, said.getvalue()


def check_all(results: Path, commands: dict[str, list[str]]) -> str:
    everything = ""
    for name, words in commands.items():
        code, said = ask(results, words)
        assert code in MEANINGS, (name, code, said)
        assert "Traceback" not in said, (name, said)
        if code not in (0, 10):
            assert said.strip(), f"{name} ends with {code} and says nothing"
        everything += said
    return everything


def rows_of(results: Path, run: str = "night") -> list[Path]:
    return sorted((results / run / "rows").glob("*.parquet"))


# ---------------------------------------------------------------- rows


@settings(max_examples=12)
@given(
    which=st.integers(0, ROWS - 1),
    position=st.integers(0, 10**6),
    bit=st.integers(0, 7),
    cut=st.none() | st.integers(0, 10**6),
    junk=st.binary(max_size=20),
)
def test_a_rotten_row_is_left_out(
    sound: Path,
    tmp_path_factory: pytest.TempPathFactory,
    which: int,
    position: int,
    bit: int,
    cut: int | None,
    junk: bytes,
) -> None:
    results = Path(shutil.copytree(sound, tmp_path_factory.mktemp("rot") / "results"))
    victim = rows_of(results)[which]
    data = bytearray(victim.read_bytes())
    data[position % len(data)] ^= 1 << bit
    if cut is not None:
        del data[cut % len(data) :]
    victim.write_bytes(bytes(data) + junk)
    contents = Store.existing(results, "night").read()
    assert len(contents.measurements) == ROWS - 1
    assert [damage.path for damage in contents.damaged] == [victim]


def foreign(table: pa.Table, metadata: dict[bytes, bytes] | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    return sink.getvalue().to_pybytes()


def real_table(results: Path) -> pa.Table:
    return pq.read_table(rows_of(results)[0])


def _with(results: Path, name: str, values: pa.Array) -> bytes:
    table = real_table(results)
    at = table.schema.get_field_index(name)
    return foreign(table.set_column(at, name, values), table.schema.metadata)


def _parameter(text: str) -> pa.Array:
    return pa.array([[("prompts", text)]], pa.map_(pa.string(), pa.string()))


def _many_samples(results: Path) -> pa.Array:
    one = real_table(results)["samples"].combine_chunks().flatten()[:1]
    count = 600_000
    return pa.ListArray.from_arrays([0, count], one.take(pa.repeat(0, count)))


FOREIGN: dict[str, Callable[[Path], bytes]] = {
    "another table": lambda _: foreign(pa.table({"x": [1, 2]})),
    "no rows": lambda r: foreign(real_table(r).slice(0, 0), real_table(r).schema.metadata),
    "no metadata": lambda r: foreign(real_table(r)),
    "a version that is no number": lambda r: foreign(
        real_table(r), {b"nightgrid.schema_version": b"one"}
    ),
    "a state that is none": lambda r: _with(r, "state", pa.array(["SUCEEDED"])),
    "text for numbers": lambda r: _with(r, "batch_size", pa.array(["many"])),
    "parameters 5,000 deep": lambda r: _with(r, "parameters", _parameter("[" * 5000 + "]" * 5000)),
    "text that is not UTF-8": lambda r: _with(
        r, "reason", pa.array([b"\xff"], pa.binary()).view(pa.string())
    ),
    "columns twice": lambda r: foreign(
        pa.Table.from_arrays(
            [*real_table(r).columns, real_table(r)["state"]],
            names=[*real_table(r).column_names, "state"],
        ),
        real_table(r).schema.metadata,
    ),
    "600,000 samples in a few bytes": lambda r: _with(r, "samples", _many_samples(r)),
    "not Parquet": lambda _: b"PAR1" + os.urandom(100) + b"PAR1",
}


@pytest.mark.slow
def test_foreign_files_with_fitting_names_are_survived(results: Path) -> None:
    contents = {make(results): kind for kind, make in FOREIGN.items()}
    paths = {}
    for data in contents:
        for name in (f"compacted-1-{digest(data)}.parquet", f"x-1-{digest(data)}.parquet"):
            paths[results / "night" / "rows" / name] = data
            (results / "night" / "rows" / name).write_bytes(data)
    said = check_all(results, COMMANDS)
    assert not [contents[data] for path, data in paths.items() if path.name not in said]
    read = Store.existing(results, "night").read()
    assert list(read.measurements) == [row(n) for n in range(ROWS)]
    assert sorted(damage.path for damage in read.damaged) == sorted(paths)
    with Store(results, "night") as store:
        store.compact()
        store.append(row(ROWS))
    assert all(path.read_bytes() == data for path, data in paths.items()), "they stay as they are"
    assert len(Store.existing(results, "night").measurements()) == ROWS + 1


# ---------------------------------------------------------------- things in the place of files


PLACES: dict[str, Callable[[Path], None]] = {
    "a directory": a_directory,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": a_link_to_a_device,
    "a pipe": a_pipe,
    "an empty file": lambda path: path.write_bytes(b""),
}


def _damage(path: Path, put: Callable[[Path], None]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    put(path)


@pytest.mark.slow
@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
def test_other_things_in_the_place_of_files(results: Path, put: Callable[[Path], None]) -> None:
    victim = rows_of(results)[0]
    for path in (victim, results / "night" / "status.json", results / "night" / "grid.yaml"):
        _damage(path, put)
    assert victim.name in check_all(results, COMMANDS)
    assert len(Store.existing(results, "night").measurements()) == ROWS - 1
    for name in ("quarantine", "rows"):
        _damage(results / "night" / name, put)
        check_all(results, {command: COMMANDS[command] for command in ("status", "report")})


@pytest.mark.parametrize("content", JSON_TRAPS, ids=range(len(JSON_TRAPS)))
def test_side_files_may_hold_anything(results: Path, content: bytes) -> None:
    """They are for the eyes only; the rows say what is."""
    for name in ("status.json", "options.json", "driver.lock"):
        (results / "night" / name).write_bytes(content)
    commands = {"status": COMMANDS["status"], "newest": SLOW["status of the newest"]}
    check_all(results, commands)


@pytest.fixture
def ruined(results: Path) -> Iterator[Path]:
    rows = rows_of(results)
    rows[0].write_bytes(rows[0].read_bytes()[:-7])
    (results / "night" / "rows" / "stranger.parquet").mkdir()
    (results / "night" / "rows" / f".{rows[1].name}.partial").write_bytes(b"half a row")
    (results / "night" / "status.json").write_bytes(b"[" * 100_000)
    (results / "night" / "driver.lock").write_bytes(b"\xff{")
    (results / "night" / "quarantine").mkdir()
    (results / "night" / "quarantine" / "old.parquet").write_bytes(b"old")
    (results / "not a run").mkdir()
    (results / "..hidden").mkdir()
    (results / "stray").write_text("file")
    (results / "loop").symlink_to("loop")
    yield results


def test_every_command_survives_a_ruin(ruined: Path) -> None:
    victim = rows_of(ruined)[0].name
    for name in ("report", "query"):
        assert victim in check_all(ruined, {name: COMMANDS[name]}), name
    check_all(ruined, COMMANDS | SLOW)
    page = (ruined / "night" / "report.html").read_text()
    assert victim in page and "files of this run could not be read" in page
    assert len(Store.existing(ruined, "night").measurements()) >= 1


@pytest.mark.parametrize("output", ["/", "", "DEVICE", "."])
def test_a_report_is_not_written_over_what_is_no_file(results, tmp_path, output) -> None:
    pipe = tmp_path / "device"
    os.mkfifo(pipe)
    words = ["report", "night", "--output", str(pipe) if output == "DEVICE" else output]
    code, said = ask(results, words)
    assert code == 4 and "write" in said
    assert pipe.is_fifo()


# ---------------------------------------------------------------- foreign


ORIGINAL: dict[str, Any] = {
    "model_type": "chatglm",
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_layers": 2,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 128,
    "padded_vocab_size": 300,
}
ODD = [None, "8", [8], {}, 0, -1, 1.5, True, float("nan"), 10**400]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("name", [name for name in ORIGINAL if name != "model_type"])
def test_a_size_that_is_none_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadConfiguration, match=name):
        sizes_of(ORIGINAL | {name: value})


@pytest.mark.parametrize("value", [["x"], "8", [None], [-1], {"x": 1}, 1e400], ids=repr)
@pytest.mark.parametrize("name", ["eos_token_id", "seq_length", "rope_ratio", "layernorm_epsilon"])
def test_other_settings_of_a_config_are_looked_at_too(name: str, value: Any) -> None:
    assert from_original_config(ORIGINAL)["max_position_embeddings"] == 8192
    with pytest.raises(BadConfiguration, match=name):
        from_original_config(ORIGINAL | {name: value})


@pytest.mark.parametrize(
    "names",
    [
        *(["../x.safetensors"], ["/etc/x.safetensors"], ["a/b.bin"], [".."], [None], [5], [["x"]]),
        *([""], ["x\n.bin"], ["config.json"], []),
    ],
    ids=repr,
)
def test_an_index_leads_nowhere_else(tmp_path: Path, names: list[Any]) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {str(n): name for n, name in enumerate(names)}}))
    with pytest.raises(DataMissing, match="index of weight files"):
        index_shards(index)


@pytest.mark.parametrize("name", ["published.csv", "devices.csv"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2].rpartition(b"\n")[0] + b"\nx,y",
        lambda data: b"\xff" + data,
        lambda data: b"",
        lambda data: data.replace(b"source", b"sauce", 1),
        lambda data: data.replace(b",8,", b",-8,").replace(b",96,", b",1e999,"),
        lambda data: b"a,b\n" + b"x" * 200_000 + b"\n",
    ],
    ids=["cut", "not UTF-8", "empty", "another column", "no counts", "a huge cell"],
)
def test_a_table_of_figures_that_rotted_is_left_out(tmp_path, name, damage, monkeypatch, caplog):
    tables = {"published.csv": hardware.published_figures, "devices.csv": hardware.data_sheets}
    sound = {each: read() for each, read in tables.items()}
    for each, read in tables.items():
        data = (hardware.DIRECTORY / each).read_bytes()
        (tmp_path / each).write_bytes(damage(data) if each == name else data)
        read.cache_clear()
    monkeypatch.setattr(hardware, "DIRECTORY", tmp_path)
    try:
        found = {each: read() for each, read in tables.items()}
    finally:
        for read in tables.values():
            read.cache_clear()
    assert not found.pop(name)
    assert all(content == sound[each] for each, content in found.items())
    assert name in caplog.text or not (tmp_path / name).read_bytes()


@pytest.mark.parametrize(
    "content",
    ["[]", "null", '{"emulate": 5}', '{"in_process": "x"}', '{"address": []}', "[" * 100_000, "{",
     '{"card_memory_bytes": 1e400}', '{"card_memory_bytes": -1}', '"emulate"'],
)  # fmt: skip
def test_options_of_a_run_that_make_no_sense_are_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / run_files.OPTIONS).write_text(content)
    options = RunOptions(results=tmp_path)
    assert with_cards_of(tmp_path, options) == options
    (tmp_path / run_files.OPTIONS).write_text('{"emulate": "1x2:HPU", "address": null}')
    assert with_cards_of(tmp_path, options).emulate == "1x2:HPU"
