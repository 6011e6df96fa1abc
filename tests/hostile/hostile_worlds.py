"""Directories that nobody meant well with: results, side files, models, datasets, grids; and
command lines drawn from the parser of the program itself: every command, every option."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import yaml
from command_line import parsers
from driver_cases import STATUS
from hostile_values import TEXTS, damaged, hostile_file, json_text, mutated, side_file
from measurements import journal_row, row
from odd_files import FILES as ODD_FILES
from odd_models import ODD, write_odd

from orchestrator.store import disk
from orchestrator.store.store import Store

#: Probes of what is no command: see ``hostile.py``.
FEED, WRITER = "(feed of the live view)", "(the next driver)"
MODEL_COMMANDS = ("describe", "convert", "plan", "dataset", "verify", "simulate")
#: Commands that are there to change a run's directory; all others leave it as it is.
WRITING = (WRITER, "run", "stop", "fetch")
GRID = """\
name: night
defaults: {workload: text-generation, model: tiny-chatglm3, accelerator: HPU}
measure: {warmup: 0, min_repeats: 1, max_repeats: 2}
experiments:
  - name: tiny
    axes: {precision: [fp32, bf16], batch_size: 1..4 *2}
    exclude: [{precision: fp32, batch_size: 4}]
  - name: tune
    workload: finetuning
    cards: 2
    zip: {rank: [4, 8], steps: [1, 2]}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hostile input, and what is done with it."""

    number: int
    kind: str
    about: str
    lines: list[list[str]]
    keep: tuple[Path, ...] = ()  # directories that reading must not change


class Worlds:
    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.seed = base, seed
        self.sound = base / "sound"
        if not self.sound.is_dir():
            self._make_sound()
        tables = sorted((self.sound / "results" / "night" / "rows").glob("*.parquet"))
        self._table = pq.read_table(tables[-1])

    def case(self, number: int) -> Case:
        random = Random(f"{self.seed}/{number}")
        kinds, weights = zip(*KINDS.items(), strict=True)
        kind = random.choices(kinds, [w for w, _ in weights])[0]
        place = self.base / "case"
        force_remove(place)
        place.mkdir()
        about, names = KINDS[kind][1](self, random, place)
        right = {
            "results": [str(place / "results")],
            "run": ["night", "other"],
            "grid": [str(place / "grid.yaml")],
            "model": [str(place / "model"), *["tiny-chatglm3"] * (kind != "model")],
            "dataset": [str(place / "dataset")],
            "new": [str(place / "new"), str(place / "new.x"), "-"],
        }
        if kind == "command line":
            right["new"] += ["/", "/dev/null", str(place), "nowhere/x/y", "", "."]
        draw = CommandLines(random, right, hostility=0.4 if kind == "command line" else 0.03)
        chosen = [random.choice(names) for _ in range(random.choice([1, 1, 2]))]
        lines = [[name] if name.startswith("(") else draw.of(name) for name in chosen]
        # What writes into the run's directory may change it.
        keep = () if any(line[0] in WRITING for line in lines) else (place / "results",)
        return Case(number=number, kind=kind, about=about, lines=lines, keep=keep)

    def _make_sound(self) -> None:
        from workloads.data.embedded import synthetic_examples
        from workloads.data.shapes import write_json_lines
        from workloads.models.chatglm3.conversion import restore_into
        from workloads.models.embedded import tiny_chatglm3

        results = self.sound / "results"
        for run in ("night", "other"):
            with Store(results, run) as store:
                for number in range(2):
                    store.append(row(number))
                store.append(row(2), row(3, state="FAILED", failure_class="oom", reason="why"))
                store.write_file("grid.yaml", GRID)
                store.write_file("status.json", replace(STATUS, run=run).to_json())
                store.write_file("options.json", '{"emulate": "1x2:HPU", "address": null}')
                store.write_file("report.html", "<html></html>")
                lock = (store.path / "driver.lock").read_bytes()
                store.begin(journal_row(9))
                begun = (store.path / "begun.log").read_bytes()
            (self.sound / "driver.lock").write_bytes(lock)
            (self.sound / "begun.log").write_bytes(begun)
        (self.sound / "grid.yaml").write_text(GRID)
        native, original = self.sound / "native", self.sound / "original"
        native.mkdir()
        tiny_chatglm3.build(native)
        original.mkdir()
        restore_into(native, original)
        dataset = self.sound / "dataset"
        examples = synthetic_examples(12)
        write_json_lines(dataset / "train.json", examples[:8])
        write_json_lines(dataset / "dev.json", examples[8:])

    def _results(self, place: Path) -> Path:
        shutil.copytree(self.sound / "results", place / "results")
        shutil.copy(self.sound / "grid.yaml", place)
        return place / "results"

    def rows(self, random: Random, place: Path) -> tuple[str, list[str]]:
        results, told = self._results(place), []
        for _ in range(random.choice([1, 1, 1, 3])):
            name, data, about = hostile_file(random, self._table)
            directory = results / random.choice(["night", "other"]) / "rows"
            if random.random() < 0.25 and (victims := sorted(directory.glob("*.parquet"))):
                random.choice(victims).unlink()
            with contextlib.suppress(OSError):  # a name that the file system refuses
                (directory / name).write_bytes(data)
            told.append(about)
        return " | ".join(told), [*_readers(), FEED, WRITER]

    def side_files(self, random: Random, place: Path) -> tuple[str, list[str]]:
        """The small files beside the rows."""
        results, told = self._results(place), []
        for _ in range(random.choice([1, 1, 2])):
            run = results / random.choice(["night", "night", "other"])
            names = {path.name for path in run.iterdir() if path.is_file()}
            names |= {"driver.lock", "begun.log", "run.id", "report.html", ".reserve"}
            name = random.choice(sorted(names))
            sound = self.sound / name if name in ("driver.lock", "begun.log") else run / name
            content = sound.read_bytes() if sound.is_file() else b"0123456789ab\n"
            if name == "begun.log" and random.random() < 0.7:
                data = _begun(random, content)
            elif name == "grid.yaml" and random.random() < 0.7:
                data = _grid(random)
            else:
                data = side_file(random, content)
            (run / name).write_bytes(data)
            told.append(f"{name}: {data[:80]!r}")
        return " | ".join(told), [*_readers(), "run", "status", "report", *[FEED, WRITER] * 2]

    def places(self, random: Random, place: Path) -> tuple[str, list[str]]:
        """Something else where a file or a directory should be."""
        results = self._results(place)
        self._model(random, place, sound=True)
        shutil.copytree(self.sound / "dataset", place / "dataset")
        paths = sorted(path for path in place.rglob("*"))
        if random.random() < 0.6:
            paths = sorted(results.rglob("*"))
        told = []
        for _ in range(random.choice([1, 1, 2])):
            path = random.choice(paths)
            put = random.choice(ODD_FILES)
            with contextlib.suppress(OSError):  # one may have closed the other's directory
                force_remove(path)
                put(path)
            told.append(f"{put.__name__} for {path.relative_to(place)}")
        return " | ".join(told), [*_all_commands(), FEED, FEED, WRITER]

    def models(self, random: Random, place: Path) -> tuple[str, list[str]]:
        told = self._model(random, place)
        _grid_for(place, str(place / "model"))
        shutil.copytree(self.sound / "dataset", place / "dataset")
        return told, ["describe", "convert", *MODEL_COMMANDS]

    def _model(self, random: Random, place: Path, sound: bool = False) -> str:
        model = place / "model"
        shutil.copytree(self.sound / random.choice(["native", "original"]), model)
        if sound:
            return ""
        told = []
        for _ in range(random.choice([1, 1, 2])):
            files = sorted(path for path in model.iterdir() if path.is_file())
            file = random.choice([*files, *[f for f in files if f.name == "config.json"] * 3])
            action = random.random()
            if action < 0.05:
                told.append(random.choice([kind for kind in ODD if kind != "loop"]))  # in time
                write_odd(model, told[-1])
            elif action < 0.15:
                index = {"metadata": {}, "weight_map": {"a": "../../x", "b": "/etc/passwd"}}
                singles = ("model.safetensors", "pytorch_model.bin")
                for single in singles:
                    (model / single).unlink(missing_ok=True)
                name = f"{random.choice(singles)}.index.json"
                changed = index if random.random() < 0.3 else mutated(random, index)
                (model / name).write_text(json.dumps(changed))
                told.append(f"{name}: {changed!r:.60}")
            elif file.suffix == ".safetensors" and action < 0.9:
                file.write_bytes(_safetensors(random, file.read_bytes()))
                told.append("safetensors header")
            elif action < 0.97:
                data = side_file(random, file.read_bytes())
                file.write_bytes(data)
                told.append(f"{file.name}: {len(data)} bytes, {data[:60]!r}")
            else:
                file.unlink()
                told.append(f"no {file.name}")
            if not any(model.iterdir()):
                break
        return " | ".join(told)

    def datasets(self, random: Random, place: Path) -> tuple[str, list[str]]:
        dataset = place / "dataset"
        shutil.copytree(self.sound / "dataset", dataset)
        file = random.choice(sorted(dataset.iterdir()))
        lines = file.read_bytes().splitlines()
        at = random.randrange(len(lines))
        if random.random() < 0.7:
            lines[at] = side_file(random, lines[at])
            file.write_bytes(b"\n".join(lines))
        else:
            file.write_bytes(damaged(random, file.read_bytes()))
        _grid_for(place, "tiny-chatglm3", dataset=str(dataset))
        return f"{file.name} line {at}", ["dataset", "dataset", "plan"]

    def grids(self, random: Random, place: Path) -> tuple[str, list[str]]:
        self._results(place)
        data = _grid(random)
        (place / "grid.yaml").write_bytes(data)
        return f"{data[:80]!r}", ["plan", "plan", "simulate", "verify", "run", "submit"]

    def command_lines(self, random: Random, place: Path) -> tuple[str, list[str]]:
        """Sound files, and words that are not."""
        self._results(place)
        self._model(random, place, sound=True)
        shutil.copytree(self.sound / "dataset", place / "dataset")
        return "", _all_commands()


KINDS: dict[str, tuple[float, Callable[..., tuple[str, list[str]]]]] = {
    "rows": (42, Worlds.rows),
    "side file": (16, Worlds.side_files),
    "place": (9, Worlds.places),
    "model": (6, Worlds.models),
    "dataset": (2, Worlds.datasets),
    "grid": (8, Worlds.grids),
    "command line": (15, Worlds.command_lines),
}


def _readers() -> list[str]:
    others = ("watch", "doctor", "submit", "verify", *WRITING)
    return [name for name in parsers() if reads_results(name) and name not in others]


def _all_commands() -> list[str]:
    return [name for name in parsers() if name != "watch"]


def _begun(random: Random, content: bytes) -> bytes:
    """A journal's lines with a fitting checksum, and something wrong in them."""
    _, _, note_text = content.split(b"\n")[0].partition(b" ")
    changed = json.dumps(mutated(random, json.loads(note_text)))
    data = (json_text(random) if random.random() < 0.2 else changed).encode(
        "utf-8", "surrogatepass"
    )
    data = data.replace(b"\n", b" ")
    return disk.digest(data).encode() + b" " + data + b"\n" + content * random.choice([0, 1])


def _grid(random: Random) -> bytes:
    choice = random.random()
    if choice < 0.6:
        document = mutated(random, yaml.safe_load(GRID))
        with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):
            return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "replace")
        return b""
    if choice < 0.8:
        return damaged(random, GRID.encode())
    return side_file(random, json.dumps(yaml.safe_load(GRID)).encode())


def _grid_for(place: Path, model: str, **settings: str) -> None:
    document = yaml.safe_load(GRID)
    document["defaults"] |= {"model": model} | settings
    (place / "grid.yaml").write_text(yaml.safe_dump(document))
    (place / "results").mkdir()


def _safetensors(random: Random, data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    if random.random() < 0.3:
        length = random.choice([0, 1, length - 1, 2**32, 2**63, 2**64 - 1])
        return struct.pack("<Q", length) + data[8:]
    header = side_file(random, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def force_remove(path: Path) -> None:
    """Remove whatever is there, readable or not."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    path.chmod(0o700)
    for directory, names, _ in os.walk(path):
        for name in names:
            if not os.path.islink(os.path.join(directory, name)):
                os.chmod(os.path.join(directory, name), 0o700)
    shutil.rmtree(path)


#: Arguments by what is right for them.
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("run_name", "run_names", "before", "after"), "run"),
    **dict.fromkeys(("model", "tokenizer", "remote_code"), "model"),
    **dict.fromkeys(("output", "figures", "svg", "tiny", "destination"), "new"),
    **dict.fromkeys(("results", "there"), "results"),
    **dict.fromkeys(("grid", "grids"), "grid"),
    "source": "model",
    "directory": "dataset",
    "sql": "sql",
    "id": "run",
    "emulate": "emulate",
    "address": "address",
    "submission_id": "word",
    "deadline": "deadline",
    "budget": "budget",
    "host": "host",
    "working_dir": "results",
    "shared": "results",
}
SQL = (
    *("", "/* */", "select 'a\\0b'", "select '\x1b[31m' as x", f"select {'(' * 500}1{')' * 500}"),
    *(Path(__file__).with_name("statements.sql").read_text().splitlines()),
)
_DEADLINES = "08:00 24:00 25:61 2026-11-22T08:00+01:00 9999-12-31T23:59 0001-01-01"
WORDS: Mapping[str, Sequence[str]] = {
    "sql": SQL,
    "emulate": [
        *("1x2:HPU", "2x8", "1x1:CPU", "0x8", "2x8:", ":", "9x9x9", "-1x8", "1x8,1x8:GPU", "²x8"),
    ],
    "address": ["http://127.0.0.1:1", "127.0.0.1:1", "http://[::1", "http://", "ftp://127.0.0.1:1"],
    "word": ["x", "../x", "", "a b"],
    "deadline": _DEADLINES.split(),
    "budget": ["9h", "1h30m", "0m", "-1h", "999999999999h", "1e9s", "²h", "h"],
    "host": ["127.0.0.1", "::1", "256.1.1.1", "nowhere.invalid", ""],
}
NUMBERS = [
    *("0", "1", "-1", "8", "0.5", "5%", "100%", "nan", "inf", "-inf", "1e309", "1e-320", "²", "٣"),
    *("9" * 20, "9" * 400, "9" * 5000, "0x10", "1_000", " 1", "+1", "1,5"),
]
#: In the place of any value.
BAD = [
    *(*TEXTS, *NUMBERS, *(word for words in WORDS.values() for word in words), "z" * 5000),
    *("/", ".", "..", "-", "--", "@", "~", "~nobody/x", "/dev/null", "/dev/zero", "/dev/full"),
    *(
        "/proc/self/mem",
        "/proc/kmsg",
        "/nowhere/x",
        "a/" * 3000,
        "\udcff",
        "\udc80x",
        "*",
        "--json",
    ),
]


def reads_results(name: str) -> bool:
    return any(action.dest == "results" for action in parsers()[name]._actions)


@dataclass(frozen=True)
class CommandLines:
    """Draws command lines: ``right`` has values that are right, by role, and ``hostility`` is the
    share of values from the pool of bad ones."""

    random: Random
    right: Mapping[str, Sequence[str]]
    hostility: float

    def of(self, name: str) -> list[str]:
        return [name, *self._arguments(parsers()[name])]

    def _arguments(self, parser: argparse.ArgumentParser) -> list[str]:
        random = self.random
        options: list[list[str]] = []
        positionals: list[list[str]] = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                name = random.choice([*action.choices, *["nonsense"] * (self.hostility > 0.1)])
                kind = action.choices.get(name)
                positionals.append([name, *(self._arguments(kind) if kind else [])])
            elif isinstance(action, argparse._HelpAction | argparse._VersionAction):
                if random.random() < self.hostility / 20:
                    options.append([random.choice(action.option_strings)])
            elif not action.option_strings:
                positionals.append(self._positional(action))
            elif random.random() < (0.97 if action.dest == "results" else 0.2) or action.required:
                options.append(self._option(action))
        random.shuffle(options)
        words = [word for part in [*positionals, *options] for word in part]
        if random.random() < self.hostility / 5:
            words.insert(random.randrange(len(words) + 1), random.choice(BAD))
        return words

    def _positional(self, action: argparse.Action) -> list[str]:
        if action.nargs in ("?", "*") and self.random.random() < 0.3:
            return []
        if self.random.random() < self.hostility / 4:
            return []
        word = self._word(action)
        dashes = word.startswith("-") and word != "-" and self.random.random() < 0.7
        return ["--", word] if dashes else [word]

    def _option(self, action: argparse.Action) -> list[str]:
        flag = self.random.choice(action.option_strings)
        if action.nargs == 0 or not flag.startswith("--"):
            return [flag]
        return [f"{flag}={self._word(action)}"]

    def _word(self, action: argparse.Action) -> str:
        if self.random.random() < self.hostility:
            return self.random.choice(BAD)
        if action.choices is not None:
            return str(self.random.choice(list(action.choices)))
        role = ROLES.get(action.dest, "")
        if known := self.right.get(role) or WORDS.get(role):
            return self.random.choice(known)
        return self.random.choice(NUMBERS if self.random.random() < 0.8 else TEXTS)
