"""Values that the command line sets in a grid: what changes, what stays, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import GridError
from orchestrator.grid.parser import load_grid, overridden
from orchestrator.grid.yaml import parse

GRID = """\
name: night
defaults:
  workload: text-generation
  model: tiny-chatglm3
experiments:
  - name: first
    dataset: advertisegen-sample
    axes:
      batch_size:
        - 1
        - 2
      precision: [fp32, bf16]
    measure: {max_repeats: 3}
  - {name: v1.second, dataset: advertisegen-sample, axes: {}}
  - axes:
    name: third
"""


def changed(*texts: str) -> dict[str, Any]:
    document = overridden(parse(GRID.encode(), "g.yaml"), texts)
    assert parse(document.text.encode(), "g.yaml").data == document.data
    return document.data


TEXTS = ("1..4", "1..64 *2", "a'b", "a: b # c")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "first.", "v1.second.", "third."]),
            st.sampled_from(["axes.batch_size", "axes.precision", "measure.seed", "dataset", "zz"]),
            st.sampled_from([("7", 7), ("[1, x]", [1, "x"]), *((text, text) for text in TEXTS)]),
        ),
        max_size=5,
    )
)
def test_a_value_stands_where_its_path_says_and_nothing_else_changes(
    edits: list[tuple[str, str, tuple[str, object]]],
) -> None:
    expected = copy.deepcopy(parse(GRID.encode(), "g.yaml").data)
    for name, path, (_, value) in edits:
        for experiment in expected["experiments"]:
            if name in ("", experiment["name"] + "."):
                *groups, key = path.split(".")
                here = experiment
                for group in groups:
                    here[group] = here.get(group) or {}
                    here = here[group]
                here[key] = value
    assert changed(*(f"{name}{path}={text}" for name, path, (text, _) in edits)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size", "has no value"),
        ("axes=3", "leads to nothing"),
        ("fourth.axes.batch_size=3", "leads to nothing"),
        ("axes.batch_size.deep=3", "leads to nothing"),
        (".=3", "leads to nothing"),
        ("axes.batch_size=[1,", "is no list"),
        ("measure.time_limit_s=.inf", "not a finite number"),
        ("model=a\x7fb", "control character"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(text: str, message: str) -> None:
    with pytest.raises(GridError, match=message) as refused:
        changed(text)
    assert f"--set {text}" in str(refused.value)


def test_an_alias_is_changed_where_it_stands_alone() -> None:
    grid = "a: &b {x: 1}\nexperiments:\n- name: x\n  axes: *b\n"
    data = overridden(parse(grid.encode(), "g.yaml"), ["axes.batch_size=3"]).data
    assert data == {
        "a": {"x": 1},
        "experiments": [{"name": "x", "axes": {"x": 1, "batch_size": 3}}],
    }


def test_an_unknown_key_is_refused_as_in_the_file(tmp_path: Path) -> None:
    grid = tmp_path / "g.yaml"
    grid.write_text(GRID.split("  - {name")[0])
    with pytest.raises(GridError) as refused:
        load_grid(grid, overrides=["axes.batchsize=3"])
    assert 'unknown key "batchsize"' in str(refused.value)
    assert "(with --set axes.batchsize=3)" in str(refused.value)
