"""Command lines drawn from the parser of the program itself: every command, every option."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random

from hostile_values import TEXTS

from orchestrator.cli.main import full_parser

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
SQL = [
    *("select count(*) from rows", "select * from jobs", "select * from samples", "select 1"),
    *("select * from items", "describe measurements", "select * exclude (versions) from rows"),
    *("", ";", ";;", "--", "/* */", "select", "drop table measurements", "select 1; select 2"),
    *("copy rows to 'x'", "attach 'x.db'", "install httpfs", "pragma database_list", "checkpoint"),
    *(
        "select * from read_csv('/etc/passwd')",
        "select 'a\\0b'",
        "select chr(0)",
        "explain select 1",
    ),
    *("select interval 1 year", "select timestamp 'infinity'", "select date '-infinity'"),
    *("select 1::hugeint << 100", "select 'nan'::double", "select [1,2]", "select {'a': {'b': 1}}"),
    *(
        "select map {1: 2}",
        "select '\\xff'::blob",
        "select uuid()",
        "select time '00:00'",
        "set x = 1",
    ),
    *(
        "create table t as select 1",
        "select " + "(" * 500 + "1" + ")" * 500,
        "with x as (select 1)",
    ),
    *(
        "select sum(cards) from jobs",
        "select * from jobs order by all",
        "begin",
        "commit",
        "select *",
    ),
    *("select $1", "select ?", "prepare p as select 1", "call pragma_version()", "values (1), (2)"),
    *(
        "select 'a' as \"\"",
        "select 1 as a, 2 as a",
        "select '\x1b[31m' as x",
        "insert into rows values (1)",
    ),
]
WORDS: Mapping[str, Sequence[str]] = {
    "sql": SQL,
    "emulate": [
        "1x2:HPU",
        "2x8",
        "1x1:CPU",
        "0x8",
        "2x8:",
        ":",
        "9x9x9",
        "-1x8",
        "1x8,1x8:GPU",
        "²x8",
    ],
    "address": ["http://127.0.0.1:1", "127.0.0.1:1", "http://[::1", "http://", "ftp://127.0.0.1:1"],
    "word": ["x", "../x", "", "a b"],
    "deadline": [
        "08:00",
        "24:00",
        "25:61",
        "2026-11-22T08:00+01:00",
        "9999-12-31T23:59",
        "0001-01-01",
    ],
    "budget": ["9h", "1h30m", "0m", "-1h", "999999999999h", "1e9s", "²h", "h"],
    "host": ["127.0.0.1", "::1", "256.1.1.1", "nowhere.invalid", ""],
}
NUMBERS = [
    *("0", "1", "-1", "8", "0.5", "5%", "100%", "nan", "inf", "-inf", "1e309", "1e-320", "²", "٣"),
    *("9" * 20, "9" * 400, "9" * 5000, "0x10", "1_000", " 1", "+1", "1,5"),
]
LONG = "z" * 5000


@cache
def commands() -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    for action in full_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise AssertionError("the program has no commands")


def reads_results(name: str) -> bool:
    """Return whether a command takes a results directory."""
    return any(action.dest == "results" for action in commands()[name]._actions)


def command_line(
    random: Random, name: str, right: Mapping[str, Sequence[str]], *, hostility: float
) -> list[str]:
    """A command with its arguments.

    Args:
        random: decides.
        name: of the command.
        right: values that are right, by role.
        hostility: how many of the values are from the pool of bad ones.
    """
    return [name, *_arguments(random, commands()[name], right, hostility)]


def _arguments(
    random: Random,
    parser: argparse.ArgumentParser,
    right: Mapping[str, Sequence[str]],
    hostility: float,
) -> list[str]:
    options: list[list[str]] = []
    positionals: list[list[str]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            name = random.choice(
                [*action.choices, "nonsense"] if hostility > 0.1 else [*action.choices]
            )
            inner = action.choices.get(name)
            rest = _arguments(random, inner, right, hostility) if inner else []
            positionals.append([name, *rest])
        elif isinstance(action, argparse._HelpAction | argparse._VersionAction):
            if random.random() < hostility / 20:
                options.append([random.choice(action.option_strings)])
        elif not action.option_strings:
            positionals.append(_positional(random, action, right, hostility))
        elif random.random() < (0.97 if action.dest == "results" else 0.2) or action.required:
            options.append(_option(random, action, right, hostility))
    random.shuffle(options)
    words = [word for part in [*positionals, *options] for word in part]
    if random.random() < hostility / 5:
        words.insert(random.randrange(len(words) + 1), _bad(random))
    return words


def _positional(
    random: Random, action: argparse.Action, right: Mapping[str, Sequence[str]], hostility: float
) -> list[str]:
    if action.nargs in ("?", "*") and random.random() < 0.3:
        return []
    if random.random() < hostility / 4:
        return []
    word = _word(random, action, right, hostility)
    return (
        ["--", word] if word.startswith("-") and word != "-" and random.random() < 0.7 else [word]
    )


def _option(
    random: Random, action: argparse.Action, right: Mapping[str, Sequence[str]], hostility: float
) -> list[str]:
    flag = random.choice(action.option_strings)
    if action.nargs == 0:
        return [flag]
    return (
        [f"{flag}={_word(random, action, right, hostility)}"] if flag.startswith("--") else [flag]
    )


def _word(
    random: Random, action: argparse.Action, right: Mapping[str, Sequence[str]], hostility: float
) -> str:
    if random.random() < hostility:
        return _bad(random)
    if action.choices is not None:
        return str(random.choice(list(action.choices)))
    role = ROLES.get(action.dest, "")
    if known := right.get(role) or WORDS.get(role):
        return random.choice(known)
    return random.choice(NUMBERS if random.random() < 0.8 else TEXTS)


def _bad(random: Random) -> str:
    pool = [*TEXTS, *NUMBERS, *(w for words in WORDS.values() for w in words)]
    pool += [
        LONG,
        "/",
        ".",
        "..",
        "-",
        "--",
        "@",
        "~",
        "~nobody/x",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
    ]
    pool += [
        "/proc/self/mem",
        "/proc/kmsg",
        "/nowhere/x",
        "a/" * 3000,
        "\udcff",
        "\udc80x",
        "*",
        "--json",
    ]
    return random.choice(pool)
