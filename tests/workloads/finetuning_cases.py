"""Helpers for the tests of fine-tuning: a small job, and the rules' view of one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import generation_cases
from generation_cases import Worker, described

from workloads.base import JobDescription, MeasureSettings, Refusal, Request, Result
from workloads.registry import find_workload
from workloads.rules import refusals

if TYPE_CHECKING:
    from workloads.training.data import SampleFormat
    from workloads.training.technique import Loading, Training

#: A small job of pretraining; its rate is one at which three steps change the loss.
PRETRAINING: dict[str, Any] = {
    "workload": "pretraining",
    "model": "tiny-bert",
    "dataset": "english-corpus-synthetic",
    "max_length": 64,
    "learning_rate": 1e-2,
}
#: A job that fine-tunes a model with encoder and decoder, in place of the usual one.
SUMMARIES: dict[str, Any] = {
    "model": "tiny-t5",
    "dataset": "cnn-dailymail-synthetic",
    "max_length": 512,
    "source_prefix": "summarize: ",
    "max_source_length": 48,
    "max_target_length": 24,
    "method": "full",
    "learning_rate": 4e-2,
}
_TRAINED: dict[str, Result] = {}
FIELDS = ("workload", "model", "dataset", "precision", "batch_size", "measure", "probe")


def parameters(workload: str = "finetuning", **given: Any) -> dict[str, Any]:
    small = {"steps": 3, "samples": 32, "max_length": 160}
    return find_workload(workload).validate(small | given)


def request(**changes: Any) -> Request:
    """A small job; keywords of Request's go there, all others are parameters."""
    usual = {"workload": "finetuning", "dataset": "advertisegen-synthetic", "batch_size": 4}
    measure = MeasureSettings(warmup=0, time_limit_s=600)
    job = generation_cases.request(**{**usual, "measure": measure, **changes})
    given = {name: value for name, value in changes.items() if name not in FIELDS}
    return replace(
        job,
        residency_key="finetuning",
        parameters=parameters(job.workload, **given),
        settings={},
        probe=changes.get("probe", False),
    )


def train(worker: Worker | None = None, **changes: Any) -> Result:
    from workloads import finetuning

    return finetuning.run(request(**changes), (worker or Worker()).context())


def trained(**changes: Any) -> Result:
    """The result of a small job, which is run once for all tests that ask for the same one."""
    key = repr(request(**changes))
    if key not in _TRAINED:
        _TRAINED[key] = train(**changes)
    return _TRAINED[key]


def sample_format(model: str, parameters: dict[str, Any]) -> SampleFormat:
    """The way a model makes samples, with these parameters of a workload."""
    from workloads.models.catalog import positions_of
    from workloads.models.loading import load_config, load_tokenizer, open_model
    from workloads.training.data import SampleFormat

    source = open_model(model)
    config = load_config(source)
    return SampleFormat(
        tokenizer=load_tokenizer(source),
        source=source,
        config=config,
        parameters=parameters,
        pad_token_id=0,
        context_length=positions_of(config.to_dict()),
    )


def losses(result: Result) -> list[float]:
    return [sample.loss for sample in result.samples if sample.loss is not None]


def training_of(model: Any, optimizer: str = "AdamW", rate: float = 1e-2) -> Training:
    """A training of all weights by an optimizer of torch."""
    import torch

    from workloads.devices import device_for
    from workloads.registry import TASKS
    from workloads.training.technique import Training

    training = Training(
        device=device_for("cpu"),
        task=TASKS["causal-lm"],
        cards=1,
        method="full",
        precision="fp32",
        model=model,
        learning_rate=rate,
    )
    training.make_optimizer = partial(getattr(torch.optim, optimizer), lr=rate)
    training.optimizer = training.make_optimizer(training.trainable())
    return training


def loading_on(device: str) -> Loading:
    from workloads.devices import device_for
    from workloads.training.technique import Loading

    return Loading(device=device_for(device), model_arguments={}, tokenizer_arguments={})


def small_model(kind: str = "llama", seed: int = 0, wide: bool = False, **changes: Any) -> Any:
    """Two layers of an architecture with random weights and no dropout; queries share keys and
    values. ``wide`` spreads all weights so far that no part is too small to see."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "ffn_dim": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    rates = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout")
    config = AutoConfig.for_model(kind, **dict.fromkeys(rates, 0.0) | sizes | changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters() if wide else ():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def asked(workload: str = "finetuning", **changes: Any) -> JobDescription:
    job = described(**{"precision": "bf16", "batch_size": 4} | changes)
    return replace(job, parameters=parameters(workload, **job.parameters))


def refuse(job: JobDescription, workload: str = "finetuning") -> tuple[Refusal, ...]:
    return refusals(find_workload(workload), job)
