"""Control characters made visible: text from elsewhere may not give orders to a terminal.

Names, reasons, paths and messages come from files, models, nodes and networks that nobody vetted.
An escape sequence in them could rewrite what a terminal has shown, a bidirectional override could
let a name read backwards, a carriage return could hide the line before it.
"""

from __future__ import annotations

import json
import unicodedata

# Cc: control, Cf: format (bidirectional overrides), Cs: lone surrogates, Zl/Zp: line separators.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def visible(text: str) -> str:
    """Spell out control and format characters; newlines and tabs stay."""
    if text.isprintable():  # then none of them is in it
        return text
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line if line.isprintable() else _visible_line(line) for line in lines)


def visible_json(text: str) -> str:
    """JSON that says the same, with control and format characters as JSON escapes; for JSON alone,
    where they stand in strings and nowhere else."""
    if text.replace("\n", "").isprintable():
        return text
    lines = text.split("\n")
    return "\n".join(line if line.isprintable() else _escaped_line(line) for line in lines)


def _escaped_line(line: str) -> str:
    kept = (c if c.isprintable() or c == "\t" or _seen(c) else _json_escape(c) for c in line)
    return "".join(kept)


def _json_escape(character: str) -> str:
    # DEL is ASCII, which ``json`` leaves as it is.
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def _visible_line(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" or _seen(c) else _spelled(c) for c in line)


def _seen(character: str) -> bool:
    return unicodedata.category(character) not in _UNSEEN


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
