"""Strict YAML: what scalars mean, what is refused, and where."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import GridError
from orchestrator.grid import yaml as grid_yaml
from orchestrator.grid.yaml import resolve


def problems(content: bytes) -> list[tuple[int | None, int | None, str]]:
    with pytest.raises(GridError) as caught:
        grid_yaml.parse(content, "g.yaml")
    return [(p.line, p.column, p.message) for p in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("+4", 4),
        ("0", 0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("-2.5E-1", -0.25),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        *((text, text) for text in ("no", "Yes", "on", "010", "0x1F", "0o17", "1_000", "1:30")),
        *((text, text) for text in ("2024-01-01", "1..64 *2", "1.2.3", "e3", "--1", "tRue")),
    ],
)
def test_plain_scalars_follow_the_narrowed_core_schema(text: str, value: object) -> None:
    resolved = resolve(text)
    assert resolved == value
    assert type(resolved) is type(value)


@pytest.mark.parametrize("text", [".inf", "-.INF", ".nan", "1e999", "9" * 40, "-" + "1" * 5000])
def test_numbers_no_setting_can_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"finite|digits"):
        resolve(text)


@pytest.mark.parametrize(
    ("text", "path", "key", "place"),
    [
        ("ü: 1\nlist:\n  - {k: [x, yy]}\n", ("ü",), False, (1, 4)),
        ("ü: 1\nlist:\n  - {k: [x, yy]}\n", ("list",), True, (2, 1)),
        ("ü: 1\nlist:\n  - {k: [x, yy]}\n", ("list", 0, "k", 1), False, (3, 13)),
        ("ü: 1\nlist:\n  - {k: [x, yy]}\n", ("list", 0, "k"), True, (3, 6)),
        # What is not there stands where its parent does, an alias where it is written.
        ("a:\n  - b: 1\n", ("a", 0, "c"), False, (2, 5)),
        ("a:\n  - b: 1\n", ("a", 7), False, (2, 3)),
        ("a: &x [1, 2]\nb: *x\n", ("b",), False, (2, 4)),
        ("a: &x [1, 2]\nb: *x\n", ("b", 1), False, (1, 11)),
        ("a:\t1\t# note\n", ("a",), False, (1, 4)),  # a tab between words is only space
    ],
)
def test_positions_of_keys_values_and_items(text, path, key, place) -> None:
    assert grid_yaml.parse(text.encode(), "g.yaml").position(path, key=key) == place


def test_all_problems_of_the_composer_are_collected() -> None:
    found = problems(b"a: 1\na: 2\nb: !!str 3\nc: *nowhere\n")
    assert [(line, column) for line, column, _ in found] == [(2, 1), (3, 4), (4, 4)]
    assert "first on line 1" in found[0][2]


@pytest.mark.parametrize("start", ["", "\n \t"])
def test_json_may_be_indented_with_tabs(start: str) -> None:
    data = {"name": "g", "experiments": [{"axes": {"batch_size": [1, 2]}, "text": "a\tb \u00e9"}]}
    text = start + json.dumps(data, indent="\t")
    document = grid_yaml.parse(text.encode(), "g.json")
    assert document.data == data
    line, column = document.position(("experiments", 0, "axes", "batch_size", 1))
    assert text.splitlines()[line - 1][column - 1] == "2"


def test_a_binary_file_is_told_in_a_few_lines() -> None:
    found = problems(b"\x01\x02" * 5000)
    assert len(found) == grid_yaml.MAX_PROBLEMS_OF_TEXT + 1
    assert "text file" in found[-1][2]


def test_control_characters_cannot_hide_in_escapes() -> None:
    """A quoted "\\0" would be a NUL in a file name."""
    assert problems(b'a: "x\\0y"\n') == [(1, 4, "text with the control character U+0000")]


def test_windows_line_ends_change_nothing() -> None:
    unix = grid_yaml.parse(b"a: 1\nb: [x]\n", "g.yaml")
    windows = grid_yaml.parse(b"a: 1\r\nb: [x]\r\n", "g.yaml")
    assert windows.data == unix.data
    assert windows.position(("b", 0)) == unix.position(("b", 0)) == (2, 5)


_SIGNS = ["a", "b:", ":", "-", "[", "]", "{", "}", ",", "&x", "*x", "!t", "'", '"', "\\", "é"]
_SIGNS += ["1", "010", "null", "#", "|", ">", "?", "---", "...", "<<", "%", "@", "\t", "\n", "\n  "]
_YAMLISH = st.lists(st.sampled_from([*_SIGNS, *(f"{sign} " for sign in _SIGNS)]), max_size=30).map(
    "".join
)


#: PyYAML writes such text without quotes, since YAML 1.1 asks for a dot in a number; 1.2 does not.
_ONLY_A_NUMBER_SINCE = re.compile(r"[-+]?\d+[eE][-+]?\d+")
_TEXT = st.text(max_size=8).filter(lambda text: not _ONLY_A_NUMBER_SINCE.fullmatch(text))
_LEAF = st.none() | st.booleans() | st.integers(-(10**15), 10**15) | _TEXT
_TREE = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcé", max_size=3), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), _TREE))
def test_what_pyyaml_writes_is_read_back(data: dict[str, object]) -> None:
    written = yaml.safe_dump(data, allow_unicode=True)
    try:
        document = grid_yaml.parse(written.encode(), "g.yaml")
    except GridError as error:
        assert "control character" in str(error)
    else:
        assert document.data == data


def places(node: grid_yaml.Node) -> list[tuple[int, int, object]]:
    """The places of all that is written; the two parsers place an absent value differently."""
    if node.items is not None:
        return [(node.line, node.column, "[")] + [p for item in node.items for p in places(item)]
    if node.entries is None:
        return [] if node.scalar is None else [(node.line, node.column, node.scalar)]
    found: list[tuple[int, int, object]] = [(node.line, node.column, "{")]
    for key, (at, value) in node.entries.items():
        found += [(at.line, at.column, key)] * bool(key) + places(value)
    return found


@given(_YAMLISH)
def test_any_text_is_a_grid_error_or_the_same_document_with_and_without_libyaml(text: str) -> None:
    results = []
    for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grid_yaml, "LOADER", loader)
            try:
                results.append(grid_yaml.parse(text.encode(), "g.yaml"))
            except GridError as error:
                assert error.problems and "nothing was started" in str(error)
                assert all(problem.line is None or problem.line >= 1 for problem in error.problems)
                results.append(None)
    pure, fast = results
    if pure is not None and fast is not None:
        assert pure.data == fast.data
        assert places(pure.root) == places(fast.root)
