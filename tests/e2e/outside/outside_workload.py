"""A workload: an engine multiplies the matrix of a checkpoint by itself."""

from pathlib import Path

from workloads.base import (
    JobContext,
    Metric,
    Request,
    Result,
    Throughput,
)
from workloads.bench.measure import Observation, measure
from workloads.engines import engine_function
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters, setting


class ProductParameters(WorkloadParameters):
    """The part of the matrix that is used."""

    size: int = setting(8, role="work", loads=True, ge=1, description="Rows and columns.")


SPEC = WorkloadSpec(
    name="outside-product",
    function=f"{__name__}:run",
    parameters=ProductParameters,
    summary="Products of a matrix with itself: products/s.",
    ability="multiply",
    tasks=("matrix",),
    throughput=Throughput(unit="products/s", counts="items"),
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


def run(request: Request, context: JobContext) -> Result:
    """Multiply once a repeat, and report the mean entry of the product."""
    from safetensors.torch import load_file

    multiply = engine_function(request.engine, "multiply", context.device.name)
    size = request.parameters["size"]
    context.enter_phase("load")

    def load():
        return load_file(Path(request.model) / "model.safetensors")["matrix"][:size, :size]

    matrix = context.resident(request.residency_key, load)
    products = []

    def run_batch(repeat: int, batch: int):
        products.append(multiply(matrix))
        return lambda: Observation(items=1)

    measured = measure(run_batch, 1, request.measure, context)
    return Result(
        samples=measured.samples,
        stop_reason=measured.stop_reason,
        **measured.warmup,
        synthetic_data=True,
        metrics={"mean_entry": float(products[-1].mean())},
    )
