"""Examples, and the JSON-lines files that they are written to.

AdvertiseGen keeps one JSON object a line, ``{"content": …, "summary": …}``: the attributes of a
product and the advertisement written for it. What other shapes say (``shapes.py``) is brought to
the same two texts; plain prompts have an empty ``summary``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workloads import files

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a conversation."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example: the prompt, and the reference output (empty if there is none)."""

    content: str
    summary: str = ""
    earlier: tuple[Turn, ...] = ()  # turns of a conversation before ``content``, which a user says
    synthetic: bool = False  # made up by a program; the line then says ``"synthetic": true``


def text_of(example: Example) -> str:
    """All text of an example, whatever its shape."""
    parts = [*(turn.text for turn in example.earlier), example.content, example.summary]
    return "\n".join(part for part in parts if part)


def write_json_lines(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as AdvertiseGen does, aside and then in one step, so that ``path`` is never
    half a file. Text stays readable: no ``\\u`` escapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with os.fdopen(files.create(aside), "w", encoding="utf-8", newline="\n") as out:
            for example in examples:
                row: dict[str, object] = {"content": example.content, "summary": example.summary}
                if example.synthetic:
                    row["synthetic"] = True
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
