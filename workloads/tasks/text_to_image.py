"""Text-to-image pipelines: a directory of several models, named by its model_index.json."""

from __future__ import annotations

from workloads.images.metrics import METRICS as IMAGE_METRICS
from workloads.tasks.base import TaskSpec

SPEC = TaskSpec(
    name="text-to-image",
    title="a text-to-image pipeline",
    pipeline=True,
    functions={"load": "workloads.images.loading:load_pipeline"},
    metrics=IMAGE_METRICS,
)
