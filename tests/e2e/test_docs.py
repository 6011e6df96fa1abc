"""The documentation is true: every command in it is run, every file in it is made, every link leads
somewhere.

Pages share one workplace with the grids of the repository, whose demonstration is made small. The
word after a fence's language says more of a block:

    bash needs=cluster     cannot be run here; its `nightgrid` lines must parse all the same
    bash in=DIR            is run in a directory of the workplace
    yaml file=PATH         is a file, which later blocks use
    text shown=yes         the block before printed it, word for word

Programs and commands that start no process are run in this one: an interpreter and its libraries
for each of them took longer than what they do.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.cli.main import full_parser, main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_site  # noqa: E402 - tools/ is no package

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What a block may need that is not here.
NEEDS = {"cluster", "card", "checkpoint", "real-model", "install", "server"}
#: What a block may be in.
LANGUAGES = {"bash", "sh", "python", "yaml", "toml", "diff", "sql", "json", "text", ""}
#: Commands that leave the process of the tests as it was.
READING = {
    *("plan", "simulate", "report", "compare", "query", "status", "describe", "dataset"),
    *("init", "export"),
}
#: What several pages have the reader type, and was typed here, by what it is typed in.
TYPED: set[tuple[str, Path]] = set()
#: Of whoever runs the tests; a page knows nothing of them.
FOREIGN = ("RAY_ADDRESS", "NIGHTGRID_RESULTS", "NIGHTGRID_NOTIFY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    language: str
    said: dict[str, str] = field(default_factory=dict)
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    for token in make_site.parser().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language, *rest = token.info.split() or [""]
            said = dict(word.split("=", 1) for word in rest)
            indented = {"needs": "server"} if token.type == "code_block" else {}
            yield Block(
                page=page,
                line=(token.map or [0])[0] + 1,
                language="bash" if token.type == "code_block" else language,
                said=said | indented,
                text=token.content,
            )


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        program = r"(?:nightgrid|python3? -m orchestrator)"
        found = re.search(rf"(?:^\s*(?:nohup )?|<\(|-- ){program} (.*)", line)
        if not found:
            continue
        typed = shlex.split(re.split(r"\s(?:[|>&]|2>)", found[1])[0], comments=True)
        yield [word.rstrip(")") for word in typed]


ALL = [block for page in PAGES for block in blocks(page)]
RUN = sorted({block.page for block in ALL if block.language in ("bash", "sh", "python", "sql")})


def bash(text: str, place: Path, directory: Path) -> str:
    """Run a text by a shell; what it printed."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # `pip install ./package` of a page goes here and not into this environment.
        "PIP_TARGET": str(place / "site"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for: without isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": f"{place / 'site'}:{place / 'mine'}:{ROOT}",
        "TERM": "dumb",
        "NIGHTGRID_NO_RESTART": "1",  # a second process for each run, which has tests of its own
    }
    for name in FOREIGN:
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", "-e"], input=text, capture_output=True, text=True, cwd=directory, env=environment
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def reading(line: str) -> tuple[list[str], str | None] | None:
    """The arguments of a line that starts no process, and the file that it prints to: of a reading
    command, or of a run of the demonstration, whose jobs are all measured."""
    _, *typed = shlex.split(line, comments=True)
    target = None
    if typed[-2:-1] == [">"]:
        *typed, _, target = typed
    reads = typed[0] in READING or typed[:2] == ["run", "grids/smoke.yaml"]
    reads = reads or (typed[0] == "run" and "--in-process" in typed)
    return (typed, target) if reads and not {*typed} & set("<>|&") else None


def shell(block: Block, place: Path, directory: Path, *, shown: bool) -> str:
    """Run a block of shell lines: each by itself if all are simple ones and the page does not show
    the output. What was printed by processes of their own."""
    lines = block.text.splitlines()
    if shown or not all(line.startswith(("nightgrid ", "sed ", "python ")) for line in lines):
        lines = [block.text]
    printed = ""
    for line in lines:
        if "\n" not in line.strip() and line.startswith("nightgrid ") and (read := reading(line)):
            typed, target = read
            command = (shlex.join(typed), directory)
            if target or command not in TYPED:
                call(typed, target, directory)
            TYPED.add(command)
        else:
            printed += bash(f"# {block.where}\n{line}", place, directory)
    return printed


@contextlib.contextmanager
def standing_in(directory: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("TERM", "dumb")
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        yield


def call(typed: list[str], target: str | None, directory: Path) -> None:
    with standing_in(directory), contextlib.ExitStack() as files:
        if target:
            file = files.enter_context(open(target, "w", encoding="utf-8"))
            files.enter_context(contextlib.redirect_stdout(file))
        # Rows that other tests disturbed are not compared, and 6 says so.
        assert main(typed) in ((0, 6) if typed[0] == "compare" else (0,)), shlex.join(typed)


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
    call(["run", "grids/smoke.yaml", "--in-process", "--quiet"], None, place)
    for name in ("last-night", "other-run", "before", "after"):
        shutil.copytree(place / "results" / "smoke", place / "results" / name)
    return place


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_what_a_page_says_to_type_works(page: Path, workplace: Path) -> None:
    """Its blocks in order: files are written, commands and programs end with 0. Of all pages only
    first-grid.md starts a cluster: what others would run is measured by then."""
    own = [block for block in ALL if block.page == page and "needs" not in block.said]
    printed = ""
    for block, after in pairwise([*own, None]):
        directory = workplace / block.said.get("in", ".")
        if "file" in block.said:
            path = workplace / block.said["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language in ("bash", "sh"):
            shown = after is not None and "shown" in after.said
            printed = shell(block, workplace, directory, shown=shown)
        elif "shown" in block.said:
            assert block.text in printed, block.where
        elif block.language == "python":
            with standing_in(directory):
                exec(compile(block.text, block.where, "exec"), {"__name__": "__main__"})
        elif block.language == "sql":
            import duckdb

            with standing_in(directory):
                print(duckdb.sql(block.text))


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
