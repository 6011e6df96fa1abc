"""Files beside the rows that are not what their names say: refused by name, or left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis import hardware
from orchestrator.cli.main import main
from orchestrator.driver.options import RunOptions, with_cards_of
from orchestrator.store import files as run_files
from workloads.base import BadConfiguration, DataMissing
from workloads.data.records import records
from workloads.inspection.checkpoints import index_shards, read_config
from workloads.inspection.headers import read_header
from workloads.models.chatglm3.layout import from_original_config, sizes_of

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


@pytest.mark.parametrize("name", ["config.json", "train.json", "model.safetensors", "grid.yaml"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str, capsys: Any) -> None:
    os.mkfifo(tmp_path / name)
    if name == "grid.yaml":
        assert main(["plan", str(tmp_path / name)]) == 2
        assert "pipe" in capsys.readouterr().err
        return
    with pytest.raises(DataMissing):
        if name == "config.json":
            read_config(tmp_path)
        elif name == "train.json":
            list(records(tmp_path / name))
        else:
            read_header(tmp_path / name)


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
    sound = hardware.reference()
    for each in ("published.csv", "devices.csv"):
        data = (hardware.DIRECTORY / each).read_bytes()
        (tmp_path / each).write_bytes(damage(data) if each == name else data)
    monkeypatch.setattr(hardware, "DIRECTORY", tmp_path)
    hardware.reference.cache_clear()
    try:
        found = hardware.reference()
    finally:
        hardware.reference.cache_clear()
    rotten, other = (
        ("published", "devices") if name == "published.csv" else ("devices", "published")
    )
    assert getattr(found, other) == getattr(sound, other)
    assert getattr(found, rotten) == ()
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


def test_an_option_without_its_value_is_refused(capsys: Any) -> None:
    """``--results=--`` would be a list to argparse."""
    with pytest.raises(SystemExit) as ended:
        main(["status", "--results=--"])
    assert ended.value.code == 2
    assert "--results: expected one argument" in capsys.readouterr().err
