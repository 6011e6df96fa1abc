"""Grid files that nobody meant well: a clear refusal or a plan, never a traceback or a hang."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import yaml
from grid_cases import HEAD
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.cli.main import main
from orchestrator.core.errors import GridError
from orchestrator.core.topology import assumed_servers
from orchestrator.grid import yaml as strict_yaml
from orchestrator.grid.diagnostics import summed_up
from orchestrator.grid.parser import parse_grid
from orchestrator.planning.planner import make_plan

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/hostile"))  # for what the rehearsal does to all sorts of files

from hostile_values import damaged, mutated, side_file  # noqa: E402

pytestmark = pytest.mark.timeout(120)

#: With settings of every kind, all of which may be changed.
SOUND = """\
name: g
defaults: {workload: text-generation, model: tiny-chatglm3, accelerator: HPU, isolation: warm}
measure: {warmup: 0, min_repeats: 1, max_repeats: 2, time_limit_s: 9}
experiments:
  - name: a
    dataset: advertisegen-synthetic
    engine: transformers
    attention: sdpa
    prompts: 8
    axes: {precision: [fp32, bf16], batch_size: 1..4 *2}
    exclude: [{precision: fp32, batch_size: 4}]
    include: [{precision: int8, batch_size: 8}]
  - name: b
    workload: finetuning
    method: lora
    strategy: ddp
    save_adapter: mine
    seed: 5
    cards: 2
    zip: {rank: [4, 8], steps: [1, 2]}
"""
GRIDS = [SOUND, *(path.read_text() for path in sorted((ROOT / "grids").glob("*.yaml")))]


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


@pytest.mark.slow
@given(sound=st.sampled_from(GRIDS), seed=st.integers(0, 2**32))
def test_a_changed_grid_is_planned_or_refused(directory: Path, sound: str, seed: int) -> None:
    random, values, text = Random(seed), yaml.safe_load(sound), ""
    with contextlib.suppress(yaml.YAMLError, RecursionError, ValueError):  # no file can have it
        text = yaml.safe_dump(mutated(random, values), allow_unicode=True)
    check(directory, text.encode("utf-8", "replace"))
    check(directory, side_file(random, json.dumps(values).encode()))
    check(directory, damaged(random, sound.encode()))


@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda t: t.encode()))
@example(content=b"\x00")
@example(content=b"%YAML 9.9\n---\nname: g\n")
@example(content=b"? - - - -\n: - - - -\n")
def test_any_bytes_at_all_are_planned_or_refused(directory: Path, content: bytes) -> None:
    assert check(directory, content) == 2


WIDE = "".join(f"      {name}: 1..1000\n" for name in ("cards", "batch_size", "prompts"))


BOMBS: dict[str, str | bytes] = {
    "a product of 10^9 jobs": HEAD + "  - name: e\n    axes:\n" + WIDE,
    "a product of 10^12 in one zip and two axes": HEAD
    + "  - name: e\n    zip: {prompts: 1..10000}\n"
    + "    axes: {batch_size: 1..10000, output_tokens: 1..10000}\n",
    "10^6 jobs in each of a hundred experiments": HEAD
    + "".join(
        f"  - {{name: e{n}, axes: {{prompts: 1..1000, batch_size: 1..1000}}}}\n" for n in range(100)
    ),
    "includes of 10^9 jobs": HEAD
    + "  - name: e\n    axes: {cards: [1], batch_size: [1], prompts: [1]}\n    include:\n"
    + "      - {cards: 1..1000, batch_size: 1..1000, prompts: 1..1000}\n",
    "a range without end": HEAD + "  - {name: e, axes: {prompts: 1..99999999999999999999}}\n",
    "a range of fractions": HEAD + "  - {name: e, axes: {learning_rate: 0..1 *1.0000001}}\n",
    "deep flow lists": "name: " + "[" * 200_000,
    "deep block lists": "\n".join("  " * n + "-" for n in range(1500)),
    "many anchors": "".join(f"k{n}: &a{n} {n}\n" for n in range(5_000)),
    "the same key many times": "name: g\n" * 5_000,
    "many experiments of nothing": HEAD + "  - {}\n" * 5_000,
    "a line of megabytes": "name: " + "x" * 3_000_000,
    "a key of megabytes": "x" * 3_000_000 + ": 1\n",
    "a quoted text without end": 'name: "' + "x\\\n" * 100_000,
    "more than the limit": b"#" * (strict_yaml.MAX_FILE_BYTES + 1),
    "a number of a million digits": "name: g\nexperiments: " + "9" * 1_000_000,
    "nothing but tabs": b"\t" * 100_000,
    "nothing but quotes": "'" * 100_001,
    "a word that is close to none": HEAD + f"  - {{name: e, precision: {'bf' * 100_000}}}\n",
    "broken UTF-8 at its end": HEAD.encode() + b"  - name: \xf0\x9f\x92",
    "surrogates": HEAD.encode() + b"  - name: \xed\xa0\x80\n",
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


# ---------------------------------------------------------------- very many keys and values

ONE = f"{HEAD}  - name: e\n"


def listed(setting: str, value: str, count: int) -> str:
    """An experiment with an axis; ``value`` has the number of a value for ``#``."""
    values = ", ".join(value.replace("#", str(number)) for number in range(1, count + 1))
    return f"{ONE}    {setting}: {{batch_size: [{values}]}}\n"


def repeated(line: str, count: int, head: str = HEAD) -> str:
    return head + "".join(line.replace("#", str(number)) + "\n" for number in range(count))


MANY: dict[str, Callable[[int], str]] = {
    "unknown keys": lambda count: repeated("    key#: 1", count, ONE),
    "a key twice": lambda count: repeated("    cards: 1", count, ONE),
    "values": lambda count: listed("axes", "#", count),
    "wrong values": lambda count: listed("axes", "x#", count),
    "refused entries": lambda count: repeated("      - 1", count, f"{ONE}    exclude:\n"),
    "exclusions": lambda count: repeated(
        "      - {batch_size: #, cards: 1}", count, listed("axes", "#", count) + "    exclude:\n"
    ),
    "experiments": lambda count: repeated("  - {name: e#}", count),
    "missing models": lambda count: repeated("  - {name: e#, model: m#}", count),
}


def planned(text: str) -> list[str]:
    """The notes of a grid's plan, or its problems."""
    try:
        grid = parse_grid(text.encode(), "g.yaml")
    except GridError as error:
        return [problem.message for problem in error.problems]
    return list(make_plan(grid, assumed_servers(grid.accelerators()), []).notes)


def lines_for(text: str) -> int:
    """Lines of Python that planning a grid executes, those of loops each time."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        return trace

    sys.settrace(trace)
    try:
        planned(text)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("grid", MANY.values(), ids=MANY)
def test_the_work_of_a_plan_grows_no_faster_than_its_grid(grid: Callable[[int], str]) -> None:
    planned(grid(10))  # imports, and fills what is memoised
    assert lines_for(grid(300)) < 2.2 * lines_for(grid(150))


@pytest.mark.parametrize(
    ("grid", "count", "last"),
    [
        ("unknown keys", 6_000, "and 5,900 more problems"),
        ("a key twice", 2_001, "and 1,900 more problems"),
        ("wrong values", 4_000, "and 3,900 values that were not checked"),
        ("missing models", 1_000, "and 900 values that were not checked"),
        ("experiments", 2_000, "and 1,994 more like this"),
    ],
)
def test_notes_and_problems_of_one_kind_are_summed_up(grid: str, count: int, last: str) -> None:
    texts = planned(MANY[grid](count))
    assert last in texts and len(texts) <= 101


def test_notes_of_another_kind_are_not_summed_up_with_many_of_one() -> None:
    many = [f"dataset d{number}.json: 1 of 9 records are left out" for number in range(9)]
    *first, counted, other = summed_up([*many[:5], "fine-tuning learns the text", *many[5:]])
    assert first == many[:5] and counted == "and 4 more like this"
    assert other == "fine-tuning learns the text"
