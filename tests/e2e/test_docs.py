"""The documentation is true: every command in it is run, every file in it is made, every link leads
somewhere.

Pages share one workplace with the grids of the repository, whose demonstration is made small.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from doc_pages import (
    ALL,
    LANGUAGES,
    NEEDS,
    PAGES,
    ROOT,
    RUN,
    Block,
    bash,
    commands,
    make_site,
    run_page,
)

from orchestrator.cli.main import full_parser


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grids, a run of the demonstration, and one of the night before."""
    place = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "grids", place / "grids")
    smoke = place / "grids" / "smoke.yaml"
    small = re.sub(r"precision: \[.*\]", "precision: [fp32, int8]", smoke.read_text())
    small = small.replace("batch_size: 1..16 *2", "batch_size: [1]")
    assert small.count("[fp32, int8]") == small.count("batch_size: [1]") == 1
    smoke.write_text(small)
    bash("nightgrid run grids/smoke.yaml --emulate 2x8 --quiet", place, place)
    for name in ("last-night", "other-run", "before", "after"):
        shutil.copytree(place / "results" / "smoke", place / "results" / name)
    return place


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_what_a_page_says_to_type_works(page: Path, workplace: Path) -> None:
    run_page(page, workplace)


@pytest.mark.slow
@pytest.mark.parametrize("block", ALL, ids=lambda block: block.where)
def test_every_command_is_one(block: Block) -> None:
    assert block.language in LANGUAGES, block.where
    assert block.said.get("needs") in (None, *NEEDS), block.where
    assert set(block.said) <= {"needs", "in", "file", "shown"}, block.where
    if block.language not in ("bash", "sh"):
        typed = [line for line in block.text.splitlines() if line.startswith("nightgrid ")]
        messages = [line for line in typed if re.match(r"nightgrid \w+: ", line)]
        assert typed == messages, f"{block.where}: mark it as bash, so that it is run"
        return
    for typed in commands(block):
        try:
            full_parser().parse_args(typed)
        except SystemExit as refused:
            assert refused.code == 0, f"{block.where}: nightgrid {shlex.join(typed)}"
    for target in re.findall(r"^\s*make (\w+)", block.text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), block.where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for token, attribute in make_site.links(make_site.read(page).tokens):
        make_site.target_of(page, str(token.attrGet(attribute)))


def test_the_site_is_built_of_all_pages(tmp_path: Path) -> None:
    written = make_site.build(ROOT / "docs", tmp_path / "site")
    assert {path.stem for path in written} == {path.stem for path in (ROOT / "docs").glob("*.md")}
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "<b>More</b>" not in index  # every page has its place in docs/index.md
    for path in written:
        html = path.read_text(encoding="utf-8")
        assert f'href="{path.name}"' in index
        assert "<script" not in html
        for address in re.findall(r'(?:href|src)="([^"#]*)[^"]*"', html):
            outside = re.match(r"[a-z]+:", address)
            assert not address or outside or (path.parent / address).exists(), (path, address)


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("# One\n[here](index.md#one)\n")
    make_site.build(docs, tmp_path / "site")
    for dead in ("other.md", "index.md#two", "#two", "../nothing.yaml"):
        (docs / "index.md").write_text(f"# One\n[there]({dead})\n")
        with pytest.raises(make_site.BrokenLink, match=re.escape(dead)):
            make_site.build(docs, tmp_path / "site")
