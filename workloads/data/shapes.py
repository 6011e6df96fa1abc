"""Examples, their shapes in files, and AdvertiseGen's JSON lines, to which they are written.

All shapes are reduced to AdvertiseGen's two texts, ``content`` and ``summary``; the latter is
empty for plain prompts.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from workloads.base import BadConfiguration
from workloads.data.records import BadExample
from workloads.util import files

Role = Literal["system", "user", "assistant", "tool"]


class Unusable(BadExample):
    """A record of its file's shape that no job can use; it is left out and counted by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a conversation; an assistant's may call tools and have no text."""

    role: Role
    text: str
    tool_calls: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and its reference output (empty if there is none)."""

    content: str  # "" where the last turn is a tool's, which then stands in ``earlier``
    summary: str = ""
    earlier: tuple[Turn, ...] = ()  # turns before ``content``, which is the user's
    joined: bool = False  # neighbouring turns of one role were joined
    synthetic: bool = False  # generated; written as ``"synthetic": true``


def text_of(example: Example) -> str:
    """Return all text of an example, whatever its shape."""
    parts = [*(turn.text for turn in example.earlier), example.content, example.summary]
    return "\n".join(part for part in parts if part)


def json_line(example: Example) -> str:
    """Return a prompt and its answer as AdvertiseGen has them, with readable non-ASCII text."""
    row: dict[str, object] = {"content": example.content, "summary": example.summary}
    if example.synthetic:
        row["synthetic"] = True
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_json_lines(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as AdvertiseGen does (``json_line``), atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with os.fdopen(files.create(aside), "w", encoding="utf-8", newline="\n") as out:
            out.writelines(map(json_line, examples))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


# Shapes of examples. A file has one, inferred from the first example's columns unless ``columns:``
# names others.

#: A record: values by column.
Record = Mapping[str, Any]

#: Names of roles and speakers, in lower case.
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "question"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "bot", "chatgpt", "model", "ai", "function_call"), "assistant"
    ),
    **dict.fromkeys(("bing", "bard", "claude", "chatbot", "answer"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "function_response"), "tool"),
}
#: Columns that hold an answer in data which people have; beside a prompt without the usual answer,
#: one of them is likely what fine-tuning should learn.
LIKELY_ANSWERS = (
    *("response", "output", "answer", "answers", "completion", "chosen", "target", "targets"),
    *("reply", "solution", "summary", "highlights", "canonical_solution", "reference"),
)
#: Columns that change what a question means; a shape that does not read them is not taken.
_MORE_OF_A_PROMPT = {"context", "passage", "choices", "options", "document", "system_prompt"}

#: Columns of a record that is one message of a conversation.
_OF_A_MESSAGE = {"role", "speaker", "parent_id"}
#: Learned part of examples with an answer, and without one, for rows.
ANSWER, WHOLE_TEXT = "the answer", "every token of the text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layout of an example."""

    needs: tuple[str, ...]  # required columns
    read: Callable[[Record], Example]
    may_have: tuple[str, ...] = ()
    learned: str = ANSWER  # the part that fine-tuning learns, for the row
    sample: str = ""  # in JSON, for messages; "": texts in all columns
    whole: bool = False  # not of records with further columns that belong to a prompt

    def fits(self, record: Record) -> bool:
        """Return whether a record has this shape's columns."""
        if not all(name in record for name in self.needs):
            return False
        return not (self.whole and (_MORE_OF_A_PROMPT - set(self.columns)) & record.keys())

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.needs, *self.may_have)

    @property
    def written(self) -> str:
        """A JSON sample, for messages."""
        texts = ", ".join(f'"{name}": "…"' for name in self.columns)
        return self.sample or f"{{{texts}}}"


def _texts(prompt: str, answer: str, *about: str) -> Callable[[Record], Example]:
    """Read a prompt, texts ``about`` it and an answer; all but the prompt may be empty."""

    def read(record: Record) -> Example:
        more = (_text(record, name, empty=True) for name in about)
        content = "\n\n".join([_text(record, prompt), *(text for text in more if text.strip())])
        return Example(content=content, summary=_text(record, answer, empty=True))

    return read


def _with_system(record: Record) -> Example:
    system = _text(record, "system_prompt", empty=True)
    return Example(
        content=_text(record, "question"),
        summary=_text(record, "response", empty=True),
        earlier=(Turn(role="system", text=system),) if system.strip() else (),
    )


def _squad(record: Record) -> Example:
    answers = record.get("answers")
    texts = answers.get("text") if isinstance(answers, Mapping) else None
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise Unusable('"answers" has no list of texts')
    question = f"{_text(record, 'context')}\n\n{_text(record, 'question')}"
    return Example(content=question, summary=texts[0] if texts else "")


def _chat(*columns: str) -> Callable[[Record], Example]:
    """Read a conversation: the last answer is learned, all before it is the prompt. Neighbouring
    turns of one role are joined, since chat templates want them to alternate."""

    def read(record: Record) -> Example:
        turns = [turn for name in columns if record.get(name) for turn in _turns(record, name)]
        if not turns:
            raise Unusable(f'"{columns[0]}" is no list of turns')
        count, turns = len(turns), _joined(turns)
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        summary = turns[answers[-1]].text if answers else ""
        before = turns[: answers[-1]] if answers else turns
        if not before or before[-1].role not in ("user", "tool"):
            raise Unusable("no turn of the user stands before the last answer")
        joined = len(turns) < count
        if before[-1].role == "tool":
            return Example(content="", summary=summary, earlier=tuple(before), joined=joined)
        asked = before.pop().text
        return Example(content=asked, summary=summary, earlier=tuple(before), joined=joined)

    return read


def _joined(turns: Sequence[Turn]) -> list[Turn]:
    """Turns with neighbours of one role as one, but for calls of tools and what they gave."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last is None or last.role != turn.role or turn.role == "tool" or last.tool_calls:
            joined.append(turn)
        else:
            text = (
                f"{last.text}\n\n{turn.text}" if last.text and turn.text else last.text + turn.text
            )
            joined[-1] = replace(turn, text=text)
    return joined


def _prompt(record: Record) -> Example:
    several = isinstance(record.get("prompt"), list)
    read = _chat if several else _texts
    return read("prompt", "completion")(record)


_LAST = "the last answer of each conversation"

#: The first match by columns is an example's shape.
SHAPES = (
    # AdvertiseGen's
    Shape(needs=("content",), may_have=("summary",), read=_texts("content", "summary")),
    Shape(  # CNN/DailyMail's
        needs=("article",),
        may_have=("highlights",),
        learned="the highlights",
        read=_texts("article", "highlights"),
    ),
    *(  # Alpaca's, whose second text is ``input``, and Dolly's, whose is ``context``; some mix them
        Shape(
            needs=("instruction", answer),
            may_have=about,
            read=_texts("instruction", answer, *about),
        )
        for answer, about in (("output", ("input", "context")), ("response", ("context", "input")))
    ),
    # OpenOrca's
    Shape(needs=("question", "response", "system_prompt"), read=_with_system),
    Shape(  # SQuAD's
        needs=("context", "question", "answers"),
        learned="the first answer",
        sample='{"context": "…", "question": "…", "answers": {"text": ["…"]}}',
        read=_squad,
    ),
    *(
        Shape(needs=(prompt, answer), learned=learned, read=_texts(prompt, answer), whole=True)
        for prompt, answer, learned in (
            ("question", "answer", ANSWER),  # GSM8K's
            ("problem", "solution", ANSWER),  # MATH's
            ("query", "response", ANSWER),  # MetaMath's
            ("inputs", "targets", ANSWER),  # Aya's and FLAN's
            ("document", "summary", "the summary"),  # XSum's
            ("dialogue", "summary", "the summary"),  # SAMSum's
        )
    ),
    Shape(  # a chat: turns with ``role`` and ``content``
        needs=("messages",),
        learned=_LAST,
        sample='{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}]}',
        read=_chat("messages"),
    ),
    Shape(  # ShareGPT's: turns with ``from`` and ``value``
        needs=("conversations",),
        learned=_LAST,
        sample='{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}]}',
        read=_chat("conversations"),
    ),
    # Two texts, or two lists of turns.
    Shape(needs=("prompt",), may_have=("completion",), read=_prompt),
    Shape(
        needs=("text",),
        learned=WHOLE_TEXT,
        read=lambda record: Example(content=_text(record, "text")),
    ),
)


@dataclass(frozen=True, slots=True)
class Columns:
    """A shape, and its columns' names in one dataset."""

    shape: Shape
    names: Mapping[str, str] = field(default_factory=dict)  # from the shape's to the dataset's
    unnamed: str = ""  # ``columns:`` that would name a likely answer, which is not read

    def example(self, record: object, where: str) -> Example:
        """Parse a record; raises BadExample, whose message begins with ``where``."""
        if not isinstance(record, Mapping):
            raise BadExample(f"{where}: {_kind(record)}; {_expected()}")
        if self.names:
            columns = (*self.shape.columns, "synthetic")
            record = {name: record.get(self.names.get(name, name)) for name in columns}
        try:
            example = self.shape.read(record)
            try:
                text_of(example).encode()
            except UnicodeEncodeError:
                raise Unusable("half a character (a lone surrogate) in its text") from None
        except Unusable as error:
            text = f"{error}; expected {self.shape.written}"
            renamed = re.sub(r'"(\w+)"', lambda m: f'"{self.names.get(m[1], m[1])}"', text)
            unusable = Unusable(error.kind)
            unusable.args = (f"{where}: {renamed}",)
            raise unusable from None
        synthetic = record.get("synthetic") is True
        return replace(example, synthetic=True) if synthetic else example


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
    fitting = [
        shape
        for shape in SHAPES
        if set(names) <= set(shape.columns) and set(shape.needs) & set(names)
    ]

    def foreign(shape: Shape) -> int:
        """Alpaca's and Dolly's have each other's second text, too, after their own."""
        return len(set(names) - {*shape.needs, *shape.may_have[:1]})

    if fitting:
        return Columns(min(fitting, key=foreign), names)
    raise BadConfiguration(f"columns: {', '.join(names)} belong to no one shape; {_expected()}")


def columns_of(record: object, where: str) -> Columns:
    """Infer a dataset's shape from its first record; raises BadExample if unknown."""
    if not isinstance(record, Mapping):
        raise BadExample(f"{where}: {_kind(record)}; {_expected()}")
    for shape in SHAPES:
        if shape.fits(record):
            if shape.learned != _LAST and (of_a_message := sorted(_OF_A_MESSAGE & record.keys())):
                raise BadExample(
                    f"{where}: one message of a conversation ({', '.join(of_a_message)}), not an "
                    'example; write a conversation a record, {"messages": [{"role": …, "content": '
                    f"…}}, …]}}, or name the texts to read alone, columns: text={shape.needs[0]}"
                )
            answered = len(shape.needs) > 1 or any(name in record for name in shape.may_have)
            likely = () if answered or shape.learned == _LAST else LIKELY_ANSWERS
            answer = next((name for name in likely if name in record), "")
            pair = f"prompt={shape.needs[0]}, completion={answer}"
            return Columns(shape, unnamed=pair if answer else "")
    names = ", ".join(map(str, record)) or "nothing"
    texts = [str(name) for name, value in record.items() if isinstance(value, str)]
    question, answer = texts[:2] if len(texts) > 1 else ("question", "reply")
    answers = [name for name in texts if name in LIKELY_ANSWERS]
    if answers and len(texts) > 1:
        answer = answers[0]
        question = next(name for name in texts if name != answer)
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
    if isinstance(value, float) and math.isnan(value):
        value = None  # pandas writes NaN for a text that is missing
    if value is None and empty:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and (empty or value.strip()):
        return value
    if value is None or isinstance(value, (str, list, Mapping)):
        raise Unusable(f'no text under "{name}"')
    raise Unusable(f'"{name}" is {_kind(value)}, no text')


def _turns(record: Record, name: str) -> Iterator[Turn]:
    entries = record[name]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise Unusable(f'"{name}" is no list of turns')
    for number, entry in enumerate(entries, 1):
        turn = f'turn {number} of "{name}"'
        if not isinstance(entry, Mapping):
            raise Unusable(f"{turn} is {_kind(entry)}")
        role = _ROLES.get(
            str(entry.get("role") or entry.get("from") or entry.get("speaker")).lower()
        )
        text = next((entry[key] for key in ("content", "value", "text") if key in entry), None)
        calls = entry.get("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            calls = ()
        tool_calls = tuple(calls)
        if role is None:
            raise Unusable(
                f"{turn} has none of the roles {', '.join(dict.fromkeys(_ROLES.values()))}"
            )
        if text is None and tool_calls and role == "assistant":
            text = ""
        if isinstance(text, list):
            text = _text_of_parts(text, turn)
        if not isinstance(text, str):
            raise Unusable(f"{turn} has no text")
        yield Turn(role=role, text=text, tool_calls=tool_calls)


def _text_of_parts(parts: Sequence[Any], turn: str) -> str:
    """The texts of content parts, as newer chat interfaces write them."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        text = part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else _kind(part)
        if not isinstance(text, str) or kind not in ("text", "input_text", "output_text"):
            raise Unusable(f"{turn} has a part that is no text ({kind!s:.40})")
        texts.append(text)
    return "\n".join(texts)
