"""A model as a stack of blocks: as Unicode lines, as an SVG, or as a slide of editable shapes.

Data flows downwards. The frame is one decoder layer, repeated; the line at its left is the residual
stream, which each half of the layer reads through a norm and adds to.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

from workloads.base import DataMissing
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
    layers: int  # 0: the blocks above are all there is
    layer_parameters: int
    below: tuple[Block, ...]
    kind: str = "decoder"  # of the layers
    ends: tuple[str, str] = ("token ids", "logits")

    @property
    def caption(self) -> str:
        """Kind and number of the layers."""
        return f"{self.kind} layer × {self.layers}"


def picture_of(description: Description) -> Picture:
    """Arrange a description's parts."""
    a, tensors = description.architecture, description.tensors
    if a.kind == "pipeline":
        parts = [(tensor.name.split(": ", 1), tensor.parameters) for tensor in tensors]
        return Picture(
            above=tuple(Block(title=t, lines=(kind,), parameters=n) for (t, kind), n in parts),
            branches=(),
            residual=False,
            layers=0,
            layer_parameters=0,
            below=(),
            ends=("text", "image"),
        )
    inside = [tensor for tensor in tensors if ".*." in tensor.name]
    outside = [tensor for tensor in tensors if ".*." not in tensor.name]
    attention = _sum(t for t in inside if _part(t) == "attention") // max(a.layers, 1)
    mlp = _sum(t for t in inside if _part(t) == "mlp") // max(a.layers, 1)
    norms = _sum(t for t in inside if _part(t) == "norm") // max(a.layers, 1)
    own_norms = {t.name.split(".*.")[1].split(".")[0] for t in inside if _part(t) == "norm"}
    epsilon = (f"epsilon {a.epsilon:.3g}",) if a.epsilon else ()
    half = Block(title=a.norm, lines=epsilon, parameters=norms // 2)
    head = 0 if a.tied else _sum(t for t in outside if t.name == "lm_head.weight")
    final = _sum(t for t in outside if _part(t) == "norm")
    table = _sum(outside) - head - final
    form = f"{a.activation}(gate) × up" if a.gated else a.activation
    unit = f"{a.hidden:,} → {a.intermediate:,} → {a.hidden:,}, {form}"
    return Picture(
        above=(
            Block(title="Embedding", lines=(f"{a.vocabulary:,} × {a.hidden:,}",), parameters=table),
        ),
        branches=(
            (half, Block(title="Attention", lines=_attention_lines(a), parameters=attention)),
            (half, Block(title="MLP", lines=(unit,), parameters=mlp)),
        ),
        # One norm before attention, one before the MLP, and no other.
        residual=own_norms in ({"input_layernorm", "post_attention_layernorm"}, {"ln_1", "ln_2"}),
        layers=a.layers,
        layer_parameters=attention + mlp + norms,
        below=(
            Block(title=a.norm, lines=epsilon, parameters=final),
            Block(
                title="Output layer",
                lines=(
                    f"{a.hidden:,} → {a.vocabulary:,}",
                    *(("shares the embedding's weights",) if a.tied else ()),
                ),
                parameters=head,
            ),
        ),
        kind=a.kind,
    )


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.parameters for tensor in tensors)


def _part(tensor: Tensor) -> str:
    names = tensor.name.lower().split(".")
    if any("norm" in name or name.startswith("ln_") for name in names):
        return "norm"
    return "attention" if any("attn" in n or "attention" in n for n in names) else "mlp"


def _attention_lines(a: Architecture) -> tuple[str, ...]:
    heads = f"{a.heads} heads of {a.head_dim}"
    if a.kv_heads != a.heads:
        heads = f"{a.heads} query heads share {a.kv_heads} key/value heads of {a.head_dim}"
    positions = "relative positions" if a.relative_positions else "learned positions"
    if a.rotary_dim:
        positions = f"rotary positions on {a.rotary_dim} of {a.head_dim} channels"
    return heads, positions, "bias on queries, keys, values" if a.qkv_bias else "no bias"


def short(count: int) -> str:
    """Abbreviate a count: 1234567 -> '1.23 M'."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


# -- terminal -------------------------------------------------------------------------------------

_COLUMNS = 74  # inside the frame
_STREAM = "  │"  # the residual stream, down the left


def draw_text(picture: Picture) -> list[str]:
    """Return the picture as lines for a terminal."""
    lines = [f"  {picture.ends[0]}", _STREAM]
    for block in picture.above:
        lines += [*_box(block), _STREAM]
    if not picture.layers:
        return [*lines, f"  {picture.ends[1]}"]
    title = f"═╪═ {picture.caption} ═ {short(picture.layer_parameters)} each "
    lines.append(f"╔{title:═<{_COLUMNS}}╗")
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
    lines.append(f"╚{'═╪':═<{_COLUMNS}}╝")
    for block in picture.below:
        lines += [_STREAM, *_box(block)]
    return [*lines, _STREAM, f"  {picture.ends[1]}"]


def _framed(text: str, right: str = "", edge: str = "║") -> str:
    return f"{edge} {text:<{_COLUMNS - 10}}{right:>8} {edge}"


def _box(block: Block) -> list[str]:
    text = f"{block.title:<16}{'; '.join(block.lines)}"
    right = short(block.parameters) if block.parameters else ""
    return [f"┌{'─' * _COLUMNS}┐", _framed(text, right, "│"), f"└{'─' * _COLUMNS}┘"]


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
_LEFT, _BOX_WIDTH, _LINE = 90.0, 540.0, 18.0
_MIDDLE, _RIGHT = _LEFT + _BOX_WIDTH / 2, _LEFT + _BOX_WIDTH
_RESIDUAL = 56.0  # x of the line around a branch
_WIDTH = _BOX_WIDTH + 160
#: Heights of title and input, and of the output. A slide's height leaves 14 points for each line.
_HEAD, _FOOT = 42.0, 27.0
_ARROW = 8.0
_SUM = 15.0  # from a branch to its plus
_PAD = 10.0  # of a block, above and below together
_FIRST = 17.0  # from a block's edge to its first baseline
_DETAILS = 125.0  # x of details beside a title


def _draw(picture: Picture, title: str) -> tuple[list[Mark], float]:
    """Return the marks of a picture that is ``_WIDTH`` wide, and its height."""
    marks: list[Mark] = [
        Text((20, 17), title, bold=True, size=16),
        Text((_MIDDLE, _HEAD - 6), picture.ends[0], align="middle"),
    ]
    y = _HEAD
    for block in picture.above:
        y = _block(marks, y, block)
    if picture.layers:
        y = _layer(marks, y, picture)
        for block in picture.below:
            y = _block(marks, y, block)
    end = (_MIDDLE, y + _ARROW + _PAD)
    marks += [_down(y, _ARROW), Text(end, picture.ends[1], align="middle")]
    return marks, y + _FOOT


def _layer(marks: list[Mark], y: float, picture: Picture) -> float:
    """Draw the frame of one layer with its branches; return its lower edge."""
    marks.append(_down(y, _ARROW))
    top = y = y + _ARROW
    caption = f"{picture.caption}: {picture.layer_parameters:,} parameters each"
    y += 14 + _PAD
    marks.append(Text((_RIGHT + 20, y - 8), caption, align="right", bold=True))
    for branch in picture.branches:
        begin = y
        for block in branch:
            y = _block(marks, y, block)
        if picture.residual:
            marks.append(_down(y, _SUM - 9))
            y += _SUM
            around = ((_MIDDLE, begin + 6), (_RESIDUAL, begin + 6), (_RESIDUAL, y))
            marks += [Arrow((*around, (_MIDDLE - 10, y))), Plus((_MIDDLE, y), 9)]
            y += 9
    y += _PAD - 4
    marks.append(Box((30, top), (_BOX_WIDTH + 100, y - top)))
    return y


def _down(y: float, length: float) -> Arrow:
    return Arrow(((_MIDDLE, y), (_MIDDLE, y + length)))


def _block(marks: list[Mark], y: float, block: Block) -> float:
    """Draw an arrow and a block below it; return the block's lower edge."""
    marks.append(_down(y, _ARROW))
    y += _ARROW
    height = _PAD + _LINE * max(len(block.lines), 1)
    first = y + _FIRST
    marks.append(Box((_LEFT, y), (_BOX_WIDTH, height), _COLOURS.get(block.title, _PLAIN)))
    marks.append(Text((_LEFT + 14, first), block.title, bold=True))
    if block.parameters:
        marks.append(Text((_RIGHT - 14, first), short(block.parameters), align="right"))
    for number, line in enumerate(block.lines):
        marks.append(Text((_LEFT + _DETAILS, first + _LINE * number), line, pale=True))
    return y + height


def draw_svg(picture: Picture, title: str) -> str:
    """Return the picture as a standalone SVG document."""
    marks, height = _draw(picture, title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
            f'width="{_WIDTH:g}" height="{height:g}" font-family="sans-serif" font-size="13" '
            'fill="#212121">',
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" '
            'markerHeight="5" orient="auto"><path d="M0 0 8 4 0 8z" fill="#607d8b"/></marker>'
            "<style>polyline{fill:none;stroke:#607d8b;stroke-width:1.5}</style></defs>",
            f'<rect width="{_WIDTH:g}" height="{height:g}" fill="#ffffff"/>',
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


# -- slide ----------------------------------------------------------------------------------------

_SLIDE_INCHES = (13.333, 7.5)  # 16:9
_MARGIN_INCHES = 0.1
_INK, _PALE, _STROKE, _FRAME = "212121", "455A64", "607D8B", "37474F"
_POINTS_PER_INCH = 72.0


def draw_slide(picture: Picture, title: str) -> bytes:
    """Return a .pptx file with the picture; raises DataMissing without python-pptx."""
    if importlib.util.find_spec("pptx") is None:
        raise DataMissing("slides need the package python-pptx: pip install python-pptx")
    from pptx import Presentation
    from pptx.util import Inches

    width, height = _SLIDE_INCHES
    marks, drawn_height = _draw(picture, title)
    scale = min((height - 2 * _MARGIN_INCHES) / drawn_height, (width - 2 * _MARGIN_INCHES) / _WIDTH)
    presentation = Presentation()
    presentation.slide_width, presentation.slide_height = Inches(width), Inches(height)
    blank = min(presentation.slide_layouts, key=lambda layout: len(layout.placeholders))
    slide = presentation.slides.add_slide(blank)
    for placeholder in list(slide.placeholders):
        placeholder.element.getparent().remove(placeholder.element)
    pen = _Slide(slide, scale, (width - _WIDTH * scale) / 2)
    for mark in marks:
        pen.draw(mark)
    presentation.core_properties.title = title
    file = io.BytesIO()
    presentation.save(file)
    return file.getvalue()


class _Slide:
    def __init__(self, slide: Any, inches_per_px: float, left_inches: float) -> None:
        self._shapes = slide.shapes
        self._scale = inches_per_px
        self._left = left_inches

    def draw(self, mark: Mark) -> None:
        from pptx.enum.dml import MSO_LINE
        from pptx.enum.shapes import MSO_SHAPE

        if isinstance(mark, Text):
            self._write(mark)
        elif isinstance(mark, Arrow):
            self._arrow(mark)
        elif isinstance(mark, Plus):
            corner = (mark.at[0] - mark.radius, mark.at[1] - mark.radius)
            size = (2 * mark.radius, 2 * mark.radius)
            shape = self._shape(MSO_SHAPE.MATH_PLUS, corner, size)
            shape.fill.solid()
            shape.fill.fore_color.rgb = _colour(_STROKE)
            shape.line.fill.background()
        else:
            shape = self._shape(MSO_SHAPE.ROUNDED_RECTANGLE, mark.at, mark.size)
            shape.adjustments[0] = (6 if mark.colour else 10) / min(mark.size)
            shape.line.color.rgb = _colour(_STROKE if mark.colour else _FRAME)
            if mark.colour:
                shape.fill.solid()
                shape.fill.fore_color.rgb = _colour(mark.colour)
            else:
                shape.fill.background()
                shape.line.dash_style = MSO_LINE.DASH

    def _shape(self, kind: Any, at: Point, size: Point) -> Any:
        shape = self._shapes.add_shape(kind, *self._place(at), *self._size(size))
        shape.shadow.inherit = False
        return shape

    def _arrow(self, mark: Arrow) -> None:
        from pptx.enum.shapes import MSO_CONNECTOR
        from pptx.oxml import parse_xml
        from pptx.oxml.ns import nsdecls

        for begin, end in pairwise(self._place(point) for point in mark.points):
            line = self._shapes.add_connector(MSO_CONNECTOR.STRAIGHT, *begin, *end).line
            line.color.rgb = _colour(_STROKE)
        # python-pptx has no API for arrowheads.
        head = parse_xml(f'<a:tailEnd {nsdecls("a")} type="triangle" w="med" len="med"/>')
        line._get_or_add_ln().append(head)

    def _write(self, mark: Text) -> None:
        from pptx.enum.text import MSO_AUTO_SIZE, PP_ALIGN
        from pptx.util import Pt

        # Wider than any line; it overlaps empty space only.
        x, y = mark.at
        left = {"left": x, "middle": x - _WIDTH / 2, "right": x - _WIDTH}[mark.align]
        frame = self._shapes.add_textbox(
            *self._place((left, y - mark.size)), *self._size((_WIDTH, 1.4 * mark.size))
        ).text_frame
        frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
        frame.word_wrap, frame.auto_size = False, MSO_AUTO_SIZE.NONE
        paragraph = frame.paragraphs[0]
        aligned = {"left": PP_ALIGN.LEFT, "middle": PP_ALIGN.CENTER, "right": PP_ALIGN.RIGHT}
        paragraph.alignment = aligned[mark.align]
        run = paragraph.add_run()
        run.text = mark.text
        run.font.size = Pt(round(mark.size * self._scale * _POINTS_PER_INCH, 1))
        run.font.bold = mark.bold
        run.font.color.rgb = _colour(_PALE if mark.pale else _INK)

    def _place(self, at: Point) -> tuple[int, int]:
        return self._size((at[0] + self._left / self._scale, at[1] + _MARGIN_INCHES / self._scale))

    def _size(self, size: Point) -> tuple[int, int]:
        from pptx.util import Inches

        return Inches(size[0] * self._scale), Inches(size[1] * self._scale)


def _colour(digits: str) -> Any:
    from pptx.dml.color import RGBColor

    return RGBColor.from_string(digits.lstrip("#").upper())
