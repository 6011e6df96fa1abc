"""Atlases: what is known of each cell of a grid, and bundles of several sites made one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Nightgrid
from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import Night, a_job

from orchestrator.core.errors import StoreError
from orchestrator.core.job import State
from orchestrator.grid.parser import load_grid
from orchestrator.report.atlas import (
    CARD,
    EMULATED,
    NOBODY,
    Atlas,
    Cell,
    Evidence,
    atlas_of,
    from_json,
    merged,
    to_json,
)
from orchestrator.store.store import Store

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------- laws of merging

evidence = st.builds(
    Evidence,
    invocation_id=st.sampled_from("ab"),
    attempt_id=st.sampled_from(["x-1", "x-2"]),
    status=st.sampled_from([EMULATED, CARD]),
    state=st.sampled_from(["SUCCEEDED", "FAILED"]),
    date=st.sampled_from(["2026-11-22", "2026-11-23"]),
    device_name=st.sampled_from(["GAUDI2", "GAUDI3"]),
    reason=st.just(""),
    throughput=st.none() | st.floats(0, 9),
    unit=st.just("tokens/s"),
    random_weights=st.booleans(),
    software=st.just(("torch 2.10.0",)),
)


@st.composite
def atlases(draw: Any) -> Atlas:
    names = draw(st.lists(st.sampled_from("pqrs"), unique=True))
    cells = []
    for name in names:
        rows = draw(st.lists(evidence, max_size=3, unique_by=lambda each: each.key))
        plain = {"experiment": "e", "model": f"m-{name}", "engine": "o", "precision": "bf16"}
        plain |= {"accelerator": "HPU", "batch_size": "1", "job_id": name}
        cells.append(Cell(**plain, cards=1, evidence=tuple(rows)))
    return Atlas(grid="g", cells=tuple(cells))


def known(atlas: Atlas) -> dict[str, tuple[Evidence, ...]]:
    return {cell.job_id: cell.evidence for cell in atlas.cells}


@given(atlases(), atlases(), atlases())
def test_it_does_not_matter_who_merges_what_first_or_twice(a: Atlas, b: Atlas, c: Atlas) -> None:
    assert known(merged(a, b)) == known(merged(b, a))
    assert (
        known(merged(merged(a, b), c)) == known(merged(a, merged(b, c))) == known(merged(a, b, c))
    )
    assert merged(merged(a, b), b) == merged(a, b)
    for site in (a, b):
        for cell in site.cells:
            keys = {each.key for each in known(merged(a, b))[cell.job_id]}
            assert keys >= {each.key for each in cell.evidence}


@given(atlases())
def test_a_bundle_holds_all_of_an_atlas(atlas: Atlas) -> None:
    text = to_json(atlas)
    assert from_json(text, "f") == atlas and to_json(from_json(text, "f")) == text
    assert sum(atlas.counts().values()) == len(atlas.cells)


@given(atlases(), st.data())
def test_a_bundle_with_something_else_in_it_is_refused(atlas: Atlas, data: Any) -> None:
    whole = json.loads(to_json(atlas))
    places: list[tuple[Any, Any]] = [(whole, "cells"), (whole, "grid"), (whole, "format")]
    for cell in whole["cells"]:
        places += [(cell, name) for name in cell if name != "status"]
        places += [(each, name) for each in cell["evidence"] for name in each]
    holder, name = data.draw(st.sampled_from(places))
    holder[name] = {"no": "such"}
    with pytest.raises(StoreError, match=r"^f"):
        from_json(json.dumps(whole), "f")


def test_what_is_no_bundle_or_one_of_another_grid_is_refused() -> None:
    for text in ("", "[]", "{", "7", '{"format": "nightgrid-atlas-9"}', "[" * 9999):
        with pytest.raises(StoreError, match=r"f is not an? (valid )?atlas bundle"):
            from_json(text, "f")
    with pytest.raises(StoreError, match="an atlas of b cannot be merged into one of a"):
        merged(Atlas(grid="a", cells=()), Atlas(grid="b", cells=()))


# ---------------------------------------------------------------- of rows


def test_a_cell_is_known_by_where_its_rows_ran() -> None:
    """On a card; under a stand-in, whose device says so; emulated by the host alone is nobody. A
    failure on a card is known, too, and a success is shown before it."""
    night = Night(emulated=False)
    cells = [a_job(batch_size=size) for size in (1, 2, 4, 8, 16)]
    real, standin, emulated, unsupported, _ = cells
    night.add(real, state=State.FAILED, recorded_at=2e9)
    night.add(real, recorded_at=1e9, invocation_id="night-2")
    name = "GAUDI2 (stand-in on CPU)"
    night.add(standin, emulated=True, device_name=name, recorded_at=1.5e9)
    night.add(emulated, emulated=True, device_name="AMD EPYC 9B14")
    night.add(unsupported, state=State.UNSUPPORTED)
    found = atlas_of("g", cells, night.rows)
    assert [cell.status for cell in found.cells] == [CARD, EMULATED, NOBODY, NOBODY, NOBODY]
    assert found.counts() == {CARD: 1, EMULATED: 1, NOBODY: 3}
    first = found.cells[0]
    assert [each.state for each in first.evidence] and len(first.evidence) == 2
    assert {one.date for one in first.evidence} == {"2001-09-09", "2033-05-18"}
    assert [one.date for one in found.cells[1].evidence] == ["2017-07-14"]


@pytest.mark.slow
def test_the_gaudi_atlas_is_made_merged_and_kept(tmp_path: Path, nightgrid: Nightgrid) -> None:
    grid = ROOT / "grids/gaudi-atlas.yaml"
    jobs = load_grid(grid, check_data=False).jobs()
    assert len({each.model for each in jobs}) >= 25
    assert {each.engine for each in jobs} == {"optimum-habana", "vllm-gaudi"}
    bundles, known = [], []
    for number, changes in enumerate(({}, {"emulated": True, "device_name": "GAUDI3 (stand-in)"})):
        night = Night(emulated=False)
        night.add(jobs[number], **changes, invocation_id=f"site-{number}")
        with Store(tmp_path / str(number), "gaudi-atlas") as store:
            for row in night.rows:
                store.append(dataclasses.replace(row, run="gaudi-atlas"))
        bundle = tmp_path / f"{number}.json"
        export = ("export", bundle, "--atlas", grid, "--results", tmp_path / str(number))
        written = nightgrid(*export, "--json").json["written"]
        known.append((written[CARD], written[EMULATED]))
        bundles.append((bundle, export))
    assert known == [(1, 0), (0, 1)]
    texts = []
    for (bundle, export), (other, _) in zip(bundles, reversed(bundles), strict=True):
        for _ in range(2):
            nightgrid(*export, "--merge", other)
        texts.append(bundle.read_text())
    assert texts[0] == texts[1]
    assert from_json(texts[0], "f").counts() == {CARD: 1, EMULATED: 1, NOBODY: len(jobs) - 2}


def test_a_bundle_that_cannot_be_read_costs_nothing(tmp_path: Path, nightgrid: Nightgrid) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text("mine")
    grid = ("--atlas", ROOT / "grids/gaudi-atlas.yaml", "--results", tmp_path / "none")
    refusals = {"missing.json": "cannot read", "mine.json": "is not a valid atlas bundle"}
    for wrong, words in refusals.items():
        assert words in nightgrid("export", mine, *grid, "--merge", tmp_path / wrong, code=4).err
    assert mine.read_text() == "mine"
    nightgrid("export", "x", "--to", "datasets", "--merge", "y", code=4)
