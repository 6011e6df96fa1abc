"""A model drawn: the same stack of blocks as Unicode lines for a terminal and as an SVG file.

Data flows downwards. Inside the frame is one decoder layer, repeated; the line at its left is the
residual stream, which each half of the layer reads through a norm and adds to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

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


# -- SVG ------------------------------------------------------------------------------------------

_COLOURS = {
    "Embedding": "#d7e8fb",
    "Attention": "#fde3c8",
    "MLP": "#d9f0d3",
    "Output layer": "#e6dcf5",
}
_PLAIN = "#eceff1"
_LEFT, _BOX_WIDTH, _LINE = 90, 460, 18


class _Svg:
    """Elements drawn so far, and how far down the page they reach."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.y = 24.0

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.elements.append(f'<text x="{x:g}" y="{y:g}"{style}>{escape(text)}</text>')

    def line(self, points: list[tuple[float, float]], arrow: bool = True) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        marker = ' marker-end="url(#arrow)"' if arrow else ""
        self.elements.append(f'<polyline points="{path}"{marker}/>')

    def down(self, length: float = 22) -> None:
        x = _LEFT + _BOX_WIDTH / 2
        self.line([(x, self.y), (x, self.y + length)])
        self.y += length

    def block(self, block: Block) -> None:
        height = 16 + _LINE * (1 + len(block.lines))
        colour = _COLOURS.get(block.title, _PLAIN)
        self.elements.append(
            f'<rect x="{_LEFT}" y="{self.y:g}" width="{_BOX_WIDTH}" height="{height}" rx="6" '
            f'fill="{colour}" stroke="#607d8b"/>'
        )
        self.text(_LEFT + 14, self.y + 22, block.title, ' font-weight="600"')
        if block.parameters:
            right = _LEFT + _BOX_WIDTH - 14
            self.text(right, self.y + 22, f"{block.parameters:,}", ' text-anchor="end"')
        for number, line in enumerate(block.lines, start=1):
            self.text(_LEFT + 14, self.y + 22 + _LINE * number, line, ' fill="#455a64"')
        self.y += height


def draw_svg(picture: Picture, title: str) -> str:
    """The picture as an SVG document of its own."""
    svg = _Svg()
    middle = _LEFT + _BOX_WIDTH / 2
    svg.text(20, svg.y, title, ' font-size="16" font-weight="600"')
    svg.y += 30
    svg.text(middle, svg.y, "token ids", ' text-anchor="middle"')
    svg.y += 6
    for block in picture.above:
        svg.down()
        svg.block(block)
    svg.down()
    top = svg.y
    svg.y += 30
    svg.text(
        _LEFT + _BOX_WIDTH + 20,
        svg.y - 8,
        f"decoder layer × {picture.layers}, {picture.layer_parameters:,} parameters each",
        ' text-anchor="end" font-weight="600"',
    )
    for branch in picture.branches:
        _draw_branch(svg, branch, picture.residual)
    svg.y += 12
    frame = (
        f'<rect x="30" y="{top:g}" width="{_BOX_WIDTH + 100}" height="{svg.y - top:g}" rx="10" '
        'fill="none" stroke="#37474f" stroke-width="2" stroke-dasharray="6 4"/>'
    )
    svg.elements.append(frame)
    for block in picture.below:
        svg.down()
        svg.block(block)
    svg.down()
    svg.text(middle, svg.y + 16, "logits", ' text-anchor="middle"')
    return _document(svg.elements, width=_BOX_WIDTH + 160, height=svg.y + 36)


def _draw_branch(svg: _Svg, branch: tuple[Block, ...], residual: bool) -> None:
    middle, rail = _LEFT + _BOX_WIDTH / 2, 56
    begin = svg.y
    for block in branch:
        svg.down(26)
        svg.block(block)
    if not residual:
        return
    svg.down(20)
    svg.y += 9
    svg.line(
        [(middle, begin + 6), (rail, begin + 6), (rail, svg.y), (middle - 10, svg.y)], arrow=True
    )
    svg.elements.append(
        f'<circle cx="{middle:g}" cy="{svg.y:g}" r="9" fill="#fff" stroke="#607d8b"/>'
    )
    svg.text(middle, svg.y + 5, "+", ' text-anchor="middle"')
    svg.y += 9


def _document(elements: list[str], *, width: float, height: float) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="13" '
            'fill="#212121">',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#607d8b"/></marker>'
            "<style>polyline{fill:none;stroke:#607d8b;stroke-width:1.5}</style></defs>",
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
            *elements,
            "</svg>",
            "",
        ]
    )
