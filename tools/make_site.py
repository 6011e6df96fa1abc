"""Make the documentation site out of docs/: `make docs`, or python tools/make_site.py [--to site].

Every page of docs/ is rendered with what Nightgrid's own dependencies bring (markdown-it, Jinja,
Pygments): pages that need no network, no script, and can be opened from disk. A link that leads
nowhere ends the build.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
#: Files outside docs/ that pages link to go along under this name.
FILES = "files"


class BrokenLink(Exception):
    """A page links to what is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page: its tokens, and what its headings are called in links."""

    path: Path
    title: str
    tokens: list[Token]
    anchors: frozenset[str]

    @property
    def name(self) -> str:
        """Its file in the site."""
        return self.path.stem + ".html"


def parser() -> MarkdownIt:
    """Markdown as the pages are written: CommonMark with tables; HTML stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def anchor(heading: str) -> str:
    """The name of a heading in links, as code hosts do it: ``What's new?`` is ``whats-new``."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read(path: Path) -> Page:
    """Parse a page; its headings get their anchors."""
    tokens = parser().parse(path.read_text(encoding="utf-8"))
    title, anchors = path.stem, set()
    for opening, inline in pairwise(tokens):
        if opening.type != "heading_open":
            continue
        heading = "".join(child.content for child in inline.children or [])
        opening.attrSet("id", anchor(heading))
        anchors.add(anchor(heading))
        if opening.tag == "h1":
            title = heading
    return Page(path=path, title=title, tokens=tokens, anchors=frozenset(anchors))


def links(tokens: list[Token]) -> list[tuple[Token, str]]:
    """Every link and picture with the attribute that says where it leads."""
    found = []
    for token in tokens:
        for child in token.children or []:
            if child.type == "link_open":
                found.append((child, "href"))
            elif child.type == "image":
                found.append((child, "src"))
    return found


def target_of(page: Path, address: str) -> tuple[Path, str] | None:
    """The file and the anchor that an address on a page means; None for addresses of the web.

    Raises:
        BrokenLink: there is no such file, or it has no such heading.
    """
    split = urlsplit(address)
    if split.scheme:
        return None
    path = (page.parent / split.path).resolve() if split.path else page.resolve()
    if not path.exists():
        raise BrokenLink(f"{page}: {address} leads to no file")
    if split.fragment and path.suffix == ".md" and split.fragment not in read(path).anchors:
        raise BrokenLink(f"{page}: {address}: no heading of that name")
    return path, split.fragment


def navigation(pages: Mapping[str, Page]) -> list[tuple[str, list[Page]]]:
    """The sections of index.md with the pages that each links to; last those that none does."""
    found: dict[str, list[str]] = {"Guide": ["index.md"]}
    section = "Guide"
    for before, token in pairwise(pages["index.md"].tokens):
        if before.type == "heading_open" and before.tag == "h2":
            section = token.content
        linked = [str(link.attrGet(attribute)) for link, attribute in links([token])]
        named = {name for names in found.values() for name in names}
        names = [name for name in dict.fromkeys(linked) if name in pages and name not in named]
        found.setdefault(section, []).extend(names)
    named = {name for names in found.values() for name in names}
    found["More"] = [name for name in pages if name not in named]
    return [(title, [pages[name] for name in names]) for title, names in found.items() if names]


def build(docs: Path, site: Path) -> list[Path]:
    """Write the site; the pages written.

    Raises:
        BrokenLink: a link leads nowhere.
    """
    pages = {path.name: read(path) for path in sorted(docs.glob("*.md"))}
    nav = navigation(pages)
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    markdown = parser()
    markdown.options["highlight"] = _highlighted
    template = Environment(autoescape=True).from_string(TEMPLATE)
    colours = HtmlFormatter(style="default").get_style_defs("code").splitlines()
    # All but the rule of the block itself, whose background is the page's.
    style = STYLE + "\n".join(rule for rule in colours if not rule.startswith("code {"))
    written = []
    for page in pages.values():
        for token, attribute in links(page.tokens):
            address = str(token.attrGet(attribute))
            token.attrSet(attribute, _in_site(page.path, address, docs, site))
        # Not what strangers wrote: Markdown of this repository, rendered without raw HTML.
        body = Markup(markdown.renderer.render(page.tokens, markdown.options, {}))
        html = template.render(page=page, nav=nav, body=body, style=Markup(style))
        (site / page.name).write_text(html, encoding="utf-8")
        written.append(site / page.name)
    return written


def _in_site(page: Path, address: str, docs: Path, site: Path) -> str:
    target = target_of(page, address)
    if target is None:
        return address
    path, fragment = target
    after = f"#{fragment}" if fragment else ""
    if path == page.resolve():
        return after
    if path.suffix == ".md" and path.parent == docs.resolve():
        return path.stem + ".html" + after
    within = path.relative_to(docs.resolve()) if path.is_relative_to(docs.resolve()) else None
    place = within or Path(FILES) / path.relative_to(docs.resolve().parent)
    if path.is_file():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, site / place)
        return place.as_posix()
    raise BrokenLink(f"{page}: {address} is a directory; link to a file in it")


def _highlighted(code: str, language: str, _attributes: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))


STYLE = """
:root { color-scheme: light dark; --paper: #faf9f6; --surface: #fff; --ink: #1b2126;
  --soft: #596169; --line: #e2ded6; --accent: #0b6a70; }
@media (prefers-color-scheme: dark) { :root { --paper: #111416; --surface: #191d20;
  --ink: #e9e7e2; --soft: #a2abb2; --line: #2b3136; --accent: #5cc4c2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font-family: system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.page { display: grid; grid-template-columns: 15rem minmax(0, 46rem); gap: 48px;
  max-width: 70rem; margin: 0 auto; padding: 40px 24px 96px; }
nav { font-size: .92rem; } nav b { display: block; margin: 18px 0 4px; color: var(--soft);
  font-weight: 500; font-size: .82rem; }
nav a { display: block; padding: 3px 0; color: var(--ink); text-decoration: none; }
nav a:hover { color: var(--accent); } nav a[aria-current] { color: var(--accent);
  font-weight: 620; } nav .home { font-weight: 650; font-size: 1.1rem; }
.skip { position: absolute; left: -999px; } .skip:focus { left: 8px; top: 8px; }
a { color: var(--accent); } h1 { margin-top: 0; font-size: 2rem; } h2 { margin-top: 2.2em; }
h1, h2, h3 { line-height: 1.2; }
img { max-width: 100%; border: 1px solid var(--line); border-radius: 8px; }
pre { background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; overflow-x: auto; font-size: .86rem; line-height: 1.45; }
code { font-family: ui-monospace, "SF Mono", Consolas, "Liberation Mono", monospace; }
:not(pre) > code { font-size: .9em; background: var(--surface); border: 1px solid var(--line);
  border-radius: 4px; padding: 0 4px; overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: 7px 18px 7px 0;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 500; }
@media (max-width: 800px) { .page { grid-template-columns: minmax(0, 1fr); padding-top: 24px; }
  nav { order: 2; border-top: 1px solid var(--line); padding-top: 16px; } }
@media (prefers-color-scheme: dark) { pre code span { filter: brightness(1.5) saturate(.8); } }
"""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }} · Nightgrid</title>
<link rel="icon" href="data:,">
<style>{{ style }}</style>
</head>
<body>
<a class="skip" href="#content">To the text</a>
<div class="page">
<nav aria-label="Pages">
<a class="home" href="index.html">Nightgrid</a>
{% for section, pages in nav if pages %}<b>{{ section }}</b>
{% for one in pages %}<a href="{{ one.name }}"
{%- if one.name == page.name %} aria-current="page"{% endif %}>{{ one.title }}</a>
{% endfor %}{% endfor %}
</nav>
<main id="content">
{{ body }}
</main>
</div>
</body>
</html>
"""


def main() -> int:
    """Build, and say where."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--to", type=Path, default=ROOT / "site", metavar="DIR")
    site = arguments.parse_args().to
    try:
        written = build(ROOT / "docs", site)
    except BrokenLink as error:
        print(f"make_site: {error}", file=sys.stderr)
        return 1
    print(f"{len(written)} pages: {(site / 'index.html').resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
