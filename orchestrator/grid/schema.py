"""The JSON Schema of grid files, for editors, and the text of a first grid.

It is composed from the pydantic models that read a grid, so the two agree; `nightgrid plan` checks
what it cannot express. `nightgrid schema > grids/grid.schema.json` renews the committed copy.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from orchestrator.core.job import Accelerator, Job
from orchestrator.core.settings import CAP, FIELDS, GOALS, LARGEST_CAP, JobFields
from orchestrator.grid import SHIPPED_GRIDS
from orchestrator.grid.objectives import QuestionBlock, SearchBlock
from orchestrator.grid.vocabulary import (
    ExperimentBlock,
    GridFile,
    MeasureBlock,
    PricesBlock,
    Vocabulary,
)
from workloads.engines import ENGINES
from workloads.settings import Declaration, declarations

#: Pattern of a range; ``parse_range`` interprets it.
_RANGE = r"^\s*[0-9]{1,15}\s*\.\.\s*[0-9]{1,15}\s*([*+]\s*[0-9]{1,15})?\s*$"

_HEADER = "# yaml-language-server: $schema=grid.schema.json"

Schema = dict[str, Any]


def grid_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a grid file."""
    settings = _settings(Vocabulary.installed(check_data=False))
    top = _properties(GridFile)
    top["defaults"] |= _mapping({name: _ref("setting", name) for name in settings})
    top["defaults"]["properties"]["accelerator"] = _one_or_list(_ref("setting", "accelerator"))
    top["measure"] = {"$ref": "#/$defs/measure"}
    top["prices"] |= _mapping(_properties(PricesBlock))
    top["search"] |= _mapping(_properties(SearchBlock))
    top["questions"]["items"] = {**_mapping(_properties(QuestionBlock)), "required": ["best"]}
    top["experiments"]["items"] = {"$ref": "#/$defs/experiment"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Nightgrid grid file",
        "description": f"What to measure. First line for editors: {_HEADER}",
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "experiments"],
        "properties": top,
        "$defs": {
            "experiment": _experiment(settings),
            "measure": {
                "description": "Timing of jobs; a key that is missing keeps its default.",
                **_mapping(_properties(MeasureBlock)),
            },
            "setting": settings,
            "values": {name: _values(name, schema) for name, schema in settings.items()},
        },
    }


def grid_schema_text() -> str:
    """The schema as it is committed and printed."""
    return json.dumps(grid_schema(), indent=2, ensure_ascii=False) + "\n"


def _ref(kind: str, name: str) -> Schema:
    return {"$ref": f"#/$defs/{kind}/{name}"}


def _mapping(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _one_or_list(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "array", "minItems": 1, "items": schema}]}


def _properties(model: type[BaseModel]) -> dict[str, Schema]:
    """The schemas of a model's fields, without titles, the description first."""
    schema = model.model_json_schema()
    properties = {}
    for name, own in _inlined(schema["properties"], schema.get("$defs", {})).items():
        first = {key: own[key] for key in ("description",) if key in own}
        properties[name] = first | {key: value for key, value in own.items() if key != "title"}
    return properties


def _inlined(schema: Any, definitions: Schema) -> Any:
    """A schema without references, such as pydantic makes for enumerations."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**target, **rest}, definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _settings(vocabulary: Vocabulary) -> dict[str, Schema]:
    settings = {
        name: {**schema, "description": f"{schema['description']} (Role: {FIELDS[name].role}.)"}
        for name, schema in _properties(JobFields).items()
    }
    settings["batch_size"]["anyOf"].append(_searches())
    settings["workload"]["enum"] = list(vocabulary.workloads)
    settings["accelerator"]["enum"] = list(Accelerator)
    settings["precision"]["enum"] = list(vocabulary.precisions)
    engines = [name for entry in vocabulary.workloads.values() for name in entry.engines]
    settings["engine"]["enum"] = list(dict.fromkeys(engines))
    for workload, entry in vocabulary.workloads.items():
        _add(settings, entry.parameters, f"Parameter of {workload}")
    for spec in ENGINES.values():
        for ability in spec.abilities:
            if model := spec.settings(ability):
                _add(settings, model, f"Setting of the engine {spec.name}")
    if "slo" in settings:  # limits are also written as a mapping
        kind = settings["slo"].pop("type")
        limits = {"type": "object", "additionalProperties": {"type": "number"}}
        settings["slo"]["anyOf"] = [{"type": kind}, limits]
    return settings


def _searches() -> Schema:
    """The mapping that asks for a search: ``{max: {cap: 4096, tolerance: 0.05}}``."""
    limits = _mapping(
        {
            "cap": {
                "type": "integer",
                "minimum": 1,
                "maximum": LARGEST_CAP,
                "description": f"The largest size that is tried; {CAP} if left out.",
            },
            "tolerance": {
                "type": "number",
                "minimum": 0,
                "exclusiveMaximum": 1,
                "description": "max: by how much of it a larger size may be missed. best: how much "
                "slower counts as equal.",
            },
        }
    )
    return {
        **_mapping({goal: {"anyOf": [limits, {"type": "null"}]} for goal in GOALS}),
        "minProperties": 1,
        "maxProperties": 1,
    }


def _add(settings: dict[str, Schema], model: type[BaseModel], whose: str) -> None:
    """Add the settings of a model; where two share a name, either meaning is fine here."""
    declared = declarations(model)
    for name, schema in _properties(model).items():
        declaration = declared.get(name)
        role = f", role {declaration.role}" if declaration is not None else ""
        text = schema.get("description", "")
        described = settings[name]["description"] if name in settings else text
        if text not in described:
            described = f"{described} {text}"
        one = _undescribed(_with_old_names(schema, declaration))
        known = _undescribed(settings.get(name, one))
        either = known if known in (one, {"anyOf": [one]}) else {"anyOf": [known, one]}
        settings[name] = {"description": f"{described} ({whose}{role}.)".strip(), **either}


def _with_old_names(schema: Schema, declaration: Declaration | None) -> Schema:
    """The schema of a setting that also takes the names which its values had earlier."""
    if declaration is None or not declaration.renamed:
        return schema
    old = [
        {"const": before, "deprecated": True, "description": f"It is called {now} now."}
        for before, now in declaration.renamed.items()
    ]
    return {"default": schema.get("default"), "anyOf": [_undescribed(schema), *old]}


def _undescribed(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "description"}


def _values(name: str, schema: Schema) -> Schema:
    """A value, a range where numbers are meant, or a list of both."""
    one = [_ref("setting", name)]
    if "integer" in json.dumps(schema):
        one.append({"type": "string", "pattern": _RANGE, "description": "A range: 1..64 *2"})
    many = {"type": "array", "minItems": 1, "items": {"anyOf": one} if len(one) > 1 else one[0]}
    return {"description": schema.get("description", ""), "anyOf": [*one, many]}


def _experiment(settings: dict[str, Schema]) -> Schema:
    own = _properties(ExperimentBlock)
    varying = {name: _ref("values", name) for name in settings if name != "workload"}
    point = _mapping(varying)
    group = {**point, "minProperties": 1}
    own["axes"] |= point
    own["zip"] |= {"anyOf": [group, {"type": "array", "items": group}]}
    own["zip"].pop("default", None)
    own["include"]["items"] = point
    own["exclude"]["items"] = group
    own["measure"] = {"$ref": "#/$defs/measure"}
    own |= {name: _ref("setting", name) for name in settings}
    own["accelerator"] = _one_or_list(_ref("setting", "accelerator"))
    return {**_mapping(own), "required": ["name"]}


_WIDTH = 96
BATCH_SIZES, ONE_BATCH_SIZE = "1..16 *2          # 1, 2, 4, 8, 16", "1"


def name_of(model: str, file: str = "grid.yaml") -> str:
    """Name of a grid: its file's, so that two files are two runs; of a default file the last part
    of the model's path or hub id."""
    stem = re.sub(r"\.ya?ml$", "", re.split(r"[/\\]", file)[-1])
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1] if stem == "grid" else stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("._-")[:48] or "first"


def first_grid(
    fields: Mapping[str, str],
    *,
    precisions: Sequence[str],
    axes: Mapping[str, str],
    others: Sequence[str],
    settings: Mapping[str, Declaration],
    file: str,
) -> str:
    """Text of a first grid file.

    ``fields`` are those of every job (workload, model, dataset, accelerator); ``precisions`` are an
    axis beside ``axes``, whose values are text; ``others`` are further workloads for the model;
    ``settings`` are the workload's, shown with their defaults.
    """
    also = f"  # or: {', '.join(others)}" if others else ""
    lines = [
        f"# yaml-language-server: $schema={SHIPPED_GRIDS / 'grid.schema.json'}",
        "# A first grid. Each line of `axes:` multiplies the jobs; every job is one measurement.",
        "#",
        f"#   nightgrid plan {file}                 every job, and why some will not run",
        f"#   nightgrid run {file} --emulate 1x2    tried on two emulated cards of this machine",
        f"#   nightgrid run {file}                  measured on the cards that are there",
        "#",
        "# `nightgrid plan` says what is wrong with it, where, and what would be right.",
        "",
        f"name: {name_of(fields['model'], file)}",
        "",
        "defaults:",
        *(
            f"  {name}: {_value(value)}{also if name == 'workload' else ''}"
            for name, value in fields.items()
        ),
        "",
        "experiments:",
        "  - name: precision-and-batch",
        "    axes:",
        f"      precision: [{', '.join(precisions)}]",
        *(f"      {name}: {values}" for name, values in axes.items()),
        "",
        "# What else may stand under `defaults:`, in an experiment, or as an axis, with its",
        "# default:",
        "#",
    ]
    for name, declared in settings.items():
        default = "" if declared.default is ... else f" {_value(declared.default)}"
        lines.append(f"#   {name}:{default}")
        sentence = re.split(r"(?<=[.!?])\s", declared.description, maxsplit=1)[0]
        lines += [f"#       {line}" for line in textwrap.wrap(sentence, width=_WIDTH - 8)]
    return "\n".join(lines) + "\n"


def one_job_grid(job: Job, name: str, about: Sequence[str]) -> str:
    """Text of the grid of one job, with lines about it as a comment."""
    settings = {one: getattr(job, one) for one in FIELDS} | dict(job.parameters)
    stops = {
        one.name: getattr(job.measure, one.name)
        for one in fields(job.measure)
        if getattr(job.measure, one.name) != one.default
    }
    lines = [f"# {line}".rstrip() for line in about]
    lines += [f"name: {name}", "experiments:", f"  - name: {_value(job.experiment)}"]
    lines += [f"    {one}: {_value(value)}" for one, value in settings.items() if value is not None]
    lines += [f"    measure: {json.dumps(stops)}"] if stops else []
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """A value as YAML has it: JSON is YAML, and plain words need no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z~./][\w./~-]*", value):
        return value
    return json.dumps(value, ensure_ascii=False)
