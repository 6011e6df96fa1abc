"""Reasons of UNSUPPORTED are true: what one says would be right is right, by the specs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal, get_args, get_origin

import pytest

from workloads.base import JobDescription
from workloads.devices import DEVICES
from workloads.engines import ENGINES, engines_for
from workloads.models.precision import PRECISIONS, support
from workloads.registry import WORKLOADS, WorkloadSpec
from workloads.rules import refusals as refusals_of

#: Of each setting that is no choice, a value that some device or engine lacks or is content with.
_NUMBERS = {"tensor_parallel": 2, "gradient_accumulation": 2, "prefetch_batches": 4}
_ENGINES = re.compile(rf"\bengines? ((?:{'|'.join(engines_for(None))})(?![\w-])(?: and [\w-]+)*)")
_WRITE = re.compile(r"(\w+): ([\w-]+)((?: as well)?(?: and \w+: [\w-]+)*)")
_LEAVE_OUT = re.compile(r"leave (\w+) out")


def _values(annotation: Any) -> Iterator[Any]:
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif kind is bool:
            yield True


def _jobs(entry: WorkloadSpec) -> Iterator[JobDescription]:
    """A job of each engine, precision and device, in some of two cards too, and one for each value
    of each setting beside them."""
    for engine in entry.engines:
        model = entry.model(engine)
        defaults = entry.validate({}, engine)
        variants = [defaults]
        for name, info in model.model_fields.items():
            tried = [*_values(info.annotation), *([_NUMBERS[name]] if name in _NUMBERS else [])]
            variants += [{**defaults, name: value} for value in tried if value != defaults[name]]
        cells = [*product(PRECISIONS, (1,)), *product(("bf16", "fp16", "int4"), (2,))]
        for device, parameters, (precision, cards) in product(DEVICES.own, variants, cells):
            yield JobDescription(
                model="tiny-chatglm3",
                dataset="advertisegen-synthetic",
                precision=precision,
                device=device,
                batch_size=8,
                cards=cards,
                parameters=parameters,
                engine=engine,
            )


def _remedies(
    text: str, asked: JobDescription, defaults: Mapping[str, Any]
) -> Iterator[JobDescription]:
    for match in _ENGINES.finditer(text):
        engines = re.split(" and ", match[1])
        yield from (replace(asked, engine=name) for name in engines if name != asked.engine)
    for match in _WRITE.finditer(text):
        pairs = dict(re.findall(r"(\w+): ([\w-]+)", match[0]))
        if pairs.keys() <= {*defaults, *asked.__dataclass_fields__}:
            yield _changed(asked, {name: _parsed(value) for name, value in pairs.items()})
    for match in _LEAVE_OUT.finditer(text):
        if match[1] in defaults:
            yield _changed(asked, {match[1]: defaults[match[1]]})


def _parsed(text: str) -> Any:
    words = {"true": True, "false": False}
    return int(text) if text.isdigit() else words.get(text, text)


def _changed(asked: JobDescription, values: Mapping[str, Any]) -> JobDescription:
    own = {name: value for name, value in values.items() if name in asked.__dataclass_fields__}
    parameters = {**asked.parameters, **{n: v for n, v in values.items() if n not in own}}
    return replace(asked, parameters=parameters, **own)


@pytest.mark.slow
def test_what_a_refusal_advises_lifts_it() -> None:
    met: set[tuple[str, ...]] = set()
    wrong = []
    for entry in WORKLOADS.values():
        for asked in _jobs(entry):
            refusals = refusals_of(entry, asked)
            if not all(refusal.unsupported for refusal in refusals):
                continue  # the grid is refused, and no row says anything
            for refusal in refusals:
                key = (entry.name, asked.engine, asked.device, refusal.reason, refusal.hint)
                if key in met:
                    continue
                met.add(key)
                text = f"{refusal.reason}; {refusal.hint}"
                for other in _remedies(text, asked, entry.validate({}, asked.engine)):
                    if refusal.setting in {each.setting for each in refusals_of(entry, other)}:
                        wrong.append(f"{entry.name} on {asked.device}, {asked.engine}: {text}")
    assert not wrong, "\n".join(wrong)
    assert len(met) > 40


@pytest.mark.parametrize(
    "ability", sorted({a for name in engines_for(None) for a in ENGINES[name].abilities} | {"none"})
)
def test_reasons_of_precisions_name_the_engines_with_the_ability(ability: str) -> None:
    for precision, device, name in product(PRECISIONS, DEVICES.own, ("", *engines_for(ability))):
        plain = support(precision, device, name)
        reason = support(precision, device, name, ability).reason
        assert reason.startswith(plain.reason)
        told = re.findall(r"[\w-]+", reason.removeprefix(plain.reason))
        named = {each for each in engines_for(None) if each in told}
        able = {
            each
            for each in engines_for(ability)
            if ENGINES[each].runs_on(device) and support(precision, device, each).supported
        }
        assert named == (set() if plain.supported else able), reason
        assert not (named and re.search(r"\bno engine\b", reason)), reason
        for other in re.findall(r"\bwrite (\w+)", reason):
            assert support(other, device, name).supported, reason
