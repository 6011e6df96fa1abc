"""A model as a stack of blocks: as Unicode lines, as an SVG, or as marks for a slide.

Data flows downwards. The frame is one decoder layer, repeated; the line at its left is the residual
stream, which each half of the layer reads through a norm and adds to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

from workloads.models.describe import Architecture, Description, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One box: title, details, number of parameters."""

    title: str
    lines: tuple[str, ...]
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Blocks from top to bottom; ``branches`` are the halves of one layer."""

    above: tuple[Block, ...]
    branches: tuple[tuple[Block, ...], ...]
    residual: bool  # each branch is added to the residual stream
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
    """Tell if there is one norm before attention and one before the MLP, and no other."""
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
    """Abbreviate a count: 1234567 -> '1.23 M'."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


# -- terminal -------------------------------------------------------------------------------------

_WIDTH = 74  # inside the frame
_STREAM = "  │"  # the residual stream, down the left


def draw_text(picture: Picture) -> list[str]:
    """Return the picture as lines for a terminal."""
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


# Drawing for SVG files and slides: marks in pixels, origin at the top left.

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; ``at`` is on its baseline, at the end given by ``align``."""

    at: Point
    text: str
    align: Literal["left", "middle", "right"] = "left"
    bold: bool = False
    pale: bool = False
    size: float = 13


@dataclass(frozen=True, slots=True)
class Box:
    """A rounded rectangle, from its top left corner; without colour dashed and empty."""

    at: Point
    size: Point
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A polyline with an arrowhead at its end."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Plus:
    """A circle with a plus, centred at ``at``."""

    at: Point
    radius: float


Mark = Text | Box | Arrow | Plus

_COLOURS = {
    "Embedding": "#d7e8fb",
    "Attention": "#fde3c8",
    "MLP": "#d9f0d3",
    "Output layer": "#e6dcf5",
}
_PLAIN = "#eceff1"
_LEFT, _BOX_WIDTH, _LINE = 90.0, 460.0, 18.0
_MIDDLE, _RIGHT = _LEFT + _BOX_WIDTH / 2, _LEFT + _BOX_WIDTH
_RESIDUAL = 56.0  # x of the line around a branch
WIDTH = _BOX_WIDTH + 160


def draw(picture: Picture, title: str) -> tuple[list[Mark], float]:
    """Return the marks of a picture that is ``WIDTH`` wide, and its height."""
    marks: list[Mark] = [
        Text((20, 24), title, bold=True, size=16),
        Text((_MIDDLE, 54), "token ids", align="middle"),
    ]
    y = 60.0
    for block in picture.above:
        y = _block(marks, y, block)
    marks.append(_down(y))
    top = y = y + 22
    caption = f"decoder layer × {picture.layers}: {picture.layer_parameters:,} parameters each"
    y += 30
    marks.append(Text((_RIGHT + 20, y - 8), caption, align="right", bold=True))
    for branch in picture.branches:
        begin = y
        for block in branch:
            y = _block(marks, y, block, 26)
        if picture.residual:
            marks.append(_down(y, 20))
            y += 29
            around = ((_MIDDLE, begin + 6), (_RESIDUAL, begin + 6), (_RESIDUAL, y))
            marks += [Arrow((*around, (_MIDDLE - 10, y))), Plus((_MIDDLE, y), 9)]
            y += 9
    y += 12
    marks.append(Box((30, top), (_BOX_WIDTH + 100, y - top)))
    for block in picture.below:
        y = _block(marks, y, block)
    marks += [_down(y), Text((_MIDDLE, y + 38), "logits", align="middle")]
    return marks, y + 58


def _down(y: float, length: float = 22) -> Arrow:
    return Arrow(((_MIDDLE, y), (_MIDDLE, y + length)))


def _block(marks: list[Mark], y: float, block: Block, length: float = 22) -> float:
    """Draw an arrow of this length and a block below it; return the block's lower edge."""
    marks.append(_down(y, length))
    y += length
    height = 16 + _LINE * (1 + len(block.lines))
    marks.append(Box((_LEFT, y), (_BOX_WIDTH, height), _COLOURS.get(block.title, _PLAIN)))
    marks.append(Text((_LEFT + 14, y + 22), block.title, bold=True))
    if block.parameters:
        marks.append(Text((_RIGHT - 14, y + 22), f"{block.parameters:,}", align="right"))
    for number, line in enumerate(block.lines, start=1):
        marks.append(Text((_LEFT + 14, y + 22 + _LINE * number), line, pale=True))
    return y + height


def draw_svg(picture: Picture, title: str) -> str:
    """Return the picture as a standalone SVG document."""
    marks, height = draw(picture, title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" '
            f'width="{WIDTH:g}" height="{height:g}" font-family="sans-serif" font-size="13" '
            'fill="#212121">',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#607d8b"/></marker>'
            "<style>polyline{fill:none;stroke:#607d8b;stroke-width:1.5}</style></defs>",
            f'<rect width="{WIDTH:g}" height="{height:g}" fill="#ffffff"/>',
            *map(_svg, marks),
            "</svg>",
            "",
        ]
    )


def _svg(mark: Mark) -> str:
    if isinstance(mark, Arrow):
        path = " ".join(f"{x:g},{y:g}" for x, y in mark.points)
        return f'<polyline points="{path}" marker-end="url(#arrow)"/>'
    x, y = mark.at
    if isinstance(mark, Box):
        style = 'rx="10" fill="none" stroke="#37474f" stroke-width="2" stroke-dasharray="6 4"'
        if mark.colour:
            style = f'rx="6" fill="{mark.colour}" stroke="#607d8b"'
        width, height = mark.size
        return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {style}/>'
    if isinstance(mark, Plus):
        circle = f'<circle cx="{x:g}" cy="{y:g}" r="{mark.radius:g}" fill="#fff" stroke="#607d8b"/>'
        return circle + _svg(Text((x, y + 5), "+", align="middle"))
    anchor = {"left": "", "middle": ' text-anchor="middle"', "right": ' text-anchor="end"'}
    style = anchor[mark.align] + (' font-weight="600"' if mark.bold else "")
    style += ' fill="#455a64"' if mark.pale else ""
    style += f' font-size="{mark.size:g}"' if mark.size != 13 else ""
    return f'<text x="{x:g}" y="{y:g}"{style}>{escape(mark.text)}</text>'
