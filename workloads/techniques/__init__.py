"""Training techniques, one file each, behind the seam of ``base.py``.

To add one, write ``NAME.py`` with its class as ``SPEC``, or name a class of another installed
package under the entry points ``nightgrid.techniques`` (docs/adding-a-technique.md). Grids, their
schema, the plan and fine-tuning find it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from workloads.declared import Declared
from workloads.finetuning_method import MethodParameters
from workloads.refusal import Asked
from workloads.techniques.base import Technique

#: Every technique by name; nobody else's takes the place of one of ours.
TECHNIQUES: Declared[type[Technique]] = Declared(__name__, Technique, "nightgrid.techniques")


@cache
def all_techniques() -> tuple[type[Technique], ...]:
    """Every technique, in the order in which they act at each point. One of another package whose
    setting has the name of another one's, of the method's or of a job's field is left out, with a
    warning."""
    found: dict[str, type[Technique]] = {}
    settings = {each.name: "a job" for each in fields(Asked)}  # name -> whatever has it
    settings |= dict.fromkeys(MethodParameters.model_fields, "the method of fine-tuning")
    for name in TECHNIQUES:  # ours come first
        kind = TECHNIQUES[name]
        if twice := settings.keys() & kind.model_fields.keys():
            taken = min(twice)
            told = f"technique {name}: {settings[taken]} has a setting {taken} already; rename one"
            if name in TECHNIQUES.own:
                raise TypeError(told)
            logging.getLogger("nightgrid.techniques").warning("left out: %s", told)
            continue
        found[name] = kind
        settings |= dict.fromkeys(kind.model_fields, name)
    return tuple(sorted(found.values(), key=lambda kind: (kind.order, kind.name)))


def chosen(parameters: Mapping[str, Any]) -> tuple[Technique, ...]:
    """Every technique, set as the parameters of a job say."""
    return tuple(
        kind.model_validate({name: parameters[name] for name in kind.model_fields})
        for kind in all_techniques()
    )
