"""Teaching of a student by a larger model: the student, the loss, and kept logits of the teacher.

A student with fewer layers keeps every n-th layer of its teacher, with its weights, as DistilBERT
does. One of another width has the teacher's heads in their size, fewer of them, and new weights.
The loss of a position is α·T²·KL(teacher ‖ student) + (1 − α)·cross entropy, both distributions at
temperature T, in float32; T² makes up for gradients that fall with it. Kept logits are the largest
of each learned position: a training of many epochs pays for the teacher once.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import BadConfiguration
from workloads.data.cache import cached_directory
from workloads.training.data import NOT_LEARNED

if TYPE_CHECKING:
    import torch

    from workloads.training.data import TrainingSample

#: Logits of a position that are kept.
LARGEST = 64
_FORMAT = 1


def summed_kl(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """KL divergence of the student from the teacher, summed over labelled positions.

    Args:
        student: logits [positions, vocabulary].
        teacher: the same of the teacher.
        labels: [positions]; -100 where nothing is learned.
        temperature: that both are divided by.
    """
    import torch

    log_student = torch.log_softmax(student.float() / temperature, -1)
    log_teacher = torch.log_softmax(teacher.float() / temperature, -1)
    each = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    return (each * (labels != NOT_LEARNED)).sum()


def summed_kl_of_largest(
    student: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """As ``summed_kl``, from the teacher's largest logits [positions, kept] and their ids."""
    import torch

    log_student = torch.log_softmax(student.float() / temperature, -1).gather(-1, ids)
    log_teacher = torch.log_softmax(values.float() / temperature, -1)
    each = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    return (each * (labels != NOT_LEARNED)).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLogits:
    """A teacher's largest logits at the learned positions of samples, on disk."""

    rows: dict[tuple[int, ...], tuple[int, int]]  # a sample's ids and prompt -> from row, count
    values: Any  # [rows, kept], float32, mapped
    ids: Any  # [rows, kept], int32, mapped
    made_s: float  # 0: they were there
    nbytes: int

    def has(self, samples: Sequence[TrainingSample]) -> bool:
        """Tell if all of these are there; those that are held out are not."""
        return all(_key(sample) in self.rows for sample in samples)

    def of(self, samples: Sequence[TrainingSample], positions: int) -> tuple[Any, Any]:
        """Values and ids [samples, positions, kept] of padded samples; 0 elsewhere."""
        import torch

        shape = (len(samples), positions, self.values.shape[1])
        values = torch.zeros(shape)
        ids = torch.zeros(shape, dtype=torch.long)
        for row, sample in enumerate(samples):
            start, count = self.rows[_key(sample)]
            first = sample.prompt_tokens - 1  # predicts the first learned token
            values[row, first : first + count] = torch.from_numpy(
                self.values[start : start + count].copy()
            )
            ids[row, first : first + count] = torch.from_numpy(
                self.ids[start : start + count].astype("int64")
            )
        return values, ids


def keep_logits(
    samples: Sequence[TrainingSample],
    teacher: str,
    largest: Callable[[Sequence[TrainingSample]], list[tuple[Any, Any]]],
    at_once: int,
) -> KeptLogits:
    """The largest logits of these samples, from the node's cache or computed.

    Args:
        samples: those that are trained on; each once.
        teacher: identity of its weights.
        largest: samples -> for each, values and ids [learned positions, kept] as numpy arrays.
        at_once: samples of one call.
    """
    import numpy as np

    unique = list({_key(sample): sample for sample in samples}.values())
    rows, start = {}, 0
    for sample in unique:
        rows[_key(sample)] = (start, sample.learned_tokens)
        start += sample.learned_tokens
    digest = hashlib.sha256(f"{_FORMAT}\n{LARGEST}\n{teacher}\n".encode())
    for sample in unique:
        digest.update(repr(_key(sample)).encode())
    took: list[float] = []

    def build(directory: Path) -> None:
        began = time.perf_counter()
        parts = [
            part
            for first in range(0, len(unique), at_once)
            for part in largest(unique[first : first + at_once])
        ]
        np.save(directory / "values.npy", np.concatenate([values for values, _ in parts]))
        np.save(directory / "ids.npy", np.concatenate([ids for _, ids in parts]))
        took.append(time.perf_counter() - began)

    directory = cached_directory(f"teacher-logits-{digest.hexdigest()[:24]}", build)
    files = [directory / "values.npy", directory / "ids.npy"]
    values, ids = (np.load(file, mmap_mode="r") for file in files)
    return KeptLogits(
        rows=rows,
        values=values,
        ids=ids,
        made_s=took[0] if took else 0.0,
        nbytes=sum(file.stat().st_size for file in files),
    )


def _key(sample: TrainingSample) -> tuple[int, ...]:
    return (sample.prompt_tokens, *sample.ids)


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
