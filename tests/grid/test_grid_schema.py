"""The JSON Schema of grids, the shipped grids and docs/grids.md: in step with the program."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from grid_cases import HEAD, grid, vocabulary

from orchestrator.cli.main import main
from orchestrator.core.errors import GridError
from orchestrator.grid.experiment import STRUCTURE, parse_range
from orchestrator.grid.parser import load_grid
from orchestrator.grid.schema import grid_schema, grid_schema_text
from orchestrator.grid.vocabulary import FIELD_NAMES, GridFile, MeasureBlock
from tools.documents.settings import document
from workloads.devices import DEVICES
from workloads.models.precision import PRECISIONS
from workloads.registry import WORKLOADS
from workloads.training.techniques import all_techniques
from workloads.training.techniques.strategy import Strategy

GRIDS = Path(__file__).resolve().parents[2] / "grids"
SHIPPED = sorted(GRIDS.glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(grid_schema())


@pytest.mark.slow
def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(grid_schema())
    text, whole = grid_schema_text(), grid_schema()
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        node = whole
        for step in reference.split("/"):
            node = node[step]


def test_the_committed_schema_is_up_to_date() -> None:
    committed = (GRIDS / "grid.schema.json").read_text(encoding="utf-8")
    assert committed == grid_schema_text(), "run: nightgrid schema > grids/grid.schema.json"


def test_every_setting_has_its_description_and_enumeration() -> None:
    settings = grid_schema()["$defs"]["setting"]
    models = [model for entry in WORKLOADS.values() for model in entry.setting_models()]
    parameters = {name for model in models for name in model.model_fields}
    assert set(settings) == {*FIELD_NAMES, *parameters}
    assert all(schema["description"] for schema in settings.values())
    assert settings["precision"]["enum"] == list(PRECISIONS)
    assert settings["workload"]["enum"] == list(WORKLOADS)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_grids_have_the_editor_header_and_satisfy_the_schema(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=grid.schema.json\n")
    values = yaml.safe_load(text)
    VALIDATOR.validate(values)
    assert values["name"] == path.stem and values["description"]


GOOD = [
    "  - {name: e, batch_size: {max: {cap: 4096, tolerance: 0.05}}}\n",
    "  - {name: e, axes: {batch_size: [best, max, {best: {cap: 64}}, {max: {tolerance: 0.1}}]}}\n",
    "  - {name: e, accelerator: [HPU, CPU], batch_size: max}\n",
    "  - {name: e, axes: {batch_size: [1..64 *2, max], input_tokens: [null, 5]}}\n",
    "  - {name: e, axes: {batch_size: 1..8, cards: 2}, exclude: [{batch_size: [1, 2]}]}\n",
    "  - {name: e, zip: {cards: [1, 2], prompts: [1, 2]}, measure: {warmup: 0}}\n",
    "  - {name: e, zip: [{cards: [1, 2], prompts: [1, 2]}], include: [{cards: 4, prompts: 1}]}\n",
]
WRONG = [
    "  - {name: e, batch_size: {max: {cap: 0}}}\n",
    "  - {name: e, batch_size: {max: {caps: 4}}}\n",
    "  - {name: e, batch_size: {max: null, best: null}}\n",
    "  - {name: e, axes: {batch_size: [{best: {tolerance: 1}}]}}\n",
    "  - {name: e, cards: {max: {cap: 4}}}\n",
    "  - {axes: {}}\n",
    "  - {name: e, batchsize: 1}\n",
    "  - {name: e, cards: [1]}\n",
    "  - {name: e, cards: 0}\n",
    "  - {name: e, precision: bp16}\n",
    "  - {name: e, axes: {precision: 1..4}}\n",
    "  - {name: e, axes: {batch_size: []}}\n",
    "  - {name: e, axes: {batch_size: 1..8 x2}}\n",
    "  - {name: e, axes: {workload: [text-generation]}}\n",
    "  - {name: e, exclude: [{}]}\n",
    "  - {name: e, zip: [{}]}\n",
    "  - {name: e, measure: {confidence: 1}}\n",
    "  - {name: e, attention: spda}\n",
    "  - 5\n",
    "  []\n",
]


@pytest.mark.parametrize("body", GOOD)
def test_schema_and_program_accept_the_same(body: str) -> None:
    assert grid(HEAD + body).jobs()
    VALIDATOR.validate(yaml.safe_load(HEAD + body))


@pytest.mark.parametrize("body", WRONG)
def test_schema_and_program_refuse_the_same(body: str) -> None:
    with pytest.raises(GridError):
        grid(HEAD + body)
    assert not VALIDATOR.is_valid(yaml.safe_load(HEAD + body))


def test_the_command_prints_the_schema_and_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from orchestrator.store.schema import column_names

    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == grid_schema()
    assert main(["schema", "results"]) == 0
    first_words = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert set(column_names()) <= set(first_words)


def test_every_precision_is_told_for_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "precisions"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {tuple(line.split()[:2]) for line in lines}
    assert told == {(p, d) for p in PRECISIONS for d in DEVICES}
    assert any(line.startswith("int8   hpu   unsupported: ") for line in lines)


DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "grids.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_load_and_satisfy_the_schema(example: str) -> None:
    assert grid(example).jobs()
    VALIDATOR.validate(yaml.safe_load(example))


def documented(section: str) -> dict[str, str]:
    """First cell -> second cell of the rows of a section's table."""
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*)", body, flags=re.MULTILINE)
    return {name: cell.strip().strip("`") for name, cell in rows}


def test_every_key_is_documented() -> None:
    assert len(EXAMPLES) >= 2
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


def test_every_technique_has_a_row_and_each_experiment_its_baseline() -> None:
    """Strategies have a grid of their own (chatglm3-finetune)."""
    jobs = load_grid(GRIDS / "techniques.yaml", vocabulary=vocabulary()).jobs()
    rows = [dict(job.parameters) for job in jobs]
    for kind in all_techniques():
        changed = any(
            row[name] != info.default for row in rows for name, info in kind.model_fields.items()
        )
        assert changed != (kind is Strategy), kind.title
    defaults = {
        name: info.default
        for kind in all_techniques()
        if kind is not Strategy
        for name, info in kind.model_fields.items()
    }
    for experiment in ("lora", "full", "gang"):
        own = [row for row, job in zip(rows, jobs, strict=True) if job.experiment == experiment]
        assert any(all(row[name] == value for name, value in defaults.items()) for row in own)
