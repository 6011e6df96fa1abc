"""Tokenizer files and chat templates, looked at without the libraries that load them.

A tokenizer's largest id is held against the embedding, its normalizer against what it makes of a
text. Templates are rendered as transformers renders them, in Jinja's sandbox, with one user's turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from workloads.inspection.checkpoints import FETCH, Objection, UnusableFile, read_object
from workloads.inspection.configuration import broken, id_objections, positive, shown
from workloads.inspection.process import stage
from workloads.util import files

#: Limits: ten times those of the largest models.
_TEMPLATE_BYTES, _MOST_ADDED, _MOST_GROWTH, _MOST_OUTPUT = files.MIB, 200_000, 64, 4 * files.MIB
_MODELS = ("BPE", "WordPiece", "Unigram", "WordLevel")
#: The date that templates are given, in place of the day on which a job happens to run: that of
#: Llama 3's own template where it is told none.
TEMPLATE_DATE = (2024, 7, 26)
_LENGTH = (("model_max_length", positive, "above 0"),)
_JSON = (b"{", b"\xef\xbb\xbf", b"\n", b" ")
#: Tokenizer file -> first bytes that it may have; empty: any.
_BEGINNINGS: dict[str, tuple[bytes, ...]] = {
    **dict.fromkeys(("tokenizer.json", "vocab.json", "tekken.json"), _JSON),
    **dict.fromkeys(("spiece.model", "spm.model", "sentencepiece.model"), (b"\x0a",)),
    **dict.fromkeys(("sentencepiece.bpe.model", "source.spm", "target.spm"), (b"\x0a",)),
    **dict.fromkeys(("tokenizer.model", "tokenizer.model.v3", "vocab.txt", "merges.txt"), ()),
    **dict.fromkeys(("tiktoken.model", "qwen.tiktoken"), ()),
}


def has_tokenizer(directory: Path) -> bool:
    """Tell if a model's directory has any tokenizer file."""
    return any((directory / name).is_file() for name in _BEGINNINGS if name != "merges.txt")


def fast_tokenizer(directory: Path) -> Any:
    """Load a directory's tokenizer.json without transformers; None if there is none, or no such.

    The file may tell to cut and pad texts, as its last user did; jobs and this one do neither.
    """
    try:
        from tokenizers import Tokenizer  # a workstation that only plans and submits lacks it

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # the library raises no other class
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def objections(directory: Path, rows: int | None) -> Iterator[Objection]:
    """Objections to tokenizer files; ``rows`` is the embedding's number of rows, if known."""
    unusable = [one for name in _BEGINNINGS for one in _beginning(directory / name)]
    yield from unusable
    for read in (_vocabulary, _settings):
        try:
            yield from read(directory, rows)
        except UnusableFile as error:
            if error.objection.file not in [one.file for one in unusable]:
                yield error.objection


def _beginning(file: Path) -> Iterator[Objection]:
    if not file.is_file():
        return
    stage(str(file))
    with files.opened(file) as content:
        beginning = content.read(64)
    if kind := files.other_kind(beginning):
        yield Objection(file.name, f"it is {kind}", FETCH)
    elif not beginning.strip(b"\0\r\n\t "):
        yield Objection(file.name, "it is empty", FETCH)
    elif not beginning.startswith(_BEGINNINGS[file.name] or b""):
        yield Objection(file.name, "it is not what its name says", FETCH)


def _vocabulary(directory: Path, rows: int | None) -> Iterator[Objection]:
    """Objections to tokenizer.json, else to vocab.json and added_tokens.json."""
    name = "tokenizer.json"
    whole = read_object(directory / name)
    if whole is None:
        vocabulary = read_object(directory / "vocab.json") or {}
        added = read_object(directory / "added_tokens.json") or {}
        yield from _ids("vocab.json", vocabulary, rows, added)
        return
    model = whole.get("model")
    tokens = whole.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        yield Objection(name, "it has no model with a vocabulary", FETCH)
    elif not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        yield Objection(name, "its added_tokens are no list of tokens", FETCH)
    else:
        if model.get("type", "BPE") not in _MODELS:
            yield Objection(name, f"its model is of the unknown type {shown(model['type'])}", FETCH)
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):  # Unigram's [token, score] by number
            last = len(vocabulary) - 1
            vocabulary = {f"number {last}": last} if vocabulary else {}
        numbers = {str(token.get("content")): token.get("id") for token in tokens}
        yield from _ids(name, vocabulary, rows, numbers)
        if (growth := _growth(whole.get("normalizer"))) > _MOST_GROWTH:
            yield Objection(name, f"its normalizer makes texts {growth:,.0f} times as long")


def _ids(
    name: str, vocabulary: Mapping[str, Any], rows: int | None, added: Mapping[str, Any]
) -> Iterator[Objection]:
    """Objections to the numbers of tokens, and to more ``added`` ones than load in a minute."""
    if len(added) > _MOST_ADDED:
        yield Objection(name, f"it adds {len(added):,} tokens, which take hours to load")
    vocabulary = {**vocabulary, **added}
    odd = [token for token, number in vocabulary.items() if type(number) is not int or number < 0]
    beyond = {} if odd or rows is None else {t: n for t, n in vocabulary.items() if n >= rows}
    if odd:
        yield Objection(name, f"the token {odd[0]!r:.60} has no number", FETCH)
    elif beyond:
        token = max(beyond, key=lambda one: beyond[one])
        yield Objection(
            name,
            f"{len(beyond):,} tokens have no row in the embedding: {token!r:.60} is number "
            f"{beyond[token]:,}, and vocab_size is {rows:,}",
            "take the tokenizer of this very model, or resize the model's embedding",
        )


def _growth(part: Any, depth: int = 0) -> float:
    """Return how many times as long a normalizer may make a text."""
    if depth > 20:
        return float("inf")
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Sequence":
        growth = 1.0
        for inner in part.get("normalizers") or ():
            growth *= _growth(inner, depth + 1)
        return growth
    pattern = part.get("pattern")
    old = next(iter(pattern.values()), "") if isinstance(pattern, dict) and pattern else ""
    new = str(part.get("content") or part.get("prepend") or "")
    return max(len(new.encode()) / max(len(str(old).encode()), 1), 1.0)


def _settings(directory: Path, rows: int | None) -> Iterator[Objection]:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = read_object(directory / name) or {}
        yield from id_objections(name, values, None)
        added = values.get("added_tokens_decoder") or {}
        if not isinstance(added, dict):
            yield Objection(name, "its added_tokens_decoder is not an object", "take it out")
        else:
            numbers = {key: int(key) if re.fullmatch(r"\d{1,9}", key) else None for key in added}
            yield from _ids(name, {}, rows, numbers)
        for reason in broken(values, _LENGTH):
            yield Objection(name, reason, "correct it")


# ---------------------------------------------------------------- chat templates


def chat_template(directory: Path) -> tuple[Path, str]:
    """Return the file of a model's chat template, and the template; "" if it has none. Raises
    UnusableFile if it is no text, or larger than a template is."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        stage(str(file))
        try:
            return file, files.read_bytes(file, limit_bytes=_TEMPLATE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableFile(file, f"it cannot be read: {error}"[:200], FETCH) from error
    for file in (directory / "tokenizer_config.json", directory / "chat_template.json"):
        template = (read_object(file) or {}).get("chat_template")
        if isinstance(template, list):  # several by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            if "default" not in named:
                reason = "none of its chat templates is named default"
                raise UnusableFile(file, reason, "name one so")
            template = named["default"]
        if template is None:
            continue
        if not isinstance(template, str) or len(template) > _TEMPLATE_BYTES:
            raise UnusableFile(file, "its chat_template is not a text, or too long", "correct it")
        return file, template
    return file, ""


def template_objections(directory: Path) -> Iterator[Objection]:
    """Objections to a model's chat template: it does not render a user's turn."""
    try:
        file, template = chat_template(directory)
        tokens = special_tokens(directory)
    except UnusableFile as error:
        yield error.objection
        return
    asked = "What is a card?"
    stage(f"the chat template in {file}")
    try:
        text = compiled(template)([{"role": "user", "content": asked}], tokens)
    except MemoryError:
        raise
    except Exception as error:  # templates raise anything
        why = f"{type(error).__name__}: {error}"
        yield Objection(
            file.name,
            f"the chat template does not render a user's turn: {why:.200}",
            "correct the template, or take the model's own of its repository",
        )
    else:
        if template and asked not in text:
            reason = "the chat template leaves out what a user writes"
            yield Objection(file.name, reason, "correct it")


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens that templates may name; raises UnusableFile."""
    settings = read_object(directory / "tokenizer_config.json") or {}
    tokens = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def fixed_date(form: str) -> str:
    """Return ``TEMPLATE_DATE`` in a format: one prompt every night."""
    return datetime(*TEMPLATE_DATE).strftime(form)


@lru_cache(maxsize=16)
def compiled(template: str) -> Callable[..., str]:
    """Return a function from turns and special tokens to text, up to where an answer begins unless
    ``answers=False``, with transformers' filters and a limit of output."""
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
    environment.filters["random"] = lambda _: refuse("random: its prompts differ every night")
    environment.globals |= {"raise_exception": refuse, "strftime_now": fixed_date}
    program = environment.from_string(template)
    always = {"tools": None, "documents": None}

    def render(
        turns: Sequence[Mapping[str, Any]], tokens: Mapping[str, Any], *, answers: bool = True
    ) -> str:
        pieces, size = [], 0
        given = {"messages": turns, "add_generation_prompt": answers}
        for piece in program.generate({**always, **tokens, **given}):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_OUTPUT:
                raise ValueError(f"it writes more than {_MOST_OUTPUT:,} characters")
        return "".join(pieces)

    return render
