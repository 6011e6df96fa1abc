"""Tokenizer files and chat templates, looked at without the libraries that load them.

A tokenizer's largest id is held against the embedding, its normalizer against what it makes of a
text. Templates are rendered as transformers renders them, in Jinja's sandbox, with one user's turn.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workloads.inspection.configuration import Objection, id_objections
from workloads.inspection.process import stage
from workloads.util import files

#: Limits: ten times those of the largest models.
_JSON_BYTES, _TEMPLATE_BYTES = 256 * files.MIB, files.MIB
_MOST_ADDED, _MOST_GROWTH, _MOST_OUTPUT = 200_000, 64, 4 * files.MIB
_MODELS = ("BPE", "WordPiece", "Unigram", "WordLevel")
#: The date that templates are given, in place of the day on which a job happens to run: that of
#: Llama 3's own template where it is told none.
TEMPLATE_DATE = (2024, 7, 26)
#: Tokenizer file -> first bytes that it may have; empty: any.
VOCABULARIES: dict[str, tuple[bytes, ...]] = {
    "tokenizer.json": (b"{", b"\xef\xbb\xbf", b"\n", b" "),
    "tokenizer.model": (),  # SentencePiece, or tiktoken's lines
    "tokenizer.model.v3": (),
    "vocab.json": (b"{", b"\xef\xbb\xbf", b"\n", b" "),
    "vocab.txt": (),
    "merges.txt": (),
    "spiece.model": (b"\x0a",),
    "spm.model": (b"\x0a",),
    "sentencepiece.bpe.model": (b"\x0a",),
    "sentencepiece.model": (b"\x0a",),
    "source.spm": (b"\x0a",),
    "target.spm": (b"\x0a",),
    "tekken.json": (b"{", b"\n", b" "),
    "tiktoken.model": (),
    "qwen.tiktoken": (),
}
_FETCH = "fetch it again (with Git LFS: git lfs pull)"


def read_object(directory: Path, name: str, limit_bytes: int = _JSON_BYTES) -> Any:
    """Return a file's JSON object, None if there is none; raises Unusable."""
    file = directory / name
    if not file.is_file():
        return None
    stage(str(file))
    try:
        data = files.read_bytes(file, limit_bytes=limit_bytes)
        if data.startswith(codecs.BOM_UTF8):
            hint = "save it without one"
            raise Unusable(name, "it begins with a byte order mark, which libraries refuse", hint)
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        size = f"{file.stat().st_size:,} bytes"
        raise Unusable(name, f"it cannot be read as JSON ({size}): {text:.200}", _FETCH) from error
    if not isinstance(value, dict):
        raise Unusable(name, f"it holds a {type(value).__name__}, not an object", _FETCH)
    return value


class Unusable(Exception):
    """A file that cannot be used; the arguments are those of an Objection."""

    def __init__(self, file: str, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.objection = Objection(file, reason, hint)


def objections(directory: Path, rows: int | None) -> Iterator[Objection]:
    """Objections to tokenizer files; ``rows`` is the embedding's number of rows, if known."""
    unusable = {one.file: one for name in VOCABULARIES for one in _begin(directory, name)}
    yield from unusable.values()
    for read in (_vocabulary, _settings):
        try:
            yield from read(directory, rows)
        except Unusable as error:
            if error.objection.file not in unusable:
                yield error.objection


def _begin(directory: Path, name: str) -> Iterator[Objection]:
    """Objections to a file's first bytes."""
    file = directory / name
    if not file.is_file():
        return
    stage(str(file))
    with files.opened(file) as content:
        begin = content.read(64)
    begins = VOCABULARIES[name]
    if begin.startswith(b"version https://git-lfs"):
        yield Objection(name, "it is a Git LFS pointer", "run `git lfs pull` there")
    elif not begin.strip(b"\0\r\n\t "):
        yield Objection(name, "it is empty", _FETCH)
    elif begins and not begin.startswith(begins):
        yield Objection(name, "it is not what its name says", _FETCH)


def _vocabulary(directory: Path, rows: int | None) -> Iterator[Objection]:
    """Objections to tokenizer.json, else to vocab.json and added_tokens.json."""
    name = "tokenizer.json"
    whole = read_object(directory, name)
    if whole is None:
        name = "vocab.json"
        vocabulary = read_object(directory, name) or {}
        added = read_object(directory, "added_tokens.json") or {}
        yield from _ids(name, {**vocabulary, **added}, rows)
        return
    model = whole.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        yield Objection(name, "it has no model with a vocabulary", _FETCH)
        return
    if model.get("type", "BPE") not in _MODELS:
        yield Objection(name, f"its model is of the unknown type {model.get('type')!r:.40}", _FETCH)
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram's [token, score] by number
        vocabulary = {f"number {len(vocabulary) - 1}": len(vocabulary) - 1} if vocabulary else {}
    added = whole.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        yield Objection(name, "its added_tokens are no list of tokens", _FETCH)
        return
    if len(added) > _MOST_ADDED:
        yield Objection(name, f"it adds {len(added):,} tokens, which take hours to load", "")
    numbers = {str(token.get("content")): token.get("id") for token in added}
    yield from _ids(name, {**vocabulary, **numbers}, rows)
    if (growth := _growth(whole.get("normalizer"))) > _MOST_GROWTH:
        yield Objection(name, f"its normalizer makes texts {growth:,.0f} times as long", "")


def _ids(name: str, vocabulary: Mapping[str, Any], rows: int | None) -> Iterator[Objection]:
    odd = [token for token, number in vocabulary.items() if type(number) is not int or number < 0]
    if odd:
        yield Objection(name, f"the token {odd[0]!r:.60} has no number", _FETCH)
    elif vocabulary and rows is not None:
        token, largest = max(vocabulary.items(), key=lambda item: item[1])
        if largest >= rows:
            beyond = sum(number >= rows for number in vocabulary.values())
            yield Objection(
                name,
                f"{beyond:,} tokens have no row in the embedding: {token!r:.60} is number "
                f"{largest:,}, and vocab_size is {rows:,}",
                "take the tokenizer of this very model, or resize the model's embedding",
            )


def _growth(part: Any, depth: int = 0) -> float:
    """Return how many times as long a normalizer may make a text."""
    if not isinstance(part, dict) or depth > 20:
        return 1.0 if depth <= 20 else float("inf")
    if part.get("type") == "Sequence":
        growth = 1.0
        for inner in part.get("normalizers") or ():
            growth *= _growth(inner, depth + 1)
        return growth
    pattern = part.get("pattern")
    old = next(iter(pattern.values()), "") if isinstance(pattern, dict) and pattern else ""
    new = str(part.get("content") or part.get("prepend") or "")
    return max(len(new.encode()) / max(len(str(old).encode()), 1), 1.0) if new else 1.0


def _settings(directory: Path, rows: int | None) -> Iterator[Objection]:
    """Objections to tokenizer_config.json and special_tokens_map.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = read_object(directory, name)
        if values is None:
            continue
        yield from id_objections(name, values, None)
        added = values.get("added_tokens_decoder")
        if added is not None and not isinstance(added, dict):
            yield Objection(name, "its added_tokens_decoder is not an object", "take it out")
        elif added:
            if len(added) > _MOST_ADDED:
                yield Objection(
                    name, f"it adds {len(added):,} tokens, which take hours to load", ""
                )
            numbers = {key: int(key) if re.fullmatch(r"\d{1,9}", key) else None for key in added}
            yield from _ids(name, numbers, rows)
        limit = values.get("model_max_length")
        if limit is not None and (
            not isinstance(limit, int | float) or isinstance(limit, bool) or limit <= 0
        ):
            yield Objection(name, f"model_max_length is {limit!r:.40}, not above 0", "correct it")


# ---------------------------------------------------------------- chat templates


def chat_template(directory: Path) -> tuple[str, str]:
    """Return the file of a model's chat template, and the template; "" if it has none.

    Raises:
        Unusable: it is no text, or larger than a template is.
    """
    for name in ("chat_template.jinja",):
        file = directory / name
        if file.is_file():
            stage(str(file))
            try:
                return name, files.read_bytes(file, limit_bytes=_TEMPLATE_BYTES).decode()
            except (OSError, UnicodeDecodeError) as error:
                raise Unusable(name, f"it cannot be read: {error}"[:200], _FETCH) from error
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = (read_object(directory, name) or {}).get("chat_template")
        if isinstance(template, list):  # several by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            if "default" not in named:
                raise Unusable(name, "none of its chat templates is named default", "name one so")
            template = named["default"]
        if template is None:
            continue
        if not isinstance(template, str) or len(template) > _TEMPLATE_BYTES:
            raise Unusable(name, "its chat_template is not a text, or too long", "correct it")
        return name, template
    return "", ""


def template_objections(directory: Path) -> Iterator[Objection]:
    """Objections to a model's chat template: it does not render a user's turn."""
    try:
        name, template = chat_template(directory)
    except Unusable as error:
        yield error.objection
        return
    if not template:
        return
    try:
        settings = read_object(directory, "tokenizer_config.json") or {}
    except Unusable:
        return  # said already
    stage(f"the chat template in {directory / name}")
    try:
        render = compiled(template)
        turn = {"role": "user", "content": "What is a card?"}
        text = render([turn], special_tokens(settings))
    except MemoryError:
        raise
    except Exception as error:  # templates raise anything
        why = f"{type(error).__name__}: {error}"
        yield Objection(
            name,
            f"the chat template does not render a user's turn: {why:.200}",
            "correct the template, or take the model's own of its repository",
        )
        return
    if "What is a card?" not in text:
        yield Objection(name, "the chat template leaves out what a user writes", "correct it")


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may name."""
    tokens = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def fixed_date(form: str) -> str:
    """Return ``TEMPLATE_DATE`` in a format: one prompt every night."""
    import datetime

    return datetime.datetime(*TEMPLATE_DATE).strftime(form)


def compiled(template: str) -> Callable[[list[dict[str, Any]], Mapping[str, str]], str]:
    """Return a function that renders turns, with transformers' filters and limits of output."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Reads transformers' {% generation %} blocks as their content."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = fixed_date
    program = environment.from_string(template)

    def render(turns: list[dict[str, Any]], tokens: Mapping[str, str]) -> str:
        pieces, size = [], 0
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **tokens}
        for piece in program.generate(messages=turns, **given):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_OUTPUT:
                raise ValueError(f"it writes more than {_MOST_OUTPUT:,} characters")
        return "".join(pieces)

    return render
