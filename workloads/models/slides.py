"""A model's picture as one slide of a PowerPoint file, of editable shapes."""

from __future__ import annotations

import importlib.util
import io
from itertools import pairwise
from typing import Any

from workloads.base import DataMissing
from workloads.models.drawing import WIDTH, Arrow, Mark, Picture, Plus, Point, Text, draw

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
    marks, drawn_height = draw(picture, title, narrow=True)
    scale = min((height - 2 * _MARGIN_INCHES) / drawn_height, (width - 2 * _MARGIN_INCHES) / WIDTH)
    presentation = Presentation()
    presentation.slide_width, presentation.slide_height = Inches(width), Inches(height)
    blank = min(presentation.slide_layouts, key=lambda layout: len(layout.placeholders))
    slide = presentation.slides.add_slide(blank)
    for placeholder in list(slide.placeholders):
        placeholder.element.getparent().remove(placeholder.element)
    pen = _Slide(slide, scale, (width - WIDTH * scale) / 2)
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
        left = {"left": x, "middle": x - WIDTH / 2, "right": x - WIDTH}[mark.align]
        frame = self._shapes.add_textbox(
            *self._place((left, y - mark.size)), *self._size((WIDTH, 1.4 * mark.size))
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
