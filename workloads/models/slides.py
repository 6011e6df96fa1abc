"""A model's picture as one slide of a PowerPoint file, of shapes that can be edited."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from workloads.base import DataMissing
from workloads.models.drawing import WIDTH, Picture, Point, Svg, draw

_SLIDE_INCHES = (13.333, 7.5)  # 16:9
_MARGIN_INCHES = 0.25
_INK, _PALE, _STROKE, _FRAME = "212121", "455A64", "607D8B", "37474F"
_TEXT_PX, _HEADING_PX = 13.0, 16.0
_POINTS_PER_INCH = 72.0


def draw_slide(picture: Picture, title: str) -> bytes:
    """The picture on one slide, as the content of a .pptx file.

    Raises:
        DataMissing: python-pptx is not installed.
    """
    if importlib.util.find_spec("pptx") is None:
        raise DataMissing("slides need the package python-pptx: pip install 'nightgrid[slides]'")
    from pptx import Presentation
    from pptx.util import Inches

    width, height = _SLIDE_INCHES
    scale = (height - 2 * _MARGIN_INCHES) / draw(picture, title, Svg())
    scale = min(scale, (width - 2 * _MARGIN_INCHES) / WIDTH)
    presentation = Presentation()
    presentation.slide_width, presentation.slide_height = Inches(width), Inches(height)
    blank = min(presentation.slide_layouts, key=lambda layout: len(layout.placeholders))
    slide = presentation.slides.add_slide(blank)
    for placeholder in list(slide.placeholders):
        placeholder.element.getparent().remove(placeholder.element)
    draw(picture, title, _Slide(slide, scale, (width - WIDTH * scale) / 2))
    presentation.core_properties.title = title
    file = io.BytesIO()
    presentation.save(file)
    return file.getvalue()


class _Slide:
    """Shapes of a slide."""

    def __init__(self, slide: Any, inches_per_px: float, left_inches: float) -> None:
        self._shapes = slide.shapes
        self._scale = inches_per_px
        self._left = left_inches

    def text(
        self, at: Point, text: str, *, align: str = "left", bold: bool = False, pale: bool = False
    ) -> None:
        self._write(at, text, _TEXT_PX, align, bold, _PALE if pale else _INK)

    def heading(self, at: Point, text: str) -> None:
        self._write(at, text, _HEADING_PX, "left", True, _INK)

    def box(self, at: Point, size: Point, colour: str) -> None:
        from pptx.enum.shapes import MSO_SHAPE

        shape = self._shape(MSO_SHAPE.ROUNDED_RECTANGLE, at, size, 6)
        shape.fill.solid()
        shape.fill.fore_color.rgb = _colour(colour.lstrip("#"))
        shape.line.color.rgb = _colour(_STROKE)

    def frame(self, at: Point, size: Point) -> None:
        from pptx.enum.dml import MSO_LINE
        from pptx.enum.shapes import MSO_SHAPE

        shape = self._shape(MSO_SHAPE.ROUNDED_RECTANGLE, at, size, 10)
        shape.fill.background()
        shape.line.color.rgb = _colour(_FRAME)
        shape.line.dash_style = MSO_LINE.DASH

    def arrow(self, points: list[Point]) -> None:
        first, *rest = [self._place(point) for point in points]
        for number, (begin, end) in enumerate(zip([first, *rest], rest, strict=False), start=1):
            from pptx.enum.shapes import MSO_CONNECTOR

            line = self._shapes.add_connector(MSO_CONNECTOR.STRAIGHT, *begin, *end)
            line.line.color.rgb = _colour(_STROKE)
            if number == len(rest):
                _give_head(line)

    def sum(self, at: Point, radius: float) -> None:
        from pptx.enum.shapes import MSO_SHAPE

        corner = (at[0] - radius, at[1] - radius)
        shape = self._shape(MSO_SHAPE.MATH_PLUS, corner, (2 * radius, 2 * radius))
        shape.fill.solid()
        shape.fill.fore_color.rgb = _colour(_STROKE)
        shape.line.fill.background()

    def _shape(self, kind: Any, at: Point, size: Point, corner_px: float | None = None) -> Any:
        shape = self._shapes.add_shape(kind, *self._place(at), *self._size(size))
        shape.shadow.inherit = False
        if corner_px is not None:
            shape.adjustments[0] = corner_px / min(size)
        return shape

    def _write(self, at: Point, text: str, px: float, align: str, bold: bool, colour: str) -> None:
        from pptx.enum.text import MSO_AUTO_SIZE, PP_ALIGN
        from pptx.util import Pt

        width = WIDTH  # more than any line: it hangs over where nothing is
        left = {"left": at[0], "middle": at[0] - width / 2, "right": at[0] - width}[align]
        frame = self._shapes.add_textbox(
            *self._place((left, at[1] - px)), *self._size((width, 1.4 * px))
        ).text_frame
        frame.margin_left = frame.margin_right = frame.margin_top = frame.margin_bottom = 0
        frame.word_wrap, frame.auto_size = False, MSO_AUTO_SIZE.NONE
        paragraph = frame.paragraphs[0]
        aligned = {"left": PP_ALIGN.LEFT, "middle": PP_ALIGN.CENTER, "right": PP_ALIGN.RIGHT}
        paragraph.alignment = aligned[align]
        run = paragraph.add_run()
        run.text = text
        run.font.size = Pt(round(px * self._scale * _POINTS_PER_INCH, 1))
        run.font.bold = bold
        run.font.color.rgb = _colour(colour)

    def _place(self, at: Point) -> tuple[int, int]:
        from pptx.util import Inches

        x, y = at
        return Inches(self._left + x * self._scale), Inches(_MARGIN_INCHES + y * self._scale)

    def _size(self, size: Point) -> tuple[int, int]:
        from pptx.util import Inches

        return Inches(size[0] * self._scale), Inches(size[1] * self._scale)


def _colour(digits: str) -> Any:
    from pptx.dml.color import RGBColor

    return RGBColor.from_string(digits.upper())


def _give_head(connector: Any) -> None:
    """An arrowhead, which python-pptx has no call for."""
    from pptx.oxml import parse_xml
    from pptx.oxml.ns import nsdecls

    head = parse_xml(f'<a:tailEnd {nsdecls("a")} type="triangle" w="med" len="med"/>')
    connector.line._get_or_add_ln().append(head)
