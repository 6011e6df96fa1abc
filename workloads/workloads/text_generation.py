"""Text generation: a language model continues the prompts of a dataset, or answers them."""

from __future__ import annotations

from typing import Literal

from workloads.base import TOKENS
from workloads.bench.profiling import PROFILE
from workloads.data.datasets import DatasetParameters
from workloads.generation_rules import refuse
from workloads.quality_metrics import METRICS
from workloads.registry import WorkloadSpec
from workloads.settings import ADAPTER, setting
from workloads.training.pairs import SourceParameters


class TextGenerationParameters(SourceParameters, DatasetParameters):
    """Greedy text generation over the prompts of a dataset."""

    output_tokens: int = setting(
        128,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="Most tokens to generate for each prompt (max_new_tokens).",
    )
    input_tokens: int | None = setting(
        None,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="Length every prompt is brought to, in tokens: a longer one is cut at its "
        "end, a shorter one repeated from its beginning. Left out, prompts stay as they are.",
    )
    ignore_eos: bool = setting(
        False,
        role="work",
        always_in_id=True,
        description="Fixed-length mode: every prompt generates exactly output_tokens, even past "
        "an end-of-sequence token. Use it to compare precisions and devices, since then all of "
        "them do the same amount of work.",
    )
    prompts: int = setting(
        100,
        role="work",
        length=True,
        always_in_id=True,
        ge=1,
        description="How many prompts of the dataset one repeat covers, all cards together, in "
        "the dataset's order and from its start again where it is shorter. At least one full "
        "batch on every card is used.",
    )
    batching: Literal["static", "sorted", "continuous"] = setting(
        "static",
        role="choice",
        always_in_id=True,
        renamed={"refill": "continuous"},
        description="How prompts meet in a batch: static takes them in the dataset's order, sorted "
        "by length, so that less is padded; continuous (continuous batching) gives the place of a "
        "text that has ended to the next prompt and pads nothing (batch_size places; one pass over "
        "all prompts is one batch). Greedy texts are the same, up to rounding.",
    )
    attention: Literal["eager", "sdpa", "flash_attention_2", "xformers"] = setting(
        "sdpa",
        role="choice",
        loads=True,
        always_in_id=True,
        description="Attention implementation: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, flash_attention_2 and xformers the kernels of the packages "
        "flash-attn and xformers (CUDA only; xformers: run by nobody).",
    )
    adapter: str | None = ADAPTER
    tensor_parallel: int | None = setting(
        None,
        role="choice",
        loads=True,
        always_in_id=True,
        ge=1,
        description="Cards that split each matrix; groups of so many cards share out the prompts "
        "(data × tensor). Left out, every card has the whole model.",
    )
    keep_texts: int = setting(
        3,
        role="neutral",
        always_in_id=True,
        ge=0,
        description="How many generated texts to keep in the row, from the first prompts on.",
    )
    profile: bool = PROFILE
    quality: bool = setting(
        False,
        role="neutral",
        description="Compare what the model writes with the plain path (transformers in fp32), "
        "after the timed part: share of equal tokens, KL divergence, loss; and take the loss on "
        "the dataset's own answers. The plan adds the reference, once for a model and dataset.",
    )
    quality_of: str | None = setting(
        None,
        role="neutral",
        consumes="model",
        min_length=1,
        description="The model whose texts are the reference of `quality`, of the same tokenizer: "
        "the one that a smaller model was made from. Left out, it is the model itself.",
    )


SPEC = WorkloadSpec(
    name="text-generation",
    function="workloads.text_generation:run",
    also_called=("inference", "generate", "chat", "serving", "causal-lm"),
    parameters=TextGenerationParameters,
    summary="Greedy generation with a language model: tokens/s, TTFT, latency.",
    ability="generate",
    tasks=("causal-lm", "seq2seq-lm"),
    throughput=TOKENS,
    metrics=METRICS,
    refuse=refuse,
    moved={"hpu_mode": None, "packed_weights": False},
)
