"""A model as a stack of blocks, and that as Unicode lines for a terminal.

Data flows downwards. Inside the frame is one decoder layer, repeated; the line at its left is the
residual stream, which each half of the layer reads through a norm and adds to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workloads.models.description import Architecture, Description, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One box: what it is, what is worth saying of it, how many parameters it has."""

    title: str
    lines: tuple[str, ...]
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Blocks from top to bottom; ``branches`` are the halves of one layer."""

    above: tuple[Block, ...]
    branches: tuple[tuple[Block, ...], ...]
    residual: bool  # whether each branch is added to the stream around it
    layers: int
    layer_parameters: int
    below: tuple[Block, ...]


def picture_of(description: Description) -> Picture:
    """Arrange a description's parts."""
    a, tensors = description.architecture, description.tensors
    inside = [tensor for tensor in tensors if ".*." in tensor.name]
    outside = [tensor for tensor in tensors if ".*." not in tensor.name]
    attention = _sum(t for t in inside if _part(t) == "attention") // max(a.layers, 1)
    mlp = _sum(t for t in inside if _part(t) == "mlp") // max(a.layers, 1)
    norms = _sum(t for t in inside if _part(t) == "norm") // max(a.layers, 1)
    half = Block(title=a.norm, lines=_norm_lines(a), parameters=norms // 2)
    head = 0 if a.tied else _sum(t for t in outside if t.name == "lm_head.weight")
    final = _sum(t for t in outside if _part(t) == "norm")
    table = _sum(outside) - head - final
    return Picture(
        above=(
            Block(title="Embedding", lines=(f"{a.vocabulary:,} × {a.hidden:,}",), parameters=table),
        ),
        branches=(
            (half, Block(title="Attention", lines=_attention_lines(a), parameters=attention)),
            (half, Block(title="MLP", lines=_mlp_lines(a), parameters=mlp)),
        ),
        residual=_is_plain_pre_norm(inside),
        layers=a.layers,
        layer_parameters=attention + mlp + norms,
        below=(
            Block(title=a.norm, lines=_norm_lines(a), parameters=final),
            Block(
                title="Output layer",
                lines=(
                    f"{a.hidden:,} → {a.vocabulary:,}",
                    *(("shares the embedding's weights",) if a.tied else ()),
                ),
                parameters=head,
            ),
        ),
    )


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.parameters for tensor in tensors)


def _part(tensor: Tensor) -> str:
    names = tensor.name.split(".")
    if any("norm" in name or name.startswith("ln_") for name in names):
        return "norm"
    return "attention" if any("attn" in n or "attention" in n for n in names) else "mlp"


def _is_plain_pre_norm(inside: list[Tensor]) -> bool:
    """One norm before attention and one before the MLP, and no other."""
    norms = {t.name.split(".*.")[1].split(".")[0] for t in inside if _part(t) == "norm"}
    return norms in ({"input_layernorm", "post_attention_layernorm"}, {"ln_1", "ln_2"})


def _norm_lines(a: Architecture) -> tuple[str, ...]:
    return (f"epsilon {a.epsilon:.3g}",) if a.epsilon else ()


def _attention_lines(a: Architecture) -> tuple[str, ...]:
    if a.kv_heads == a.heads:
        heads = f"{a.heads} heads of {a.head_dim}"
    else:
        heads = f"{a.heads} query heads share {a.kv_heads} key/value heads of {a.head_dim}"
    rotary = f"rotary positions on {a.rotary_dim} of {a.head_dim} channels"
    return (
        heads,
        rotary if a.rotary_dim else "learned positions",
        "bias on queries, keys, values" if a.qkv_bias else "no bias",
    )


def _mlp_lines(a: Architecture) -> tuple[str, ...]:
    form = f"{a.activation}(gate) × up" if a.gated else a.activation
    return (f"{a.hidden:,} → {a.intermediate:,} → {a.hidden:,}, {form}",)


def short(count: int) -> str:
    """1234567 -> '1.23 M'."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


# -- terminal -------------------------------------------------------------------------------------

_WIDTH = 74  # inside the frame
_STREAM = "  │"  # the residual stream, down the left


def draw_text(picture: Picture) -> list[str]:
    """The picture as lines for a terminal."""
    lines = ["  token ids", _STREAM]
    for block in picture.above:
        lines += [*_box(block), _STREAM]
    title = f"═╪═ decoder layer × {picture.layers} ═ {short(picture.layer_parameters)} each "
    lines.append(f"╔{title:═<{_WIDTH}}╗")
    for branch in picture.branches:
        if picture.residual:
            lines.append(_framed("├─────┐"))
        for number, block in enumerate(branch):
            pipe = "     │" if picture.residual and number else ""
            if pipe:
                lines.append(_framed(f"│{pipe}"))
            first, *rest = block.lines or ("",)
            lines.append(_framed(f"│     {block.title:<10}{first}", short(block.parameters)))
            lines += [_framed(f"│     {'':<10}{line}") for line in rest]
        if picture.residual:
            lines.append(_framed("⊕◄────┘"))
    lines.append(f"╚{'═╪':═<{_WIDTH}}╝")
    for block in picture.below:
        lines += [_STREAM, *_box(block)]
    return [*lines, _STREAM, "  logits"]


def _framed(text: str, right: str = "", edge: str = "║") -> str:
    return f"{edge} {text:<{_WIDTH - 10}}{right:>8} {edge}"


def _box(block: Block) -> list[str]:
    text = f"{block.title:<16}{'; '.join(block.lines)}"
    right = short(block.parameters) if block.parameters else ""
    return [f"┌{'─' * _WIDTH}┐", _framed(text, right, "│"), f"└{'─' * _WIDTH}┘"]
