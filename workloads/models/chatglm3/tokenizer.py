"""A fast tokenizer with ChatGLM3's ids, from its SentencePiece pieces.

ChatGLM3's tokenizer class no longer loads, and transformers silently gives other ids for the raw
``tokenizer.model``. So the pieces are written as a ``tokenizer.json``: byte-pair encoding that, as
in SentencePiece, merges neighbours whose concatenation is a piece, best score first. Spaces become
"▁", one is prepended, and uncovered characters fall back to UTF-8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workloads.base import BadConfiguration, DataMissing
from workloads.models.chatglm3.layout import BEGIN, CHAT_TEMPLATE, END, SPECIAL_TOKENS, UNKNOWN
from workloads.models.embedded import tokenizer_settings, write_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Value in tokenizer_config.json, read by ``prompts.py``.
PROMPT_LAYOUT = "chatglm3"

#: Limits: ten times what tokenizers of SentencePiece have; merges are all splits of all pieces.
_MOST_PIECES, _LONGEST_PIECE = 1_000_000, 1_000
#: Encoded both ways after a conversion, to detect tokenizers of another kind.
_PROBES = (
    "你好",
    "类型#裙*版型#显瘦*材质#棉\n",
    "  two  spaces, then\ttab and\r\nlines  ",
    "Hello world 123 ½ é ß naïve",
    "ñandú \u3000 full-width ＡＢＣ １２３ ㎡ ﬁ",
    "emoji 🙂👩‍👩‍👧 and rare 𠮷 龘",
    "",
    " ",
    "<|user|> [gMASK] sop eop </s> <0x0A> <unk> ▁",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One SentencePiece piece; its id is its position in the list."""

    text: str
    score: float
    kind: Literal["normal", "unknown", "control", "byte"]


def read_pieces(model_file: Path) -> list[Piece]:
    """Return the pieces of a ``tokenizer.model``. Raises DataMissing if it is no SentencePiece
    model (a Git LFS pointer), BadConfiguration if its first ids are not ChatGLM3's."""
    processor = _processor(model_file)
    if processor.get_piece_size() > _MOST_PIECES:
        raise BadConfiguration(f"{model_file} has more than {_MOST_PIECES:,} pieces")
    pieces = []
    for index in range(processor.get_piece_size()):
        kind: Literal["normal", "unknown", "control", "byte"] = "normal"
        if processor.is_unknown(index):
            kind = "unknown"
        elif processor.is_control(index):
            kind = "control"
        elif processor.is_byte(index):
            kind = "byte"
        text, score = processor.id_to_piece(index), processor.get_score(index)
        pieces.append(Piece(text=text, score=score, kind=kind))
    if longest := next((p.text for p in pieces if len(p.text) > _LONGEST_PIECE), None):
        raise BadConfiguration(f"{model_file} has a piece of {len(longest):,} characters")
    first = tuple(piece.text for piece in pieces[:3])
    if first != (UNKNOWN, BEGIN, END) or sum(p.kind == "byte" for p in pieces) != 256:
        raise BadConfiguration(
            f"{model_file} starts with {', '.join(first)} and has "
            f"{sum(p.kind == 'byte' for p in pieces)} byte pieces; ChatGLM3's starts with "
            f"{UNKNOWN}, {BEGIN}, {END} and has 256"
        )
    return pieces


def build_tokenizer(pieces: Sequence[Piece]) -> Tokenizer:
    """Return a ``tokenizers.Tokenizer`` of the pieces and ChatGLM3's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces),
            unk_token=UNKNOWN,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = (UNKNOWN, BEGIN, END, *SPECIAL_TOKENS)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    prefix = [(token, tokenizer.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B:1", special_tokens=prefix
    )
    return tokenizer


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return all splits of a normal piece into two normal pieces, best score of the whole first."""
    normal = {piece.text for piece in pieces if piece.kind == "normal"}
    ranked = sorted(
        (-piece.score, index, piece.text)
        for index, piece in enumerate(pieces)
        if piece.kind == "normal" and len(piece.text) > 1
    )
    return [
        (text[:cut], text[cut:])
        for _, _, text in ranked
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]


def write_tokenizer(directory: Path, pieces: Sequence[Piece], max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``directory``."""
    build_tokenizer(pieces).save(str(directory / "tokenizer.json"))
    config = tokenizer_settings(
        max_length,
        bos_token=BEGIN,
        eos_token=END,
        unk_token=UNKNOWN,
        pad_token=UNKNOWN,
        padding_side="left",
        prompt_layout=PROMPT_LAYOUT,
        chat_template=CHAT_TEMPLATE,
    )
    write_files(directory, {"tokenizer_config.json": config})


def check_against_sentencepiece(tokenizer: Tokenizer, model_file: Path) -> None:
    """Raise BadConfiguration if ids of a few awkward strings differ from SentencePiece's."""
    processor = _processor(model_file)
    tokenizer.encode_special_tokens = True  # spelled-out special tokens stay text
    try:
        for probe in _PROBES:
            ours = tokenizer.encode(probe, add_special_tokens=False).ids
            theirs = processor.encode(probe)
            if ours != theirs:
                raise BadConfiguration(
                    f"{model_file}: the fast tokenizer gives {ours} for {probe!r} where "
                    f"SentencePiece gives {theirs}; the model is not of ChatGLM3's kind "
                    "(BPE, identity normaliser, dummy prefix, byte fallback)"
                )
    finally:
        tokenizer.encode_special_tokens = False


def _processor(model_file: Path) -> Any:
    import sentencepiece

    if not model_file.is_file():
        raise DataMissing(f"there is no {model_file}")
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    except (RuntimeError, OSError) as error:
        size = model_file.stat().st_size
        raise DataMissing(
            f"{model_file} ({size} bytes) is not a SentencePiece model; a download with Git LFS "
            "leaves a small text file in its place until `git lfs pull`"
        ) from error
