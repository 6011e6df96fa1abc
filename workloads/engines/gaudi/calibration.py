"""The first of fp8's two passes on Gaudi: run a model in bf16 and write down its largest values.

Jobs in fp8 of the same model and number of cards wait for this one (``quantization.py``). A
plan adds it by itself. Its row says where the files lie; its times are of no interest.
"""

from __future__ import annotations

from workloads.base import JobContext, Request, Result
from workloads.data.datasets import load_dataset
from workloads.engines.gaudi import generation, library, quantization
from workloads.models import precision as precisions
from workloads.one_pass import encoded_prompts, generate_once, result_of
from workloads.workloads.fp8_calibration import CalibrationParameters


def run(request: Request, context: JobContext) -> Result:
    """Measure; see ``workloads.base.Workload``."""
    parameters = CalibrationParameters.model_validate(dict(request.parameters))
    device = context.device
    library.prepare(device)
    precisions.require("fp8", device.name, generation.ENGINE)
    context.enter_phase("load")
    began = context.clock()
    context.resident(f"{request.residency_key}|measured", lambda: None)  # others' models make room
    engine = generation.load(request, device)
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts = encoded_prompts(engine, dataset, parameters.prompts)
    context.enter_phase("measure")
    _, sample = generate_once(
        engine,
        context,
        prompts,
        batch_size=request.batch_size,
        output_tokens=parameters.output_tokens,
        on_step=device.synchronize,
    )
    directory = quantization.calibration_directory(
        request.model, context.world_size, device.device_name()
    )
    facts = {
        "model": request.model,
        "cards": context.world_size,
        "device": device.device_name(),
        "dataset": request.dataset,
        "prompts": parameters.prompts,
        "output_tokens": parameters.output_tokens,
    }
    quantization.stop_measuring(engine.model, directory, facts)
    return result_of(
        engine, dataset, sample, load_s=load_s, details={"calibration": str(directory)}
    )
