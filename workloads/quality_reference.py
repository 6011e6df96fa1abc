"""Makes the reference that ``quality.py`` compares with; a plan adds such jobs by itself."""

from __future__ import annotations

from workloads.base import JobContext, Request, Result
from workloads.data.cache import build_aside, file_lock
from workloads.data.datasets import load_dataset
from workloads.engines import engine_function
from workloads.engines.base import EngineLoader
from workloads.one_pass import continued, result_of
from workloads.quality import reference_directory, save
from workloads.workloads.quality_reference import QualityReferenceParameters


def run(request: Request, context: JobContext) -> Result:
    """Write the reference into the node's cache; see ``workloads.base.Workload``."""
    parameters = QualityReferenceParameters.model_validate(dict(request.parameters))
    context.device.seed(0)
    context.enter_phase("load")
    began = context.clock()
    load: EngineLoader = engine_function(request.engine, "generate", context.device.name)
    engine = context.resident(request.residency_key, lambda: load(request, context.device))
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts, tokens, logits, sample = continued(engine, request, context, dataset, parameters)
    context.enter_phase("finish")
    directory = reference_directory(
        request.model, request.dataset, parameters.reading(), parameters
    )
    with file_lock(directory.with_name(f".{directory.name}.lock")):
        build_aside(directory, lambda to: save(to, prompts, tokens, logits), replace=True)
    return result_of(
        engine, dataset, sample, load_s=load_s, details={"quality_reference": str(directory)}
    )
