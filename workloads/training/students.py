"""Students: smaller models made from a larger one, for distillation.

A student with fewer layers keeps every n-th layer of its teacher, with its weights, as DistilBERT
does. One of another width has the teacher's heads in their size, fewer of them, and new weights.
"""

from __future__ import annotations

import copy
import math
import re
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration

if TYPE_CHECKING:
    import torch

#: Inner channels of a narrower student are a multiple of so many.
_VECTOR = 8


def layers_kept(there: int, wanted: int) -> list[int]:
    """The layers of a teacher that a student has: evenly spread, from the first on."""
    return [index * there // wanted for index in range(wanted)]


def make_student(teacher: Any, layers: int | None, hidden: int | None) -> torch.nn.Module:
    """A student of so many layers and of this width; what is None is as in the teacher.

    Raises:
        BadConfiguration: the teacher has fewer layers, or heads of a size that does not divide the
            width.
    """
    config = copy.deepcopy(teacher.config)
    there = int(config.num_hidden_layers)
    wanted = layers or there
    if hidden is None and wanted > there:
        raise BadConfiguration(f"student_layers {wanted}: the teacher has {there} to copy")
    kept = layers_kept(there, wanted)
    config.num_hidden_layers = wanted
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index % there] for index in kept]
    if hidden is not None:
        _narrow(config, hidden)
    student = type(teacher)(config).to(teacher.dtype).to(teacher.device)
    if getattr(teacher, "generation_config", None) is not None:
        # It says what ends a text; a new model has one made from its config instead.
        student.generation_config = copy.deepcopy(teacher.generation_config)
    if hidden is None:
        student.load_state_dict(_renumbered(teacher, kept))
        student.tie_weights()
    return student  # type: ignore[no-any-return]


def head_size(config: Any) -> int:
    """Channels of one attention head."""
    return int(getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads)


def _narrow(config: Any, hidden: int) -> None:
    size = head_size(config)
    if hidden % size:
        raise BadConfiguration(
            f"student_hidden {hidden}: the teacher's heads have {size} channels, which do not "
            f"divide it; {hidden // size * size or size} would do"
        )
    heads = hidden // size
    inner = config.intermediate_size * hidden / config.hidden_size
    config.intermediate_size = max(_VECTOR, round(inner / _VECTOR) * _VECTOR)
    config.hidden_size, config.num_attention_heads = hidden, heads
    config.head_dim = size
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = math.gcd(config.num_key_value_heads, heads)


def _renumbered(teacher: Any, kept: list[int]) -> dict[str, torch.Tensor]:
    """The teacher's tensors under the student's names, those of other layers left out."""
    import torch

    count = teacher.config.num_hidden_layers
    (prefix,) = [
        name
        for name, module in teacher.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ][:1] or [""]
    layer = re.compile(rf"{re.escape(prefix)}\.(\d+)\.(.+)")
    found = {}
    for name, tensor in teacher.state_dict().items():
        match = layer.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        for place, index in enumerate(kept):
            if index == int(match[1]):
                found[f"{prefix}.{place}.{match[2]}"] = tensor
    return found
