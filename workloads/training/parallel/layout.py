"""Layouts of several cards, data × pipeline × tensor, and their rules. Pure, no torch.

Tensor-parallel ranks communicate in every layer and are neighbours; then come pipeline stages, then
copies. With eight ranks, ``tensor`` 2 and ``pipeline`` 2, ranks 0 and 1 hold the first layers, 2
and 3 the others, and 4 to 7 a second copy; gradients are averaged between 0 and 4, 1 and 5, …

``tensor`` must divide the attention heads and key/value heads. Pipelines need one fixed shape, so
samples are padded to ``max_length``; 1F1B needs a micro-batch per stage, interleaved a multiple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from workloads.base import JobDescription, Refusal, WorkloadError
from workloads.models.catalog import known_config
from workloads.models.chatglm3.layout import from_original_config, is_original
from workloads.models.precision import quantized
from workloads.training.methods import Method, method_name

#: DeepSpeed's strategies, by stage.
ZERO = ("zero0", "zero1", "zero2", "zero3")
#: Strategies that shard weights between uses.
_SHARDED = ("zero3", "fsdp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place in its gang."""

    rank: int
    world_size: int
    tensor: int = 1  # ranks that split each matrix among them
    pipeline: int = 1  # stages of layers; divides ``world_size`` together with ``tensor``

    @property
    def model_parallel(self) -> int:
        """Number of ranks that hold one copy of the model and share a part of the batch."""
        return self.tensor * self.pipeline

    @property
    def data_rank(self) -> int:
        """Index of the part of each batch that this rank works on."""
        return self.rank // self.model_parallel

    @property
    def data_size(self) -> int:
        """Number of parts of each batch."""
        return self.world_size // self.model_parallel

    @property
    def tensor_rank(self) -> int:
        """Index of the part of each matrix that this rank holds."""
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        """Index of this rank's stage of the pipeline."""
        return self.rank // self.tensor % self.pipeline

    @property
    def counts(self) -> bool:
        """True for the first of the ranks that share a batch, which counts its samples."""
        return self.rank % self.model_parallel == 0

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of ranks along one axis: ``data``, ``pipeline`` (by stage) or ``tensor``."""
        axis = ("data", "pipeline", "tensor").index(kind)
        sizes = (self.data_size, self.pipeline, self.tensor)
        import numpy  # lazy: plans read this file

        ranks = numpy.arange(self.world_size).reshape(sizes)
        groups: list[list[int]] = numpy.moveaxis(ranks, axis, -1).reshape(-1, sizes[axis]).tolist()
        return groups

    def group(self, kind: str) -> list[int]:
        """This rank's group of a kind."""
        return next(ranks for ranks in self.groups(kind) if self.rank in ranks)


def tensor_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of cards that split each matrix, by a job's parameters."""
    if parameters.get("strategy") == "tensor-parallel":
        return cards
    return int(parameters.get("tensor_parallel") or 1)


def pipeline_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of pipeline stages; by default all cards not used otherwise."""
    if parameters.get("strategy") != "pipeline":
        return 1
    others = tensor_size(parameters, cards) * int(parameters.get("data_parallel") or 1)
    return int(parameters.get("pipeline_parallel") or max(cards // others, 1))


def model_parallel_size(parameters: Mapping[str, Any], cards: int) -> int:
    """Number of cards that hold one copy of the model together."""
    return tensor_size(parameters, cards) * pipeline_size(parameters, cards)


def divides_weights(parameters: Mapping[str, Any], cards: int) -> bool:
    """Tell if each card holds only a part of the weights."""
    sharded = cards > 1 and parameters.get("strategy") in _SHARDED
    return sharded or model_parallel_size(parameters, cards) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Process groups of torch.distributed for this rank; None: all ranks, or only this one."""

    tensor: Any
    pipeline: Any
    data: Any


def make_groups(layout: Layout) -> Groups:
    """Form the groups; all ranks must call this together."""
    import torch.distributed as dist

    def mine(kind: str) -> Any:
        groups = layout.groups(kind)
        if len(groups) == 1 or len(groups[0]) == 1:  # all ranks, or only this one
            return None
        made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group
        return made[groups.index(layout.group(kind))]

    return Groups(tensor=mine("tensor"), pipeline=mine("pipeline"), data=mine("data"))


#: Sizes that must be divisible, by their name in a model's config.
_SIZES = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key/value heads",
    "intermediate_size": "channels between the layers of an MLP",
}


def split_problem(config: Mapping[str, Any], cards: int) -> str:
    """Reason why a model cannot be split over so many cards; empty when it can."""
    for name, meaning in _SIZES.items():
        size = config.get(name)
        if isinstance(size, int) and size % cards:
            return f"the model's {size} {meaning} cannot be split over {cards} cards"
    return ""


def model_config(name: str) -> Mapping[str, Any] | None:
    """A model's config.json by name; None if unavailable without loading."""
    read = known_config(name)
    try:
        return from_original_config(read) if read and is_original(read) else read
    except WorkloadError:
        return None


def tensor_refusals(job: JobDescription, tensor: int, setting: str) -> Iterator[Refusal]:
    """Objections to splitting matrices over ``tensor`` cards by the parameter ``setting``."""
    if job.cards % tensor:
        divisors = [n for n in range(1, job.cards + 1) if job.cards % n == 0]
        yield Refusal(
            setting=setting,
            reason=f"{job.cards} cards cannot be divided into groups of {tensor}",
            hint=f"{job.cards} cards can be in groups of {', '.join(map(str, divisors))}",
        )
        return
    if tensor == 1:
        return
    config = model_config(job.model)
    problem = split_problem(config, tensor) if config is not None else ""
    if problem and config is not None:
        possible = [n for n in range(1, tensor) if not split_problem(config, n)]
        yield Refusal(
            setting=setting,
            reason=problem,
            hint=f"it can be split over {', '.join(map(str, possible))}",
        )
    if quantized(job.precision):
        yield Refusal(
            setting="precision",
            reason=f"this version splits plain weights over cards, not {job.precision} ones",
            unsupported=True,
        )


def generation_refusals(job: JobDescription) -> tuple[Refusal, ...]:
    """Objections to splitting the matrices of a job of text generation."""
    tensor = job.parameters.get("tensor_parallel")
    if tensor is None:
        return ()
    if job.cards == 1 and tensor > 1:
        reason = "the job has one card, so nothing can be split"
        hint = "write cards: 2 or more, or leave tensor_parallel out"
        return (Refusal(setting="tensor_parallel", reason=reason, hint=hint),)
    return tuple(tensor_refusals(job, tensor, "tensor_parallel"))


#: Default number of groups of layers per card under the interleaved schedule.
CHUNKS = 2


def idle_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle share of the cards' time while a pipeline of equal stages fills and drains."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)


def chunks_of(parameters: Mapping[str, Any]) -> int:
    """Number of groups of layers that each card of a job's pipeline holds."""
    if parameters.get("pipeline_schedule") != "interleaved":
        return 1
    return int(parameters.get("pipeline_chunks") or CHUNKS)


def layout_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Refuse data × tensor × pipeline unequal to the number of cards."""
    names = ("data_parallel", "tensor_parallel", "pipeline_parallel")
    given = {name: job.parameters.get(name) for name in names}
    tensor = tensor_size(job.parameters, job.cards)
    stages = pipeline_size(job.parameters, job.cards)
    data = int(given["data_parallel"] or max(job.cards // (tensor * stages), 1))
    if data * tensor * stages == job.cards:
        return
    blamed = next((name for name in reversed(given) if (given[name] or 1) > 1), "strategy")
    fixed = given["pipeline_parallel"] or job.parameters.get("strategy") != "pipeline"
    if blamed == "data_parallel" and fixed and job.cards % (tensor * stages) == 0:
        hint = f"write data_parallel: {job.cards // (tensor * stages)}, or leave it out"
    else:
        hint = f"the product of {', '.join(names[:2])} and {names[2]} has to be {job.cards}"
    yield Refusal(
        setting=blamed,
        reason=f"data {data} × tensor {tensor} × pipeline {stages} is {data * tensor * stages} "
        f"cards, and the job has {job.cards}",
        hint=hint,
    )


def pipeline_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Objections to the stages of a pipeline whose layout is right."""
    parameters = job.parameters
    stages, chunks = pipeline_size(parameters, job.cards), chunks_of(parameters)
    if parameters.get("strategy") != "pipeline":
        return
    if parameters.get("padding", "dynamic") not in ("dynamic", "fixed"):
        yield Refusal(
            setting="padding",
            reason="the stages of a pipeline exchange tensors of one shape, so every sample is "
            "padded to max_length",
            hint="write padding: fixed",
        )
    if stages < 2:
        if chunks > 1:
            yield Refusal(
                setting="pipeline_schedule",
                reason="the pipeline has one stage, so nothing is interleaved",
                hint="leave pipeline_schedule out",
            )
        return
    yield from _layers(job, stages, chunks)
    count = parameters["gradient_accumulation"]
    if count < stages or (chunks > 1 and count % stages):
        wanted = "a multiple of" if chunks > 1 else "at least one for each of"
        yield Refusal(
            setting="gradient_accumulation",
            reason=f"{count} micro-batch{'es' if count > 1 else ''} cannot fill the pipeline, "
            f"which takes {wanted} the {stages} stages",
            hint=f"write gradient_accumulation: {4 * stages}, say, for an idle share of "
            f"{idle_share(stages, 4 * stages, chunks):.0%}",
        )
    yield from _lacking(job, "over the stages of a pipeline", _IN_STAGES)


def _layers(job: JobDescription, stages: int, chunks: int) -> Iterator[Refusal]:
    config = model_config(job.model)
    if config is None:
        return  # the job itself will look
    layers = config.get("num_hidden_layers")
    parts = stages * chunks
    if isinstance(layers, int) and layers % parts:
        groups = f" of {chunks} groups of layers each" if chunks > 1 else ""
        possible = [n for n in range(1, layers + 1) if layers % (n * chunks) == 0]
        yield Refusal(
            setting="pipeline_parallel" if job.parameters["pipeline_parallel"] else "strategy",
            reason=f"the model's {layers} layers cannot be cut into {stages} equal stages{groups}",
            hint=f"pipeline_parallel can be {', '.join(map(str, possible))}"
            if possible
            else f"write a pipeline_chunks that divides {layers}",
        )
    if config.get("tie_word_embeddings"):
        yield Refusal(
            setting="strategy",
            reason=f"the output layer of {job.model} is its embedding, which would lie in two "
            "stages of a pipeline; this version ties no weights over cards",
            hint="write strategy: ddp",
            unsupported=True,
        )


#: Settings supported with divided models: setting -> possible values.
_PARTS: dict[str, Sequence[Any]] = {"method": ("full", "lora"), "autocast": ("none", "bf16")}
_IN_STAGES = _PARTS | {
    "logits": ("all",),
    "save_every": (0,),
    "save_adapter": (None,),
    "save_model": (None,),
    "profile": (False,),
    "freeze_layers": (0,),
    "freeze_embeddings": (False,),
    "gradient_compression": ("none",),  # as below: gradients are exchanged in a way of its own
}
_SPLIT = _PARTS | {"save_adapter": (None,), "save_model": (None,)}
_BY_FSDP2 = _PARTS | {
    "profile": (False,),
    "optimizer": ("adamw", "adamw-fused"),
    "save_every": (0,),
    "gradient_compression": ("none",),
}
_BY_DEEPSPEED: dict[str, Sequence[Any]] = {
    "gradient_compression": ("none",),
    "save_mode": (None, "blocking"),  # DeepSpeed writes its parts while training waits
    "method": [name for name in get_args(Method) if name != "qlora"],
    "optimizer": ("adamw",),
}


#: Settings for which somebody may give up the strategy.
_WITH_DDP = ("save_every", "save_mode", "save_model", "gradient_compression")


def _lacking(
    job: JobDescription, where: str, possible: Mapping[str, Sequence[Any]]
) -> Iterator[Refusal]:
    given = {**job.parameters, "method": method_name(job.parameters)}
    for name, values in possible.items():
        value = given.get(name, values[0])
        if value not in values:
            shown = str(value).lower() if isinstance(value, bool) else value
            others = " or ".join(one for one in values if isinstance(one, str))
            hint = f"write {name}: {others}" if others else f"leave {name} out"
            yield Refusal(
                setting=name,
                reason=f"this version has no {name} {shown} {where}",
                hint=f"{hint}, or write strategy: ddp" if name in _WITH_DDP else hint,
                unsupported=True,
            )


def combination_refusals(job: JobDescription) -> Iterator[Refusal]:
    """Objections to the strategy of a job together with its other settings."""
    strategy, tensor = job.parameters.get("strategy"), tensor_size(job.parameters, job.cards)
    if tensor > 1:
        yield from _lacking(job, "over split matrices", _SPLIT)
    if strategy in ZERO:
        yield from _with_deepspeed(job, strategy, tensor)
    if strategy == "fsdp2":
        yield from _lacking(job, "under fsdp2", _BY_FSDP2)
        if tensor > 1:
            yield _cannot("tensor_parallel", "fsdp2 of split matrices; ddp and zero1 do")


def driven_by_deepspeed(job: JobDescription) -> bool:
    """Tell if DeepSpeed's engine runs the model's passes and steps."""
    return job.cards > 1 and job.parameters.get("strategy") in ZERO


def _with_deepspeed(job: JobDescription, strategy: str, tensor: int) -> Iterator[Refusal]:
    parameters = job.parameters
    if tensor > 1 and strategy != "zero1":
        yield _cannot("tensor_parallel", f"{strategy} of split matrices; zero1 does")
    elif tensor > 1 and parameters.get("save_every"):
        yield _cannot("save_every", f"checkpoints of {strategy} over split matrices; ddp has")
    elif tensor == job.cards:
        yield Refusal(
            setting="tensor_parallel",
            reason=f"{strategy} divides the optimizer's state among copies of the model, "
            "and there is one",
            hint=f"write a tensor_parallel below {job.cards}, or strategy: tensor-parallel",
        )
    method = method_name(parameters)
    if method.startswith("qat") and strategy == "zero3":
        yield _cannot("method", f"{method} under {strategy}; strategy ddp does")
    if parameters.get("autocast", "none") != "none":
        yield Refusal(
            setting="autocast",
            reason="DeepSpeed switches torch's autocast off inside its engine",
            hint="write precision: bf16 (fp32 master weights), or strategy: ddp",
            unsupported=True,
        )
    yield from _lacking(job, "under DeepSpeed", _BY_DEEPSPEED)
    if job.precision == "fp16":
        yield _cannot("precision", "fp16 weights under DeepSpeed; bf16 does")


def _cannot(setting: str, what: str) -> Refusal:
    return Refusal(setting=setting, reason=f"this version has no {what}", unsupported=True)
