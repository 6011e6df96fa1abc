"""Training techniques, one module each, behind the seam of ``base.py``.

To add one, write its module and name its class here: grids, their schema, the plan and fine-tuning
take it from this list. The order is the order in which techniques act at each point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.techniques.accumulation import GradientAccumulation
from workloads.techniques.attention import Attention
from workloads.techniques.autocast import Autocast
from workloads.techniques.base import Technique
from workloads.techniques.checkpointing import GradientCheckpointing
from workloads.techniques.compilation import Compilation
from workloads.techniques.compression import GradientCompression
from workloads.techniques.data_loading import DataLoading
from workloads.techniques.freezing import Freezing
from workloads.techniques.learned_logits import LearnedLogits
from workloads.techniques.matmul_precision import MatmulPrecision
from workloads.techniques.memory_release import MemoryRelease
from workloads.techniques.optimizers import OptimizerChoice
from workloads.techniques.padding import Padding
from workloads.techniques.saving import Saving
from workloads.techniques.strategy import Strategy
from workloads.techniques.tokenizers import TokenizerKind

TECHNIQUES: tuple[type[Technique], ...] = (
    TokenizerKind,
    Padding,
    DataLoading,
    GradientAccumulation,
    Freezing,
    GradientCheckpointing,
    Autocast,
    MatmulPrecision,
    Attention,
    LearnedLogits,
    OptimizerChoice,
    Compilation,  # of what the others have made of the model
    Strategy,  # cards share what the others have made
    GradientCompression,  # on what the strategy has put around the model
    Saving,
    MemoryRelease,
)


def chosen(parameters: Mapping[str, Any]) -> tuple[Technique, ...]:
    """Every technique, set as the parameters of a job say."""
    return tuple(
        kind.model_validate({name: parameters[name] for name in kind.model_fields})
        for kind in TECHNIQUES
    )
