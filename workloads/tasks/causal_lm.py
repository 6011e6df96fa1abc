"""Causal language models: each token is predicted from those before it."""

from __future__ import annotations

from workloads.metrics.base import Metric
from workloads.models import protection
from workloads.tasks.base import TaskSpec
from workloads.training_metrics import LOSSES

SPEC = TaskSpec(
    name="causal-lm",
    title="a causal language model",
    architectures=("ForCausalLM", "LMHeadModel", "ChatGLMModel"),
    model_types=frozenset({"chatglm", "glm", "gpt2", "gpt_neox", "llama", "mistral", "qwen2"}),
    functions={
        "load": "workloads.models.loading:load_causal_model",
        "encode": "workloads.training.samples:encode",
        "collate": "workloads.training.rows:collate",
        "loss": "workloads.training.losses:next_token_loss",
        "aligned": "workloads.training.losses:aligned_next_tokens",
        "positions": "workloads.training.losses:next_token_positions",
        "pack": "workloads.training.rows:pack",
        "check_packing": "workloads.training.rows:check_packing",
    },
    forward={"use_cache": False},
    metrics=(
        *LOSSES,
        *protection.METRICS,
        Metric(
            name="converted_loss",
            title="loss when converted",
            description="The same after quantisation-aware training, with the weights converted.",
            better="lower",
        ),
        Metric(
            name="largest_logit_difference",
            title="largest logit difference",
            description="Largest difference of any logit from the reference's, while texts agree.",
            better="lower",
            ranks="largest",
        ),
        Metric(
            name="near_ties",
            title="near ties",
            description="Texts that part from the reference's where its two best logits are closer "
            "than the bound beside it; a text that parts elsewhere makes the row disagree.",
            better="lower",
            ranks="sum",
        ),
        Metric(
            name="near_tie_bound",
            title="bound of near ties",
            description="Twice the largest difference of a logit: two that are closer may change "
            "places.",
            better="lower",
            ranks="largest",
        ),
        Metric(
            name="mean_logit_difference",
            title="mean logit difference",
            description="Mean difference of logits from the reference's, while texts agree.",
            better="lower",
        ),
        Metric(
            name="logit_spread",
            title="spread of logits",
            description="Standard deviation of the reference's logits, to see differences against.",
        ),
        Metric(
            name="compared_tokens",
            title="compared",
            unit="tokens",
            description="Tokens up to the first difference of each text from the reference's.",
            better="higher",
            ranks="sum",
        ),
        Metric(
            name="reference_tokens",
            title="of",
            unit="tokens",
            description="Tokens of the reference's texts.",
            ranks="sum",
        ),
    ),
)
