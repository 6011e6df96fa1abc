"""Text to image: a pipeline of several models paints the texts of a dataset."""

from __future__ import annotations

from typing import Literal

from workloads.base import Throughput
from workloads.data.datasets import DatasetParameters
from workloads.images.rules import refuse
from workloads.registry import WorkloadSpec
from workloads.settings import setting


class TextToImageParameters(DatasetParameters):
    """Images from the texts of a dataset, by denoising latents step by step."""

    images: int | None = setting(
        None,
        role="work",
        length=True,
        ge=1,
        description="How many images are made, all cards together and warm-up among them, in whole "
        "batches. Left out: warm-up, and as many batches as `measure` wants.",
    )
    warmup_batches: int = setting(
        2,
        role="neutral",
        ge=0,
        description="Batches that are left out of the timed part, at least: graphs are compiled in "
        "them. measure.warmup: 0 leaves none out.",
    )
    steps: int = setting(
        50, role="work", length=True, ge=1, description="Denoising steps of each image."
    )
    guidance: float | None = setting(
        None,
        role="work",
        ge=0,
        description="Guidance scale. Above 1 a U-Net sees each image twice, with and without its "
        "text. Left out: 7.5 with a U-Net, else what the pipeline's makers chose.",
    )
    height: int | None = setting(
        None,
        role="work",
        length=True,
        ge=8,
        description="Pixels, a multiple of 8. Left out: the pipeline's own (512 for Stable "
        "Diffusion 1.5).",
    )
    width: int | None = setting(
        None, role="work", length=True, ge=8, description="As height. Left out: the pipeline's own."
    )
    scheduler: Literal["ddim", "pndm", "euler", "dpm-solver", "own"] | None = setting(
        None,
        role="work",
        loads=True,
        description="How steps remove noise; own is the pipeline's. Left out: ddim with a U-Net, "
        "else own.",
    )
    seed: int = setting(
        42,
        role="work",
        ge=0,
        le=2**32,
        description="Latents of image number n are drawn on the CPU, in fp32, from seed + n: the "
        "same on every device, in every precision and batch.",
    )
    attention: Literal["sdpa", "eager", "xformers"] = setting(
        "sdpa",
        role="choice",
        loads=True,
        description="Attention of the denoiser: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, xformers the kernels of that package (CUDA only).",
    )
    channels_last: bool = setting(
        False,
        role="choice",
        loads=True,
        description="Keep the channels of a pixel side by side (U-Net and decoder), as "
        "convolutions on tensor cores want them.",
    )
    torch_compile: bool = setting(
        False,
        role="choice",
        loads=True,
        description="Compile the denoiser (torch.compile, Inductor). The time that takes is kept "
        "apart (compile_s).",
    )
    matmul_precision: Literal["highest", "high", "medium"] = setting(
        "highest",
        role="choice",
        description="How exactly products and convolutions of fp32 numbers are computed: highest "
        "in fp32, high in TF32, medium in bf16 where the card can. For jobs in fp32.",
    )


SPEC = WorkloadSpec(
    name="text-to-image",
    function="workloads.text_to_image:run",
    parameters=TextToImageParameters,
    summary="Images from texts with a diffusion pipeline: images/s, seconds per image.",
    ability="images",
    tasks=("text-to-image",),
    dataset="image-prompts",
    throughput=Throughput(unit="images/s", counts="items"),
    refuse=refuse,
)
