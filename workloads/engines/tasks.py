"""Tasks: the kinds of models, with their functions and metrics."""

from __future__ import annotations

from workloads.base import Metric
from workloads.models import encryption
from workloads.registry import TaskSpec
from workloads.settings import WorkloadParameters
from workloads.training.methods import LOSSES
from workloads.training.pairs import Seq2SeqParameters
from workloads.training.pairs import refuse as seq2seq_refusals

CAUSAL_LM = TaskSpec(
    name="causal-lm",
    title="a causal language model",
    architectures=("ForCausalLM", "LMHeadModel", "ChatGLMModel"),
    model_types=frozenset({"chatglm", "glm", "gpt2", "gpt_neox", "llama", "mistral", "qwen2"}),
    functions={
        "load": "workloads.models.loading:load_causal_model",
        "encode": "workloads.training.data:encode",
        "collate": "workloads.training.data:collate",
        "loss": "workloads.training.losses:next_token_loss",
        "aligned": "workloads.training.losses:aligned_next_tokens",
        "positions": "workloads.training.losses:next_token_positions",
        "pack": "workloads.training.data:pack",
        "check_packing": "workloads.training.data:check_packing",
    },
    forward={"use_cache": False},
    metrics=(
        *LOSSES,
        *encryption.METRICS,
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


MASKED_LM = TaskSpec(
    name="masked-lm",
    title="a masked language model",
    architectures=("ForMaskedLM", "ForPreTraining"),
    model_types=frozenset(
        {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet"}
        | {"modernbert", "roberta", "xlm-roberta"}
    ),
    functions={
        "load": "workloads.models.loading:load_masked_model",
        "make": "workloads.models.loading:make_masked_model",
        "encode": "workloads.training.masking:encode",
        "arrange": "workloads.training.masking:arrange",
        "draw": "workloads.training.masking:draw",
        "collate": "workloads.training.masking:collate",
        "loss": "workloads.training.losses:target_loss",
    },
    metrics=LOSSES,
)


SEQ2SEQ_LM = TaskSpec(
    name="seq2seq-lm",
    title="a sequence-to-sequence model",
    encoder_decoder=True,
    model_types=frozenset({"bart", "led", "longt5", "marian", "mbart", "mt5", "pegasus", "t5"}),
    functions={
        "load": "workloads.models.loading:load_seq2seq_model",
        "encode": "workloads.training.pairs:encode",
        "collate": "workloads.training.pairs:collate",
        "loss": "workloads.training.losses:target_loss",
        "aligned": "workloads.training.losses:aligned_targets",
        "layer_share": "workloads.training.pairs:layer_share",
    },
    metrics=(*LOSSES, *encryption.METRICS),
    settings=frozenset(Seq2SeqParameters.model_fields.keys() - WorkloadParameters.model_fields),
    refuse=seq2seq_refusals,
    forward={"use_cache": False},
)


TEXT_TO_IMAGE = TaskSpec(
    name="text-to-image",
    title="a text-to-image pipeline",
    pipeline=True,
    functions={"load": "workloads.engines.images:load_pipeline"},
)

SPECS = (CAUSAL_LM, MASKED_LM, SEQ2SEQ_LM, TEXT_TO_IMAGE)
