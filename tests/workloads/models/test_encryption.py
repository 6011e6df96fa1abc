"""Protected weight files: what opens them, what does not, and a model that is run from them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from finetuning_cases import losses, trained
from generation_cases import Worker, described, write_dataset
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.main import main
from workloads.base import BadConfiguration, DataMissing
from workloads.inspection.checkpoints import PROTECTED, weight_files
from workloads.models import encryption
from workloads.models.loading import open_model
from workloads.models.rules import text_refusals

KEY = bytes(range(32))
PIECE_BYTES = 64


def write(file: Path, content: bytes, key: bytes = KEY) -> Path:
    """A protected file of small pieces."""
    file.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encryption, "PIECE_BYTES", PIECE_BYTES)
        encryption.write(file, io.BytesIO(content), key)
    return file


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("protected")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model protected by the command, and its key."""
    base = tmp_path_factory.mktemp("model")
    key = base / "model.key"
    plain = open_model("tiny-chatglm3").path
    assert main(["protect", plain, str(base / "sealed"), "--key-file", str(key), "--new-key"]) == 0
    return base / "sealed", key


@given(content=st.binary(max_size=5 * PIECE_BYTES))
def test_what_was_protected_is_read_back(directory: Path, content: bytes) -> None:
    file = write(directory / "a.protected", content)
    assert encryption.read(file, KEY) == content
    if len(content) > 32:  # no part of a header is as long
        assert content not in file.read_bytes()


@given(data=st.data(), content=st.binary(min_size=1, max_size=3 * PIECE_BYTES))
def test_no_altered_byte_is_read(directory: Path, data: st.DataObject, content: bytes) -> None:
    file = write(directory / "a.protected", content)
    sealed = bytearray(file.read_bytes())
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(sealed)
    with pytest.raises(DataMissing, match=r"a\.protected"):
        encryption.read(file, KEY)


def _reordered(file: Path) -> None:
    sealed, seal = file.read_bytes(), PIECE_BYTES + 16
    first = len(sealed) - 3 * seal
    parts = [sealed[first + n * seal :][:seal] for n in (1, 0, 2)]
    file.write_bytes(sealed[:first] + b"".join(parts))


def _with_anothers_piece(file: Path) -> None:
    sealed, seal = file.read_bytes(), PIECE_BYTES + 16
    other = write(file, bytes(3 * PIECE_BYTES)).read_bytes()
    file.write_bytes(sealed[:-seal] + other[-seal:])


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-5]), r"has \d+ of its \d+ bytes: copy it again"),
        (lambda f: f.write_bytes(f.read_bytes()[: -PIECE_BYTES - 16]), r"has \d+ of its \d+ bytes"),
        (lambda f: f.write_bytes(f.read_bytes()[:20]), "is no protected file of this version"),
        (_reordered, "piece 1 of 3 does not open"),  # each of them intact
        (_with_anothers_piece, "piece 3 of 3 does not open"),  # of the same key, name and place
        (lambda f: write(f, bytes(9), key=bytes(32)), "was not protected with this key"),
        (lambda f: write(f.with_name("b"), b"x").replace(f), r"a\.protected was b"),
    ],
    ids=[
        "truncated",
        "a piece less",
        "half a header",
        "reordered",
        "another file's piece",
        "wrong key",
        "renamed",
    ],
)
def test_a_file_that_was_changed_says_what_happened(directory, tamper, words) -> None:
    file = write(directory / "a.protected", os.urandom(3 * PIECE_BYTES))
    tamper(file)
    with pytest.raises(DataMissing, match=words):
        encryption.read(file, KEY)


@pytest.mark.parametrize(
    ("mode", "content", "word"),
    [
        (0o644, "00" * 32, "may be read or written by others .mode 0644.: chmod 600"),
        (0o620, "00" * 32, "mode 0620"),
        (0o600, "00" * 31, "64 hexadecimal digits"),
        (0o600, "password", "64 hexadecimal digits"),
    ],
)
def test_a_key_file_is_refused(tmp_path: Path, mode: int, content: str, word: str) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(BadConfiguration, match=word) as caught:
        encryption.read_key(file)
    assert content not in str(caught.value)


def test_a_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    """A second one would lock out what the first protected."""
    encryption.write_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    first = encryption.read_key(tmp_path / "key")
    with pytest.raises(FileExistsError):
        encryption.write_key(tmp_path / "key")
    assert len(first) == 32


def test_a_protected_model_writes_the_same_texts(model: tuple[Path, Path], tmp_path: Path) -> None:
    sealed, key = model
    assert not list(sealed.glob("*.safetensors"))
    dataset = write_dataset(tmp_path / "prompts.json")
    plain = Worker().run(dataset, prompts=2)
    with encryption.key_named(key):
        opened = Worker().run(dataset, prompts=2, model=str(sealed))
    assert opened.items[0].output_text == plain.items[0].output_text
    assert 0 < opened.metrics["decryption_s"] < opened.load_s
    assert "decryption_s" not in plain.metrics


@pytest.mark.slow
def test_a_protected_model_is_trained_as_the_plain_one(model: tuple[Path, Path]) -> None:
    sealed, key = model
    with encryption.key_named(key):
        assert losses(trained(model=str(sealed))) == losses(trained())


def test_without_a_key_or_a_reader_the_weights_are_not_opened(model: tuple[Path, Path]) -> None:
    with pytest.raises(BadConfiguration, match=r"are protected: .* --key-file FILE"):
        open_model(str(model[0]))
    with encryption.key_named(model[1]), pytest.raises(BadConfiguration, match="in the clear only"):
        open_model(str(model[0]))


def test_a_plan_without_the_key_refuses_protected_models(model, tmp_path, nightgrid) -> None:
    sealed, key = model
    grid = tmp_path / "grid.yaml"
    settings = {"accelerator": "CPU", "precision": "fp32", "model": str(sealed)}
    experiment = {"name": "one", "workload": "text-generation"}
    grid.write_text(json.dumps({"name": "a", "defaults": settings, "experiments": [experiment]}))
    options = (grid, "--emulate", "1x1:CPU", "--results", tmp_path)
    error = nightgrid("plan", *options, code=2).err
    assert "are protected, and no file of their key is named" in error
    nightgrid("run", *options, code=2)
    nightgrid("plan", *options, "--key-file", key)


@pytest.mark.parametrize(
    ("changes", "reader"),
    [
        ({"engine": "vllm"}, "the engine vllm"),
        ({"engine": "onnxruntime"}, "the engine onnxruntime"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ],
)
def test_who_reads_files_cannot_have_it(model, changes, reader) -> None:
    usual = {"dataset": "english-prompts", "precision": "bf16", "device": "cuda", "cards": 2}
    usual |= {"model": str(model[0]), "input_tokens": 8, "output_tokens": 8}
    [refusal] = text_refusals(described(**usual | changes))
    assert refusal.unsupported and refusal.reason.startswith(f"{reader} reads weights from files")


def test_the_shards_of_the_index_and_no_others_are_the_model(tmp_path: Path) -> None:
    """transformers would draw missing tensors anew, and load a stranger's over the model's own."""
    sealed, names = tmp_path, ("a.safetensors", "b.safetensors")
    (sealed / "config.json").write_text("{}")
    index = {"weight_map": {name: name for name in names}}
    (sealed / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        write(sealed / f"{name}{PROTECTED}", b"")
    assert len(weight_files(sealed, protected=True)) == 2
    write(sealed / f"c.safetensors{PROTECTED}", b"")
    with pytest.raises(DataMissing, match=r"c\.safetensors\.protected is no part of this model"):
        weight_files(sealed, protected=True)
    (sealed / f"b.safetensors{PROTECTED}").unlink()
    with pytest.raises(DataMissing, match=r"lacks b\.safetensors\.protected"):
        weight_files(sealed, protected=True)


def test_weights_in_other_forms_are_left_out_and_named(tmp_path: Path) -> None:
    """They would lie beside the protected ones in the clear."""
    source = tmp_path / "m"
    source.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "model.gguf"):
        (source / name).write_text("{}")
    written, left_out = encryption.protect(source, tmp_path / "sealed", KEY)
    assert [file.name for file in written] == ["config.json", f"model.safetensors{PROTECTED}"]
    assert left_out == ["model.gguf", "pytorch_model.bin"]
