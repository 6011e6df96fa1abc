"""A metric, declared beside the kind of model that it is of."""

from workloads.metrics import Metric
from workloads.tasks.base import TaskSpec

SPEC = TaskSpec(
    name="matrix",
    title="a matrix",
    architectures=("OutsideMatrix",),
    metrics=(
        Metric(
            name="mean_entry",
            title="mean entry of the product",
            unit="units",
            description="Mean of the entries of the product.",
            better="higher",
        ),
    ),
)
