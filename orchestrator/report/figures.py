"""Every figure as PNG and PDF, for papers, slides and issue comments.

Pictures are the page's drawings with its style sheet in the light theme, as the renderer knows no
CSS variables. They carry the warnings about emulated cards, random weights and synthetic data.
Rendering needs the extra ``report``; ``figure_data.py`` has the data.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from orchestrator.analysis.selection import described, stated_parameters
from orchestrator.analysis.summary import Summary
from orchestrator.core.errors import ExtraMissing, StoreError
from orchestrator.report import charts
from orchestrator.report.html import asset
from orchestrator.report.interactive import cards_figure, prompt_points, prompts_figure
from orchestrator.report.sections import sections
from orchestrator.util import format as units
from orchestrator.util.format import visible

#: Most pictures of one kind; a large grid has hundreds of tables, and the CSV has all.
MOST_PICTURES = 24
#: Kinds of which there is one picture, without a number in its name.
_SINGLE = ("prompts", "techniques", "cards")
MARGIN = 18
NOT_XML = {0xFFFE: "\N{REPLACEMENT CHARACTER}", 0xFFFF: "\N{REPLACEMENT CHARACTER}"}
PIXELS_PER_INCH = 150
#: A Typst page as large as the drawing, which is passed as text.
PAGE = b"""#set page(width: auto, height: auto, margin: 0pt)
#image(bytes(sys.inputs.svg), format: "svg", alt: sys.inputs.title)"""
#: Rules missing from the page's style sheet. The renderer bundles the last font family.
RULES = """
svg { font-family: Inter, "Noto Sans", "Liberation Sans", "DejaVu Sans", "DejaVu Sans Mono";
  font-size: 12.5px; }
.paper { fill: var(--surface); } .title { font-weight: 620; fill: var(--ink); }
.about { font-size: 11px; fill: var(--soft); } .note { font-size: 11px; fill: var(--note); }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """File name, heading and ``<svg>`` of a picture."""

    name: str
    title: str
    drawing: str
    about: str = ""


def write_pictures(summary: Summary, directory: Path) -> tuple[list[Path], int]:
    """Write every figure as PNG and PDF; return the paths and the number of omitted figures.

    Raises:
        ExtraMissing: the renderer is not installed.
        StoreError: a file cannot be written.
    """
    try:
        import typst
    except ImportError as error:
        raise ExtraMissing("typst", wanted_for="PNG and PDF figures") from error
    pictures, left_out = pictures_of(summary)
    flags = [f"{b.name.lower()} in {b.count} of {b.of} rows" for b in summary.banners]
    note = f"Beware: {', '.join(flags)}" if flags else ""
    fonts = typst.Fonts()
    paths = []
    for picture in pictures:
        drawn = {"svg": standalone(picture, note), "title": visible(picture.title)}
        for form in ("png", "pdf"):
            path = directory / f"{picture.name}.{form}"
            data = typst.compile(
                PAGE, format=form, ppi=PIXELS_PER_INCH, font_paths=fonts, sys_inputs=drawn
            )
            assert isinstance(data, bytes)  # one page
            try:
                path.write_bytes(data)
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
            paths.append(path)
    return paths, left_out


def pictures_of(summary: Summary) -> tuple[list[Picture], int]:
    """Return the pictures to write, and the number that the limit omits."""
    kinds: dict[str, list[Picture]] = {}
    for kind, title, about, drawing in _drawings(summary):
        group = kinds.setdefault(kind, [])
        name = kind if kind in _SINGLE else f"{kind}-{len(group) + 1:02d}"
        group.append(Picture(name=name, title=title, about=about, drawing=drawing))
    drawn = [[picture for picture in group if picture.drawing] for group in kinds.values()]
    shown = [picture for group in drawn for picture in group[:MOST_PICTURES]]
    return shown, sum(max(0, len(group) - MOST_PICTURES) for group in drawn)


def _drawings(summary: Summary) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, title, settings and ``<svg>`` of every figure; "" where there is none."""
    index = {row.job_id: number for number, row in enumerate(summary.rows)}
    for table in summary.tables:
        title, about = table.title, described(table.about)
        yield "heat-map", title, about, charts.heat_map(table, title, index)
        yield "throughput-against-batch-size", title, about, charts.throughput_curve(table, title)
    for front in summary.fronts:
        setting = front.setting
        title, about = f"{setting.model} on {setting.where}", described(stated_parameters(setting))
        drawing = charts.front_figure(front, title, summary.chosen)
        yield "throughput-against-latency", title, about, drawing
    title, points = f"{summary.run}: each point is one prompt", prompt_points(summary.rows)
    yield "prompts", title, "", prompts_figure(summary.rows, points, title)
    for section in sections(summary):
        for figure in section.figures():
            yield section.id.partition("-")[0], section.title, figure.caption, figure.drawing
    if lanes := summary.timeline.lanes:
        title = f"{len(lanes)} cards, time assigned {units.percent(summary.timeline.assigned, 3)}"
        yield "cards", title, "", cards_figure(summary.timeline, title, summary.names, index)


def standalone(picture: Picture, note: str) -> str:
    """Return an SVG file with heading, drawing, note and style sheet."""
    head, _, body = picture.drawing.partition(">")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
    assert size, head
    wide, high = float(size[1]), float(size[2])
    parts, y = [], float(MARGIN)
    for kind, text in (("title", picture.title), ("about", picture.about)):
        written, y = _lines(kind, text, y, wide)
        parts.append(written)
    place = f"translate({MARGIN} {y + 8})"
    parts.append(f'<g class="curve" transform="{place}">{body.removesuffix("</svg>")}</g>')
    written, y = _lines("note", note, y + high + 14, wide)
    wide, high = wide + 2 * MARGIN, y + MARGIN - 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high:.0f}" '
        f'viewBox="0 0 {wide:.0f} {high:.0f}"><style>{style_sheet()}</style>'
        f'<rect class="paper" width="100%" height="100%"/>{"".join(parts)}{written}</svg>'
    ).translate(NOT_XML)


def _lines(kind: str, text: str, y: float, wide: float) -> tuple[str, float]:
    """Return text wrapped into lines below ``y``, and its end."""
    parts = []
    for line in textwrap.wrap(visible(text), int(wide / 6.9)):
        y += 16
        parts.append(f'<text class="{kind}" x="{MARGIN}" y="{y - 4:.1f}">{escape(line)}</text>')
    return "".join(parts), y


@cache
def style_sheet() -> str:
    """Return the rules for drawings in the light theme, one per class that sets a variable."""
    css = re.sub(r"/\*.*?\*/", "", asset("page.css"), flags=re.DOTALL)
    light = dict(re.findall(r"(--[\w-]+):\s*([^;]+);", css[: css.index("}")]))
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", css[css.index("}") :])
    of_class: dict[str, list[tuple[str, str]]] = {}
    for selectors, body in rules:
        if only := re.fullmatch(r"\s*(--[\w-]+):\s*([^;]+);\s*", body):
            for name in selectors.split(","):
                of_class.setdefault(only[1], []).append((name.strip(), only[2]))
    drawn = [rule for rule in rules if rule[0].strip().startswith(".curve ")]
    written = []
    for selector, body in [*drawn, *re.findall(r"([^{}]+)\{([^{}]*)\}", RULES)]:
        selector = selector.strip()
        variants = [(selector, body)]
        for variable, classes in of_class.items():
            if f"var({variable})" in body:
                inner = selector.removeprefix(".curve ")
                variants = [
                    (f".curve {inner}{n}, .curve {n} {inner}", body.replace(f"var({variable})", v))
                    for n, v in classes
                ]
        written += [f"{where} {{{what}}}" for where, what in variants]
    sheet = re.sub(r"var\((--[\w-]+)\)", lambda match: light[match[1]], "\n".join(written))
    # The renderer supports only font weights in hundreds.
    return re.sub(r"(font-weight: \d)\d\d", r"\g<1>00", sheet)
