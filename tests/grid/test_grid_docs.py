"""docs/grids.md: its examples load, and it leaves no key out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from grid_cases import grid

from orchestrator.grid.axes import parse_range
from orchestrator.grid.experiment import STRUCTURE
from orchestrator.grid.schema import grid_schema
from orchestrator.grid.vocabulary import GridFile, MeasureBlock
from tools.documents.settings import document
from workloads.models.precision import PRECISIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "grids.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_load_and_satisfy_the_schema(example: str) -> None:
    import jsonschema

    assert grid(example).jobs()
    jsonschema.Draft202012Validator(grid_schema()).validate(yaml.safe_load(example))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def documented(section: str) -> dict[str, str]:
    """First cell -> second cell of the rows of a section's table."""
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*)", body, flags=re.MULTILINE)
    return {name: cell.strip().strip("`") for name, cell in rows}


def test_every_key_is_documented() -> None:
    assert set(documented("Top level")) == set(GridFile.model_fields)
    experiment = {key for key in documented("Experiments") if ".." not in key}
    assert experiment == set(STRUCTURE)


def test_the_measure_block_is_documented_with_its_defaults() -> None:
    measure = {name: yaml.safe_load(text) for name, text in documented("measure").items()}
    assert measure == MeasureBlock().model_dump()


def test_the_page_of_settings_is_made_from_the_declarations() -> None:
    """`python -m tools.documents.settings > docs/settings.md` renews it."""
    assert document() == (DOCS / "settings.md").read_text(encoding="utf-8")


def test_every_precision_is_named() -> None:
    assert all(f"`{precision}`" in TEXT for precision in PRECISIONS)


def test_ranges_mean_what_the_document_says() -> None:
    rows = re.findall(r"^\| `([0-9][^`]*)` \| ([0-9, ]+) \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == 3
    for text, numbers in rows:
        assert list(parse_range(text)) == [int(n) for n in numbers.split(",")]  # type: ignore[arg-type]
