"""Text encoding: an encoder such as BERT reads texts, a batch in one pass."""

from __future__ import annotations

from workloads.base import SAMPLES
from workloads.data.datasets import DatasetParameters
from workloads.registry import WorkloadSpec
from workloads.settings import setting


class TextEncodingParameters(DatasetParameters):
    """Forward passes of an encoder over the texts of a dataset."""

    texts: int = setting(
        128,
        role="work",
        length=True,
        ge=1,
        description="How many texts of the dataset are read in a repeat, from its start again "
        "where it is shorter.",
    )
    max_length: int = setting(
        128,
        role="work",
        length=True,
        ge=2,
        description="Most tokens of a text; a longer one is cut at its end.",
    )


SPEC = WorkloadSpec(
    name="text-encoding",
    function="workloads.encoding.run:run",
    parameters=TextEncodingParameters,
    summary="Forward passes of an encoder (BERT) over texts: samples/s.",
    ability="encode",
    tasks=("masked-lm",),
    dataset="english-corpus-synthetic",
    throughput=SAMPLES,
)
