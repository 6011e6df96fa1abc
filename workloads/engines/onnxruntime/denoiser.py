"""A diffusion pipeline whose U-Net is a graph; text encoder, decoder and scheduler stay in torch.

The U-Net takes most of an image's time, since it is run at each step. It takes latents, a moment
and the encoded text, and gives the noise that it sees.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import diffusers
import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines import proof
from workloads.engines.images import ImagePipeline, denoiser_name, set_scheduler
from workloads.engines.onnxruntime.export import GRAPH, Options, Sample, export, exported_directory
from workloads.engines.onnxruntime.session import Execution, Graph, Opened, open_graph
from workloads.models import precision as precisions
from workloads.models import precision as weights
from workloads.models.loading import ModelSource, open_model
from workloads.models.precision import ModelWeights
from workloads.registry import task_for

_INPUTS = ("sample", "timestep", "encoder_hidden_states")
_LATENTS = "sample"


class GraphDenoiser(torch.nn.Module):
    """A U-Net as diffusers' pipelines call it."""

    def __init__(self, graph: Graph, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.graph, self.config, self.dtype, self.device = graph, config, dtype, device

    def forward(
        self, sample: torch.Tensor, timestep: Any, encoder_hidden_states: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor]:
        """Predict the noise, as a tuple of one."""
        self.graph.take_threads()
        moment = torch.as_tensor(timestep, dtype=torch.float32).reshape(1)
        return (noise_of(self.graph, sample, moment, encoder_hidden_states).to(self.dtype),)


def noise_of(
    graph: Graph, sample: torch.Tensor, moment: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """The noise that a graph sees in latents."""
    return graph(sample=sample, timestep=moment, encoder_hidden_states=text)["noise"]


def load(request: Request, device: Device) -> ImagePipeline:
    """Load ``request.model`` with its U-Net as a graph, exporting that if need be.

    Raises:
        DataMissing: the pipeline is not there, or not complete.
        Unsupported: it has no plain U-Net, or not in this precision.
    """
    precisions.require(request.precision, device.name, request.engine)
    source = open_model(request.model)
    opened = open_graph(_directory(request, source, device), request, device)
    apart = differs(opened.graph, opened.directory)
    figures, details = opened.proved(apart)
    # What is not in the graph is in fp32 beside integers.
    others = "fp32" if precisions.quantized(request.precision) else request.precision
    pipeline = _pipeline(request, source, others).to(device.torch_device)
    scheduler = set_scheduler(pipeline, request.parameters.get("scheduler"), diffusers)
    unet = pipeline.unet
    pipeline.unet = None
    found = _weights(opened, pipeline, others, device)
    pipeline.unet = GraphDenoiser(opened.graph, unet.config, unet.dtype, unet.device)
    return ImagePipeline(
        pipeline=pipeline,
        device=device,
        weights=found,
        random_weights=source.random_weights,
        details=opened.told(
            {
                "pipeline": type(pipeline).__name__,
                "denoiser": type(unet).__name__,
                "scheduler": scheduler,
                **details,
            }
        ),
        figures=figures,
        clock=time.perf_counter,
        mode=torch.inference_mode,
    )


def _pipeline(request: Request, source: ModelSource, precision: str) -> Any:
    loader = task_for(request.workload, source.entry).function("load")
    pipeline = loader(source, torch_dtype=precisions.compute_dtype(precision))
    name = denoiser_name(pipeline)
    config = getattr(pipeline, name).config
    more = any(config.get(each) for each in ("addition_embed_type", "time_cond_proj_dim"))
    if getattr(pipeline, "unet", None) is None or more:
        raise Unsupported(
            f"this version exports U-Nets that take latents, a moment and a text; the {name} of "
            f"{type(pipeline).__name__} takes something else"
        )
    return pipeline


def _directory(request: Request, source: ModelSource, device: Device) -> Path:
    """The directory of the U-Net's graph in fp32, exported if it is not in the node's cache."""
    options = Options.of(request.settings, device.name)

    def build(directory: Path) -> dict[str, Any]:
        pipeline = _pipeline(request, source, "fp32")
        unet = pipeline.unet.eval()
        positions = pipeline.text_encoder.config.max_position_embeddings
        inputs = _inputs(unet, rows=3, side=_least_side(unet) * 3, positions=positions)
        with torch.no_grad():
            noise = unet(*inputs.values(), return_dict=False)[0]
        proof.save(directory, {**inputs, "noise": noise})
        facts = export(_Plain(unet).eval(), _sample(unet, positions), options, directory / GRAPH)
        plain = Graph(directory / GRAPH, Execution(device=device, graph_optimization="basic"))
        differs(plain, directory).check("fp32", directory / GRAPH)
        return facts | {"parameter_count": sum(each.numel() for each in unet.parameters())}

    return exported_directory("denoiser", source, options, build)


class _Plain(torch.nn.Module):
    """A U-Net with what a graph takes and gives."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"noise": self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]}


def _least_side(unet: Any) -> int:
    """Side of the smallest latents that every level halves without a rest."""
    return 2 ** len(unet.config.block_out_channels)


def _inputs(unet: Any, *, rows: int, side: int, positions: int) -> dict[str, torch.Tensor]:
    """Latents, a moment and texts, drawn."""
    drawn = torch.Generator().manual_seed(0)
    latents = torch.randn(rows, unet.config.in_channels, side, side, generator=drawn)
    text = torch.randn(rows, positions, unet.config.cross_attention_dim, generator=drawn)
    return dict(zip(_INPUTS, (latents, torch.tensor([500.0]), text), strict=True))


def _sample(unet: Any, positions: int) -> Sample:
    inputs = _inputs(unet, rows=2, side=_least_side(unet) * 2, positions=positions)
    # Texts have one length, that of the text encoder.
    varying = {_LATENTS: (0, 2, 3), "encoder_hidden_states": (0,)}
    return Sample(inputs=inputs, varying=varying)


def differs(graph: Graph, directory: Path) -> proof.Difference:
    """Run a U-Net on what lies beside its graph and compare the noise."""
    kept = proof.load(directory)
    return proof.difference(noise_of(graph, *(kept[name] for name in _INPUTS)), kept["noise"])


def _weights(opened: Opened, pipeline: Any, precision: str, device: Device) -> ModelWeights:
    """The weights of the graph and of the parts beside it."""
    parts = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }
    graph = opened.weights()
    others = weights.inspect(torch.nn.ModuleDict(parts), precision, device.name)
    count = graph.parameter_count + others.parameter_count
    return ModelWeights(
        weight_bytes=graph.weight_bytes + others.weight_bytes,
        parameter_count=count,
        quantized_share=graph.quantized_share * graph.parameter_count / count,
        detail=f"{graph.detail} (the U-Net); the rest in {precision} in torch",
    )
