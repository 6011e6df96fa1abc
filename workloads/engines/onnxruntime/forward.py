"""Graphs of one forward pass: encoders (ids and mask to logits) and U-Nets (latents, timestep and
encoded text to noise), whose pipelines otherwise stay in torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.exports import Difference, difference, drawn_ids, in_fp32, model_facts
from workloads.engines.images import (
    ImagePipeline,
    denoiser_name,
    joined_weights,
    modules_of,
    set_scheduler,
)
from workloads.engines.onnxruntime.export import GRAPH, Part
from workloads.engines.onnxruntime.session import Exported, Graph, Graphs, open_graphs
from workloads.engines.torch_models import Batch, LoadedEncoder, padded
from workloads.models import precision as precisions
from workloads.models.catalog import usable_positions
from workloads.models.loading import ModelSource, load_tokenizer, open_model, with_new_weights
from workloads.registry import task_for


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxEncoder(LoadedEncoder):
    """A masked language model as a graph of ONNX Runtime, on its card."""

    graph: Graph
    directory: Path

    def prepare(self, texts: Sequence[Sequence[int]]) -> Batch:
        self.graph.take_threads()
        return LoadedEncoder.prepare(self, texts)

    def logits(self, prepared: Batch) -> torch.Tensor:
        return self.graph(**prepared.inputs)["logits"]


def load_encoder(request: Request, device: Device) -> OnnxEncoder:
    """Open the graph of ``request.model``, exporting it if missing."""
    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    pad = int(tokenizer.pad_token_id or 0)
    opened = open_graphs(
        request,
        device,
        source,
        "encoder",
        lambda: _export_encoder(in_fp32(request, source), pad),
        _compare_encoder,
    )
    new = opened.facts.get("new_weights", ())
    return OnnxEncoder(
        graph=opened.graph,
        directory=opened.directory,
        tokenizer=tokenizer,
        source=with_new_weights(source, new),
        weights=opened.weights,
        pad_token_id=pad,
        positions=opened.facts["positions"],
        card="cpu",  # the graph reads ids on the host
        details=opened.details_with(
            architecture=opened.facts["architecture"], new_weights=", ".join(new)
        ),
        figures=opened.figures,
    )


@torch.no_grad()
def _export_encoder(model: Any, pad: int) -> Exported:
    sample = padded(drawn_ids(model, (7, 4)), pad).inputs
    batch = padded(drawn_ids(model, (6, 4, 1)), pad)
    logits = model(**batch.inputs).logits
    real = batch.attention_mask.bool()  # outputs of padding are unused
    return Exported(
        parts={GRAPH: Part(module=model, inputs=sample, varying=dict.fromkeys(sample, (0, 1)))},
        proof={**batch.inputs, "logits": logits[real]},
        facts=model_facts(model) | {"positions": usable_positions(model.config.to_dict())},
    )


def _compare_encoder(graphs: Graphs, proof: Mapping[str, torch.Tensor]) -> Difference:
    batch = Batch(proof["input_ids"], proof["attention_mask"])
    logits = graphs[GRAPH](**batch.inputs)["logits"].cpu()
    return difference(logits[batch.attention_mask.bool()], proof["logits"])


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
        inputs = (sample, moment, encoder_hidden_states)
        return (self.graph(**dict(zip(_INPUTS, inputs, strict=True)))["noise"].to(self.dtype),)


_INPUTS = ("sample", "timestep", "encoder_hidden_states")


def load_pipeline(request: Request, device: Device) -> ImagePipeline:
    """Load ``request.model`` with its U-Net as a graph, exported if missing; Unsupported if it has
    no plain U-Net, or not in this precision."""
    import diffusers

    source = open_model(request.model)
    opened = open_graphs(
        request,
        device,
        source,
        "denoiser",
        lambda: _export_denoiser(_pipeline(request, source, "fp32")),
        lambda graphs, proof: difference(
            graphs[GRAPH](**{name: proof[name] for name in _INPUTS})["noise"], proof["noise"]
        ),
    )
    # Beside a quantised graph the rest is in fp32.
    precision = "fp32" if precisions.quantized(request.precision) else request.precision
    pipeline = _pipeline(request, source, precision).to(device.torch_device)
    scheduler = set_scheduler(pipeline, request.parameters.get("scheduler"), diffusers)
    unet, pipeline.unet = pipeline.unet, None
    others = precisions.inspect(torch.nn.ModuleDict(modules_of(pipeline)), precision, device.name)
    detail = f"{opened.weights.detail} (the U-Net); the rest in {precision} in torch"
    pipeline.unet = GraphDenoiser(opened.graph, unet.config, unet.dtype, unet.device)
    return ImagePipeline(
        pipeline=pipeline,
        device=device,
        weights=joined_weights(opened.weights, others, detail),
        random_weights=source.random_weights,
        details=opened.details_with(
            pipeline=type(pipeline).__name__, denoiser=type(unet).__name__, scheduler=scheduler
        ),
        figures=opened.figures,
        mode=torch.inference_mode,
    )


def _pipeline(request: Request, source: ModelSource, precision: str) -> Any:
    loader = task_for(request.workload, source.entry).function("load")
    pipeline = loader(source, torch_dtype=precisions.compute_dtype(precision))
    name = denoiser_name(pipeline)
    config = getattr(pipeline, name).config
    more = config.get("addition_embed_type") or config.get("time_cond_proj_dim")
    if getattr(pipeline, "unet", None) is None or more:
        raise Unsupported(
            f"this version exports U-Nets that take latents, a moment and a text; the {name} of "
            f"{type(pipeline).__name__} takes something else"
        )
    return pipeline


class _Plain(torch.nn.Module):
    """A U-Net with the graph's inputs and outputs."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"noise": self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]}


@torch.no_grad()
def _export_denoiser(pipeline: Any) -> Exported:
    unet = pipeline.unet.eval()
    positions = pipeline.text_encoder.config.max_position_embeddings
    side = 2 ** len(unet.config.block_out_channels)  # the least that every level halves

    def inputs(rows: int, side: int) -> dict[str, torch.Tensor]:
        """Random latents and texts, and a timestep."""
        drawn = torch.Generator().manual_seed(0)
        latents = torch.randn(rows, unet.config.in_channels, side, side, generator=drawn)
        text = torch.randn(rows, positions, unet.config.cross_attention_dim, generator=drawn)
        return dict(zip(_INPUTS, (latents, torch.tensor([500.0]), text), strict=True))

    batch = inputs(3, side * 3)
    return Exported(
        parts={
            GRAPH: Part(
                module=_Plain(unet).eval(),
                inputs=inputs(2, side * 2),
                # Texts have the text encoder's fixed length.
                varying={"sample": (0, 2, 3), "encoder_hidden_states": (0,)},
            )
        },
        proof={**batch, "noise": unet(*batch.values(), return_dict=False)[0]},
        facts=model_facts(unet),
    )
