"""Examples, and the JSON-lines files that they are written to.

AdvertiseGen keeps one JSON object a line, ``{"content": …, "summary": …}``: the attributes of a
product and the advertisement written for it. What other shapes say (``shapes.py``) is brought to
the same two texts; plain prompts have an empty ``summary``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from workloads.base import BadConfiguration
from workloads.util import files

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


# The shapes that examples come in, and what each means: a prompt, and the answer to learn.
#
# content, summary            AdvertiseGen's
# article, highlights         CNN/DailyMail's
# instruction, input, output  Alpaca's; ``input`` may be empty, and stands below the instruction
# messages                    a chat: a list of turns with ``role`` and ``content``
# conversations               ShareGPT's: turns with ``from`` and ``value``
# prompt, completion          two texts, or two lists of turns
# text                        plain text
#
# A file has one shape, told by the columns of its first example; ``columns:`` names others.

#: A record of a file: values by column.
Record = Mapping[str, Any]

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
}


class BadExample(BadConfiguration):
    """An example has not the shape of its file; another node would find it no better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to write an example."""

    name: str
    needs: tuple[str, ...]  # columns that each example has
    may_have: tuple[str, ...] = ()
    learned: str  # what fine-tuning learns of an example, as the row says it
    written: str  # an example as JSON, for messages
    read: Callable[[Record], Example]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are looked at."""
        return (*self.needs, *self.may_have)


def _content(record: Record) -> Example:
    return Example(content=_text(record, "content"), summary=_text(record, "summary", empty=True))


def _article(record: Record) -> Example:
    highlights = _text(record, "highlights", empty=True)
    return Example(content=_text(record, "article"), summary=highlights)


def _alpaca(record: Record) -> Example:
    instruction, about = _text(record, "instruction"), _text(record, "input", empty=True)
    content = f"{instruction}\n\n{about}" if about.strip() else instruction
    return Example(content=content, summary=_text(record, "output", empty=True))


def _prompt(record: Record) -> Example:
    if not isinstance(record.get("prompt"), list):
        return Example(
            content=_text(record, "prompt"), summary=_text(record, "completion", empty=True)
        )
    turns = [*_turns(record, "prompt")]
    if record.get("completion"):
        turns += _turns(record, "completion")
    return _of_turns(turns)


def _plain(record: Record) -> Example:
    return Example(content=_text(record, "text"))


def _messages(record: Record) -> Example:
    return _of_turns(_turns(record, "messages"))


def _conversations(record: Record) -> Example:
    return _of_turns(_turns(record, "conversations"))


#: What fine-tuning learns of an example with an answer, and of one without, as a row says it.
ANSWER, WHOLE_TEXT = "the answer", "every token of the text"
_LAST = "the last answer of each conversation"

#: The first whose columns an example has is its shape.
SHAPES = (
    Shape(
        name="AdvertiseGen",
        needs=("content",),
        may_have=("summary",),
        learned=ANSWER,
        written='{"content": "…", "summary": "…"}',
        read=_content,
    ),
    Shape(
        name="CNN/DailyMail",
        needs=("article",),
        may_have=("highlights",),
        learned="the highlights",
        written='{"article": "…", "highlights": "…"}',
        read=_article,
    ),
    Shape(
        name="Alpaca",
        needs=("instruction", "output"),
        may_have=("input",),
        learned=ANSWER,
        written='{"instruction": "…", "input": "", "output": "…"}',
        read=_alpaca,
    ),
    Shape(
        name="chat",
        needs=("messages",),
        learned=_LAST,
        written='{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}',
        read=_messages,
    ),
    Shape(
        name="ShareGPT",
        needs=("conversations",),
        learned=_LAST,
        written='{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}',
        read=_conversations,
    ),
    Shape(
        name="prompt and completion",
        needs=("prompt",),
        may_have=("completion",),
        learned=ANSWER,
        written='{"prompt": "…", "completion": "…"}',
        read=_prompt,
    ),
    Shape(
        name="text",
        needs=("text",),
        learned=WHOLE_TEXT,
        written='{"text": "…"}',
        read=_plain,
    ),
)


@dataclass(frozen=True, slots=True)
class Columns:
    """A shape, and the names that its columns have in one dataset."""

    shape: Shape
    names: tuple[tuple[str, str], ...] = ()  # from the shape's to the dataset's, where they differ

    def example(self, record: object, where: str) -> Example:
        """The example of a record.

        Raises:
            BadExample: it has another shape; the message begins with ``where``.
        """
        if not isinstance(record, Mapping):
            raise BadExample(f"{where}: {_kind(record)}; {_expected()}")
        if self.names:
            record = {ours: record.get(theirs) for ours, theirs in self._all()}
        try:
            example = self.shape.read(record)
        except _Wrong as error:
            message = f"{self._in_their_words(error)}; expected {self._written()}"
            raise BadExample(f"{where}: {message}") from None
        return replace(example, synthetic=record.get("synthetic", False) is True)

    def _all(self) -> list[tuple[str, str]]:
        names = dict(self.names)
        return [(ours, names.get(ours, ours)) for ours in (*self.shape.columns, "synthetic")]

    def _written(self) -> str:
        """An example of the shape, in the dataset's own names."""
        text = self.shape.written
        for ours, theirs in self.names:
            text = text.replace(f'"{ours}":', f'"{theirs}":')
        return text

    def _in_their_words(self, error: _Wrong) -> str:
        name = dict(self.names).get(error.column, error.column)
        return error.said.format(column=f'"{name}"')


def columns_named(text: str) -> Columns:
    """Read what ``columns:`` of a grid says: ``prompt=question, completion=reply``.

    Raises:
        BadConfiguration: it fits no shape.
    """
    names: dict[str, str] = {}
    for part in text.split(","):
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not (ours and equals and theirs):
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
            return Columns(shape, tuple(sorted(names.items())))
    raise BadConfiguration(f"columns: {', '.join(names)} belong to no one shape; {_expected()}")


def columns_of(record: object, where: str) -> Columns:
    """Tell the shape of a dataset by its first record.

    Raises:
        BadExample: it is none that is known.
    """
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
    """A value's type in the words of JSON."""
    kinds = ((bool, "true or false"), ((int, float), "a number"), (str, "a text"), (list, "a list"))
    known = (name for kind, name in kinds if isinstance(value, kind))
    return next(known, "nothing" if value is None else f"a {type(value).__name__}")


class _Wrong(Exception):
    """One column is not what its shape wants; ``said`` has ``{column}`` where its name goes."""

    def __init__(self, column: str, said: str) -> None:
        super().__init__(said)
        self.column = column
        self.said = said


def _text(record: Record, name: str, *, empty: bool = False) -> str:
    value = record.get(name)
    if value is None and empty:
        return ""
    if not isinstance(value, str) and not (value is None or isinstance(value, (list, Mapping))):
        raise _Wrong(name, f"{{column}} is {_kind(value)}, no text")
    if not isinstance(value, str) or (not empty and not value.strip()):
        raise _Wrong(name, "no text under {column}")
    return value


def _turns(record: Record, name: str) -> list[Turn]:
    value = record.get(name)
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise _Wrong(name, "{column} is no list of turns")
    turns = []
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, Mapping):
            raise _Wrong(name, f"turn {number} of {{column}} is {_kind(entry)}")
        role = _ROLES.get(str(entry.get("role", entry.get("from"))).lower())
        text = entry.get("content", entry.get("value"))
        if role is None:
            known = ", ".join(_ROLES)
            raise _Wrong(name, f"turn {number} of {{column}} has none of the roles {known}")
        if not isinstance(text, str):
            raise _Wrong(name, f"turn {number} of {{column}} has no text")
        turns.append(Turn(role=role, text=text))
    return turns


def _of_turns(turns: list[Turn]) -> Example:
    """The last answer is what is learned; all before it is the prompt."""
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    summary = ""
    if answers:
        summary = turns[answers[-1]].text
        turns = turns[: answers[-1]]
    if not turns or turns[-1].role != "user":
        raise _Wrong("messages", "no turn of the user stands before the last answer")
    return Example(content=turns[-1].text, summary=summary, earlier=tuple(turns[:-1]))
