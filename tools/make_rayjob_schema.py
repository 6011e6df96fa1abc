"""Make tests/rayjob.schema.json, by which the manifests in clusters/ are checked.

    git clone --depth 1 --branch v1.7.0 https://github.com/ray-project/kuberay
    python tools/make_rayjob_schema.py kuberay/ray-operator/config/crd/bases/ray.io_rayjobs.yaml \\
      --version 1.7.0

It takes KubeRay's definition of a RayJob and says the same in JSON Schema: unknown keys are
refused, as the API server refuses or drops them, and a part that occurs more than once, such as
the template of a pod, is written once. Descriptions, defaults, the status and the rules in
Kubernetes' own language (``x-kubernetes-validations``) are left out, which makes 39 kB of 1.4 MB.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "ray-operator/config/crd/bases/ray.io_rayjobs.yaml"
VERSION = "v1"  # of the RayJob, in KubeRay's words

#: A part gets a definition of its own if it occurs twice and is at least so long.
_WORTH_NAMING = 120
_KEPT = ("type", "properties", "required", "items", "enum", "pattern", "additionalProperties")
_KEPT += ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "anyOf")
_KEPT += ("oneOf", "allOf", "not", "nullable")


def schema_of(definition: dict[str, Any], release: str) -> dict[str, Any]:
    """The schema of a RayJob manifest, from the custom resource definition of this release."""
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    whole = closed(versions[VERSION]["schema"]["openAPIV3Schema"])
    whole["properties"].pop("status", None)
    whole["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{VERSION}"}
    whole["properties"]["kind"] = {"const": definition["spec"]["names"]["kind"]}
    whole["required"] = ["apiVersion", "kind", "metadata", "spec"]
    parts = Counter(_parts(whole))
    names = {
        text: f"part-{number}"
        for number, text in enumerate(
            sorted(text for text, times in parts.items() if times > 1), start=1
        )
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": (
            f"Made by tools/make_rayjob_schema.py from {SOURCE} of "
            f"https://github.com/ray-project/kuberay, release {release}. Copyright of the "
            "definition: the KubeRay authors, Apache License 2.0."
        ),
        **{key: _named(value, names) for key, value in whole.items()},
        "$defs": {
            name: {key: _named(value, names) for key, value in json.loads(text).items()}
            for text, name in names.items()
        },
    }


def closed(schema: Any) -> Any:
    """One schema of a definition in the words of JSON Schema, with unknown keys refused."""
    made = {key: schema[key] for key in _KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    for key in ("items", "additionalProperties", "not"):
        if isinstance(made.get(key), dict):
            made[key] = closed(made[key])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in made:
            made[key] = [closed(choice) for choice in made[key]]
    if "properties" in made:
        made["properties"] = {name: closed(part) for name, part in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [made["type"], "null"]
    return made


def _parts(schema: Any) -> list[str]:
    """Every object schema in this one that is worth a name, as text, once for each occurrence."""
    found = []
    if isinstance(schema, dict):
        for key, value in schema.items():
            inner = value.values() if key == "properties" else [value]
            for part in inner:
                if isinstance(part, dict) and len(text := _text(part)) >= _WORTH_NAMING:
                    found.append(text)
                found += _parts(part)
    elif isinstance(schema, list):
        for part in schema:
            found += _parts(part)
    return found


def _named(schema: Any, names: dict[str, str]) -> Any:
    """The schema with its repeated parts referred to by name."""
    if isinstance(schema, list):
        return [_named(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if (name := names.get(_text(schema))) is not None:
        return {"$ref": f"#/$defs/{name}"}
    return {key: _named(value, names) for key, value in schema.items()}


def _text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))


def main() -> None:
    """Read the definition, write the schema."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("definition", type=Path, help=f"KubeRay's {SOURCE}")
    parser.add_argument("--version", required=True, help="KubeRay's release, such as 1.7.0")
    parser.add_argument("--to", type=Path, default=ROOT / "tests" / "rayjob.schema.json")
    args = parser.parse_args()
    definition = yaml.safe_load(args.definition.read_text(encoding="utf-8"))
    text = json.dumps(schema_of(definition, args.version), sort_keys=True, separators=(",", ":"))
    args.to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
