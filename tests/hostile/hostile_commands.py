"""Command lines drawn from the parser of the program itself: every command, every option."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from command_line import parsers
from hostile_values import TEXTS

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
