"""Examples and the JSON-lines files that hold them.

AdvertiseGen keeps one JSON object a line, ``{"content": …, "summary": …}``: the attributes of a
product and the advertisement written for it. Every dataset here has this shape; plain prompts
have an empty ``summary``. A malformed line is an error that names file and line, since a line
skipped in silence would make two runs on "the same" data differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workloads import files
from workloads.errors import DataMissing

#: Lines longer than this many bytes are refused: no example is; a wrong file may be.
MAX_LINE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One example: the prompt, and the reference output (empty if there is none)."""

    content: str
    summary: str = ""
    synthetic: bool = False  # made up by a program; the line then says ``"synthetic": true``


def read_json_lines(path: Path) -> list[Example]:
    """The examples of a JSON-lines file, in file order.

    Blank lines and other keys are allowed; a missing ``summary`` reads as empty.

    Raises:
        DataMissing: there is no such file, it holds no examples, or a line is not an object with
            a non-empty ``content`` string; the message names file and line.
    """
    examples = []
    try:
        with files.opened(path) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise DataMissing(f"{path}:{number}: line longer than {MAX_LINE_BYTES:,} bytes")
                if line.strip():
                    examples.append(_parse(line, f"{path}:{number}"))
    except OSError as error:
        raise DataMissing(f"cannot read {path}: {error.strerror or error}") from error
    if not examples:
        raise DataMissing(f"{path} holds no examples; one JSON object a line is expected")
    return examples


def _parse(line: bytes, where: str) -> Example:
    wanted = 'expected an object like {"content": "…", "summary": "…"}'
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataMissing(f"{where}: not UTF-8 (byte {error.start + 1}); {wanted}") from error
    except (ValueError, RecursionError) as error:
        raise DataMissing(f"{where}: not JSON ({error}); {wanted}") from error
    if not isinstance(value, dict):
        raise DataMissing(f"{where}: a {type(value).__name__}; {wanted}")
    content, summary = value.get("content"), value.get("summary", "")
    if not isinstance(content, str) or not content.strip():
        raise DataMissing(f'{where}: no text under "content"; {wanted}')
    if not isinstance(summary, str):
        raise DataMissing(f'{where}: "summary" is a {type(summary).__name__}; {wanted}')
    return Example(
        content=content, summary=summary, synthetic=value.get("synthetic", False) is True
    )


def is_synthetic_file(path: Path) -> bool:
    """Tell if the file's first example says that it was made up. Reads one line; never raises."""
    try:
        with files.opened(path) as lines:
            return _parse(lines.readline(MAX_LINE_BYTES), str(path)).synthetic
    except (OSError, DataMissing):
        return False


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
