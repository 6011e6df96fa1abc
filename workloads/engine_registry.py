"""All engines by name."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from workloads.declared import Declared

if TYPE_CHECKING:
    from workloads.engines.base import EngineSpec

#: Every engine that a grid may name.
ENGINES: Declared[EngineSpec] = Declared(
    {
        "diffusers": "workloads.engines.diffusers",
        "graph": "workloads.engines.graph",
        "onnxruntime": "workloads.engines.onnxruntime",
        "openvino": "workloads.engines.openvino",
        "optimum-habana": "workloads.engines.optimum_habana",
        "transformers": "workloads.engines.transformers",
        "vllm": "workloads.engines.vllm",
        "vllm-gaudi": "workloads.engines.vllm_gaudi",
    },
    "workloads.engines.base:EngineSpec",
    "nightgrid.engines",
)


@cache
def default_engine(ability: str | None = None) -> str:
    """The engine of a job whose grid names none: the declared default if it has the ability, else
    the first of ours that has."""
    able = [spec for spec in ENGINES.known() if ability is None or ability in spec.abilities]
    chosen = [spec.name for spec in able if spec.default] or [spec.name for spec in able]
    return chosen[0] if chosen else next(iter(engines_for(ability)), "")


def engines_for(ability: str | None) -> tuple[str, ...]:
    """The names of all engines with an ability, the default first; None: of all engines."""
    able = [spec for spec in ENGINES.values() if ability is None or ability in spec.abilities]
    return tuple(spec.name for spec in sorted(able, key=lambda spec: not spec.default))
