"""Detection of variables that hold secrets, and the spellings of their values in texts.

A name is judged by its words: ``GITHUB_PAT`` and ``WANDB_API_KEY`` hold secrets, ``MONKEY``,
``TOKENIZERS_PARALLELISM`` and ``SSH_AUTH_SOCK`` do not. Two kinds of name are told apart. ``TOKEN``
or ``PASSWORD`` leave no doubt, and every value of six characters is taken out. ``SORT_KEY`` may be
a cryptographic key or the name of a column: a value that reads as a word or a small number stays,
since its removal would garble every log line that has the word.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus

#: Anywhere in a name, also inside a word: PGPASSWORD, GHTOKEN, authToken. Not TOKENIZERS, and not
#: TOKENS, of which there is a number.
_CERTAIN = re.compile(
    r"TOKEN(?!I[ZS]|S(_|$))|SECRET|PASSW|PASSPHRASE|CREDENTIAL|WEBHOOK|SIGNATURE|SSHPASS"
    r"|(API|ACCESS|PRIVATE|SIGNING|ENCRYPTION|MASTER)_?KEY|.+_(PASS|PWD|PAT|SIG)$"
)
#: Their values are secrets unless they read as words.
_DOUBTFUL = re.compile(r"(^|_)(KEYS?|PRIVATE|DSN|COOKIE|TOKENS)(_|$)|AUTH(?!OR)|^NIGHTGRID_NOTIFY$")
#: ``RAY_AUTH_TOKEN_PATH`` names a file; the name is no secret and helps to find it.
_LOCATION = re.compile(r"_(PATH|FILE|DIR|SOCK)$")
_USER_INFO = re.compile(r"://[^\s/?#\"'@:]*:([^\s/?#\"']+)@")

#: Shorter values are words such as "1" or "token", whose removal would garble messages.
SHORTEST_SECRET = 6
_SHORTEST_DOUBTFUL = 8
_SHORTEST_LINE = 8  # of a value of several lines
#: A word, or several that are joined as identifiers are; of this length it is no word any more.
_WORD = re.compile(r"[A-Za-z]+([ _.-][A-Za-z]+)*|[0-9]+|[/~@][\w./~-]*")
_LONGEST_WORD = 20
_LINE_BREAK = re.compile(r"\r\n|\r|\n|\\r\\n|\\n")


@lru_cache(maxsize=4096)
def certainty(name: str) -> int:
    """2 for a name that leaves no doubt, 1 for one whose value decides, 0 for an ordinary one."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper().replace("-", "_")
    if _LOCATION.search(words) or words == "OLDPWD":
        return 0
    return 2 if _CERTAIN.search(words) else 1 if _DOUBTFUL.search(words) else 0


def is_parameter_of_secret(name: str) -> bool:
    """Return whether a parameter of an address (``?token=…``) holds a secret. It has one word more
    than variables have: there ``key``, ``sig`` and ``auth`` alone mean keys to the door."""
    return certainty(name) == 2 or name.lower() in {"key", "sig", "pass", "pwd", "auth", "pat"}


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's value is to be kept out of texts."""
    value = value.strip()
    sure = certainty(name)
    if not sure or len(value) < (SHORTEST_SECRET if sure == 2 else _SHORTEST_DOUBTFUL):
        return False
    if sure == 1 and len(value) < _LONGEST_WORD and _WORD.fullmatch(value):
        return False
    if name == "NIGHTGRID_NOTIFY" and value.startswith("@"):
        return False  # a file that holds the address
    return not (value.startswith("/") and os.path.exists(value))


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Every spelling of every secret in ``environment``, with the name of its variable."""
    found: dict[str, str] = {}
    for name, value in environment.items():
        for secret in _secrets_in(name, value):
            for spelling in _spellings(secret):
                found.setdefault(spelling, name)
    return found


def _secrets_in(name: str, value: str) -> Iterator[str]:
    """The value, the lines of one that has several, and the passwords of addresses in it."""
    if is_secret(name, value):
        yield value
        yield value.strip()
        lines = [line.strip() for line in _LINE_BREAK.split(value)]
        if len(lines) > 1:
            yield " ".join(value.split())  # as messages have it that are put on one line
            for line in lines:
                if len(line) >= _SHORTEST_LINE and not line.startswith("-----"):
                    yield line
    for match in _USER_INFO.finditer(value):
        if len(match[1]) >= SHORTEST_SECRET:
            yield match[1]


def _spellings(value: str) -> set[str]:
    """A value as it is, and as JSON, Python, addresses and HTML write it."""
    data = value.encode("utf-8", "surrogateescape")
    percent = {quote(data, safe=""), quote(data), quote_plus(data)}
    return {
        value,
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        repr(data)[2:-1],
        html.escape(value),
        *percent,
        *(re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), text) for text in percent),
    } - {""}
