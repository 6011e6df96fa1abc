"""Examples, their shapes in files, and AdvertiseGen's JSON lines, to which they are written.

All shapes are reduced to AdvertiseGen's two texts, ``content`` and ``summary``; the latter is
empty for plain prompts.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from workloads.base import BadConfiguration
from workloads.data.records import BadExample
from workloads.util import files

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a conversation."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its reference output (empty if there is none)."""

    content: str
    summary: str = ""
    earlier: tuple[Turn, ...] = ()  # turns before ``content``, which is the user's
    synthetic: bool = False  # generated; written as ``"synthetic": true``


def text_of(example: Example) -> str:
    """Return all text of an example, whatever its shape."""
    parts = [*(turn.text for turn in example.earlier), example.content, example.summary]
    return "\n".join(part for part in parts if part)


def write_json_lines(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as AdvertiseGen does, atomically, with readable non-ASCII text."""
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


# Shapes of examples. A file has one, inferred from the first example's columns unless ``columns:``
# names others.

#: A record: values by column.
Record = Mapping[str, Any]

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layout of an example."""

    needs: tuple[str, ...]  # required columns
    may_have: tuple[str, ...] = ()
    learned: str  # the part that fine-tuning learns, for the row
    written: str  # a JSON sample, for messages
    read: Callable[[Record], Example]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.needs, *self.may_have)


def _texts(prompt: str, answer: str) -> Callable[[Record], Example]:
    """Read a prompt and an answer, which may be empty, from two columns."""
    return lambda record: Example(
        content=_text(record, prompt), summary=_text(record, answer, empty=True)
    )


def _alpaca(record: Record) -> Example:
    instruction, about = _text(record, "instruction"), _text(record, "input", empty=True)
    content = f"{instruction}\n\n{about}" if about.strip() else instruction
    return Example(content=content, summary=_text(record, "output", empty=True))


def _chat(*columns: str) -> Callable[[Record], Example]:
    """Read a conversation: the last answer is learned, all before it is the prompt."""

    def read(record: Record) -> Example:
        turns = [turn for name in columns if record.get(name) for turn in _turns(record, name)]
        if not turns:
            raise BadExample(f'"{columns[0]}" is no list of turns')
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        summary = turns[answers[-1]].text if answers else ""
        turns = turns[: answers[-1]] if answers else turns
        if not turns or turns[-1].role != "user":
            raise BadExample("no turn of the user stands before the last answer")
        return Example(content=turns[-1].text, summary=summary, earlier=tuple(turns[:-1]))

    return read


def _prompt(record: Record) -> Example:
    several = isinstance(record.get("prompt"), list)
    read = _chat if several else _texts
    return read("prompt", "completion")(record)


#: Learned part of examples with an answer, and without one, for rows.
ANSWER, WHOLE_TEXT = "the answer", "every token of the text"
_LAST = "the last answer of each conversation"

#: The first match by columns is an example's shape.
SHAPES = (
    Shape(  # AdvertiseGen's
        needs=("content",),
        may_have=("summary",),
        learned=ANSWER,
        written='{"content": "…", "summary": "…"}',
        read=_texts("content", "summary"),
    ),
    Shape(  # CNN/DailyMail's
        needs=("article",),
        may_have=("highlights",),
        learned="the highlights",
        written='{"article": "…", "highlights": "…"}',
        read=_texts("article", "highlights"),
    ),
    Shape(  # Alpaca's; ``input`` may be empty and follows the instruction
        needs=("instruction", "output"),
        may_have=("input",),
        learned=ANSWER,
        written='{"instruction": "…", "input": "", "output": "…"}',
        read=_alpaca,
    ),
    Shape(  # a chat: turns with ``role`` and ``content``
        needs=("messages",),
        learned=_LAST,
        written='{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}',
        read=_chat("messages"),
    ),
    Shape(  # ShareGPT's: turns with ``from`` and ``value``
        needs=("conversations",),
        learned=_LAST,
        written='{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}',
        read=_chat("conversations"),
    ),
    Shape(  # two texts, or two lists of turns
        needs=("prompt",),
        may_have=("completion",),
        learned=ANSWER,
        written='{"prompt": "…", "completion": "…"}',
        read=_prompt,
    ),
    Shape(
        needs=("text",),
        learned=WHOLE_TEXT,
        written='{"text": "…"}',
        read=lambda record: Example(content=_text(record, "text")),
    ),
)


@dataclass(frozen=True, slots=True)
class Columns:
    """A shape, and its columns' names in one dataset."""

    shape: Shape
    names: Mapping[str, str] = field(default_factory=dict)  # from the shape's to the dataset's

    def example(self, record: object, where: str) -> Example:
        """Parse a record; raises BadExample, whose message begins with ``where``."""
        if not isinstance(record, Mapping):
            raise BadExample(f"{where}: {_kind(record)}; {_expected()}")
        if self.names:
            columns = (*self.shape.columns, "synthetic")
            record = {name: record.get(self.names.get(name, name)) for name in columns}
        try:
            example = self.shape.read(record)
        except BadExample as error:
            text = f"{error}; expected {self.shape.written}"
            renamed = re.sub(r'"(\w+)"', lambda m: f'"{self.names.get(m[1], m[1])}"', text)
            raise BadExample(f"{where}: {renamed}") from None
        return replace(example, synthetic=record.get("synthetic", False) is True)


def columns_named(text: str) -> Columns:
    """Parse ``columns:`` such as ``prompt=question, completion=reply``; raises BadConfiguration."""
    names: dict[str, str] = {}
    for part in text.split(","):
        ours, _, theirs = (word.strip() for word in part.partition("="))
        if not (ours and theirs):
            raise BadConfiguration(
                f"columns: {part.strip()!r} is no pair; write columns: prompt=question, "
                "completion=reply"
            )
        names[ours] = theirs
    known = {column for shape in SHAPES for column in shape.columns}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise BadConfiguration(f"columns: there is no {name!r}; {meant}{_expected()}")
    for shape in SHAPES:
        if set(names) <= set(shape.columns) and set(shape.needs) & set(names):
            return Columns(shape, names)
    raise BadConfiguration(f"columns: {', '.join(names)} belong to no one shape; {_expected()}")


def columns_of(record: object, where: str) -> Columns:
    """Infer a dataset's shape from its first record; raises BadExample if unknown."""
    if not isinstance(record, Mapping):
        raise BadExample(f"{where}: {_kind(record)}; {_expected()}")
    for shape in SHAPES:
        if all(name in record for name in shape.needs):
            return Columns(shape)
    names = ", ".join(map(str, record)) or "nothing"
    texts = [str(name) for name, value in record.items() if isinstance(value, str)]
    question, answer = texts[:2] if len(texts) > 1 else ("question", "reply")
    hint = f"or name them, such as columns: prompt={question:.40}, completion={answer:.40}"
    raise BadExample(f"{where}: has {names:.200}; {_expected()}, {hint}")


def _expected() -> str:
    shapes = "; ".join(", ".join(shape.columns) for shape in SHAPES)
    return f"expected the columns of one of these: {shapes}"


def _kind(value: object) -> str:
    """Return a value's type in JSON's terms."""
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "a text"), (list, "a list"))
    known = (name for kind, name in kinds if isinstance(value, kind))
    return next(known, "nothing" if value is None else f"a {type(value).__name__}")


def _text(record: Record, name: str, *, empty: bool = False) -> str:
    value = record.get(name)
    if value is None and empty:
        return ""
    if isinstance(value, str) and (empty or value.strip()):
        return value
    if value is None or isinstance(value, (str, list, Mapping)):
        raise BadExample(f'no text under "{name}"')
    raise BadExample(f'"{name}" is {_kind(value)}, no text')


def _turns(record: Record, name: str) -> Iterator[Turn]:
    entries = record[name]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise BadExample(f'"{name}" is no list of turns')
    for number, entry in enumerate(entries, 1):
        turn = f'turn {number} of "{name}"'
        if not isinstance(entry, Mapping):
            raise BadExample(f"{turn} is {_kind(entry)}")
        role = _ROLES.get(str(entry.get("role", entry.get("from"))).lower())
        text = entry.get("content", entry.get("value"))
        if role is None:
            raise BadExample(f"{turn} has none of the roles {', '.join(_ROLES)}")
        if not isinstance(text, str):
            raise BadExample(f"{turn} has no text")
        yield Turn(role=role, text=text)
