"""Grid files that nobody meant well: a clear refusal or a plan, never a traceback or a hang."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from nested import places

from orchestrator.cli.main import main
from orchestrator.grid import yaml as strict_yaml

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)

VALID: dict[str, Any] = {
    "name": "g",
    "defaults": {"workload": "text-generation", "model": "tiny-chatglm3", "accelerator": "HPU"},
    "measure": {"warmup": 0, "min_repeats": 1, "max_repeats": 2},
    "experiments": [
        {
            "name": "a",
            "axes": {"precision": ["fp32", "bf16"], "batch_size": "1..4 *2"},
            "exclude": [{"precision": "fp32", "batch_size": 4}],
            "include": [{"precision": "int8", "batch_size": 8}],
        },
        {
            "name": "b",
            "workload": "finetuning",
            "cards": 2,
            "zip": {"rank": [4, 8], "steps": [1, 2]},
        },
    ],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One directory for all files; looking for models does not touch the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield tmp_path_factory.mktemp("grids")


def check(directory: Path, content: bytes) -> int:
    """Plan or refuse a file; if it is refused then with the file's name and a way out."""
    path = directory / "g.yaml"
    path.write_bytes(content)
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = main(["plan", str(path), "--json", "--results", str(directory / "results")])
    said = errors.getvalue()
    assert code in (0, 2), said
    if code == 2:
        assert "g.yaml" in said and "nothing was started" in said and "Traceback" not in said
    else:
        assert said == ""
    return code


#: Values that are wrong in most places, in ways that programs trip over.
TEXTS = ["", " ", "~", "..", "../../etc/passwd", "/dev/zero", "a\0b", "a\nb", "\u202eevil"]
TEXTS += ["💥" * 50, "x" * 5_000, "x" * 20_000, "%s{0}$(id)", "!!python/object:os.system", "max"]
RANGES = ["1..2", "1..", "9..1", "1..1000000000000", "0..0 *0", "1..8 *1", "-5..5"]
NUMBERS = [-1, 0, 3, 2**31, 2**63, 10**30, -(10**18), 0.5, 1e308, float("inf"), float("nan")]
SHAPES: list[Any] = [[], {}, [[]], [None], [1, 1], [{}], {"": ""}, {"a": {"b": {"c": []}}}]
HOSTILE = st.sampled_from([None, True, *TEXTS, *RANGES, *NUMBERS, *SHAPES, list(range(50))])
WORDS = """
name defaults measure experiments axes zip exclude include workload model dataset engine
accelerator cards precision batch_size isolation attention prompts output_tokens method rank
strategy needs adapter save_adapter seed time_limit_s <<
"""
SETTINGS = st.sampled_from(WORDS.split())


def parent_of(document: Any, path: tuple[Any, ...]) -> Any:
    """The holder of the value at ``path``."""
    for step in path[:-1]:
        document = document[step]
    return document


@st.composite
def mutated(draw: Callable[..., Any]) -> Any:
    """A valid grid with up to three things changed, removed, added or moved."""
    document: Any = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            continue
        parent = parent_of(document, path)
        action = draw(st.sampled_from(["replace", "remove", "add", "move"]))
        if action == "replace":
            parent[path[-1]] = copy.deepcopy(draw(HOSTILE))
        elif action == "remove":
            del parent[path[-1]]
        elif action == "add" and isinstance(parent, dict):
            parent[draw(SETTINGS)] = copy.deepcopy(draw(HOSTILE))
        elif action == "move":
            other = draw(st.sampled_from(places(document)))
            if other and other[: len(path)] != path and path[: len(other)] != other:
                # A copy: moved twice, the thing itself could come to hold itself.
                parent_of(document, other)[other[-1]] = copy.deepcopy(parent[path[-1]])
    return document


@pytest.mark.slow
@given(document=mutated(), as_json=st.booleans())
@example(document={**VALID, "experiments": [{"name": "a", "model": "x" * 5_000}]}, as_json=False)
def test_a_mutated_grid_is_planned_or_refused(
    directory: Path, document: Any, as_json: bool
) -> None:
    text = json.dumps(document) if as_json else yaml.safe_dump(document, allow_unicode=True)
    check(directory, text.encode("utf-8", "replace"))


GRIDS = sorted((ROOT / "grids").glob("*.yaml"))
CUT = st.tuples(st.integers(0, 10_000), st.integers(0, 60), st.binary(max_size=12))


@pytest.mark.slow
@given(which=st.integers(0, len(GRIDS) - 1), cuts=st.lists(CUT, min_size=1, max_size=3))
def test_a_damaged_grid_is_planned_or_refused(
    directory: Path, which: int, cuts: list[tuple[int, int, bytes]]
) -> None:
    content = GRIDS[which].read_bytes()
    for position, length, put in cuts:
        at = position % (len(content) + 1)
        content = content[:at] + put + content[at + length :]
    check(directory, content)


@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda t: t.encode()))
@example(content=b"\x00")
@example(content=b"%YAML 9.9\n---\nname: g\n")
@example(content=b"? - - - -\n: - - - -\n")
def test_any_bytes_at_all_are_planned_or_refused(directory: Path, content: bytes) -> None:
    assert check(directory, content) == 2


TOP = "name: g\ndefaults: {workload: text-generation, model: tiny-chatglm3}\nexperiments:\n"
WIDE = "".join(f"      {name}: 1..1000\n" for name in ("cards", "batch_size", "prompts"))


def laughs(depth: int) -> str:
    """Aliases that each stand for ten of the one before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


BOMBS: dict[str, str | bytes] = {
    "a product of 10^9 jobs": TOP + "  - name: e\n    axes:\n" + WIDE,
    "a product of 10^12 in one zip and two axes": TOP
    + "  - name: e\n    zip: {prompts: 1..10000}\n"
    + "    axes: {batch_size: 1..10000, output_tokens: 1..10000}\n",
    "10^6 jobs in each of a hundred experiments": TOP
    + "".join(
        f"  - {{name: e{n}, axes: {{prompts: 1..1000, batch_size: 1..1000}}}}\n" for n in range(100)
    ),
    "includes of 10^9 jobs": TOP
    + "  - name: e\n    axes: {cards: [1], batch_size: [1], prompts: [1]}\n    include:\n"
    + "      - {cards: 1..1000, batch_size: 1..1000, prompts: 1..1000}\n",
    "a range without end": TOP + "  - {name: e, axes: {prompts: 1..99999999999999999999}}\n",
    "a range of fractions": TOP + "  - {name: e, axes: {learning_rate: 0..1 *1.0000001}}\n",
    "billion laughs": laughs(9),
    "billion laughs as a grid": laughs(9) + TOP + "  - {name: e, axes: {precision: *a8}}\n",
    "deep flow lists": "name: " + "[" * 200_000,
    "deep flow maps": "name: " + "{a: " * 100_000,
    "deep block lists": "\n".join("  " * n + "-" for n in range(1500)),
    "deep and closed": "name: " + "[" * 50_000 + "]" * 50_000,
    "many anchors": "".join(f"k{n}: &a{n} {n}\n" for n in range(5_000)),
    "many keys": "".join(f"k{n}: 1\n" for n in range(5_000)),
    "the same key many times": "name: g\n" * 5_000,
    "many experiments of nothing": TOP + "  - {}\n" * 5_000,
    "a line of megabytes": "name: " + "x" * 3_000_000,
    "a key of megabytes": "x" * 3_000_000 + ": 1\n",
    "a quoted text without end": 'name: "' + "x\\\n" * 100_000,
    "more than the limit": b"#" * (strict_yaml.MAX_FILE_BYTES + 1),
    "a number of a million digits": "name: g\nexperiments: " + "9" * 1_000_000,
    "nothing but NUL": b"\0" * 100_000,
    "nothing but tabs": b"\t" * 100_000,
    "nothing but anchors": "&a " * 50_000,
    "nothing but stars": "*" * 100_000,
    "nothing but tags": "!" * 100_000,
    "nothing but quotes": "'" * 100_001,
    "nothing but document ends": "---\n...\n" * 30_000,
    "a word that is close to none": TOP + f"  - {{name: e, precision: {'bf' * 100_000}}}\n",
    "broken UTF-8 at its end": TOP.encode() + b"  - name: \xf0\x9f\x92",
    "surrogates": TOP.encode() + b"  - name: \xed\xa0\x80\n",
    "UTF-32": TOP.encode("utf-32"),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(range(256)) * 20,
}


@pytest.mark.slow
@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused(directory: Path, content: str | bytes) -> None:
    """Refused before it is built: none of these would fit into memory or a night."""
    assert check(directory, content if isinstance(content, bytes) else content.encode()) == 2


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "/", "/dev/full", "/proc/self/mem"])
def test_what_is_no_file_is_refused(directory: Path, place: str, capsys: Any) -> None:
    """Devices and directories: no more than the limit is read of them."""
    if not Path(place).exists():
        pytest.skip(f"no {place} here")
    assert main(["plan", place, "--results", str(directory / "results")]) == 2
    assert place in capsys.readouterr().err
