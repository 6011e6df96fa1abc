"""Techniques of batches: the tokenizer, padding and packing, and loading ahead."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from workloads.base import JobDescription, Refusal, Unsupported
from workloads.settings import choice, choice_in_id
from workloads.training import data as rows
from workloads.training.data import Learnable
from workloads.training.technique import DataPlan, Loading, StepBatch, Technique, Training


class TokenizerKind(Technique):
    """Tokenizers: fast ones are written in Rust, slow ones in Python.

    Both give the same ids for ordinary text. Tokenizing happens once, before training, and is timed
    in every row (``tokenization_s``). Newer checkpoints bring a fast tokenizer only, and
    transformers ignores the wish for a slow one there; here the job then says so.
    """

    name: ClassVar[str] = "tokenizers"
    title: ClassVar[str] = "fast and slow tokenizers"
    order: ClassVar[int] = 10
    always: ClassVar[bool] = True

    tokenizer: Literal["auto", "fast", "slow"] = choice_in_id(
        "auto",
        loads=True,
        description="fast is the tokenizer in Rust, slow the one in Python, auto the fast one "
        "where the checkpoint has it. The row has the time for all samples (tokenization_s).",
    )

    def before_load(self, loading: Loading) -> None:
        if self.tokenizer != "auto":
            loading.tokenizer_arguments["use_fast"] = self.tokenizer == "fast"

        def check(model: Any, tokenizer: Any) -> None:
            kind = "fast" if getattr(tokenizer, "is_fast", False) else "slow"
            loading.details["tokenizer"] = f"{kind} ({type(tokenizer).__name__})"
            if self.tokenizer not in ("auto", kind):
                import transformers

                raise Unsupported(
                    f"the checkpoint has no {self.tokenizer} tokenizer that transformers "
                    f"{transformers.__version__} loads, only a {kind} one "
                    f"({type(tokenizer).__name__})"
                )

        loading.checks.append(check)


class Padding(Technique):
    """Padding: samples of unlike length share a rectangle of tensors.

    Rows of one tensor have one length, so shorter samples are filled up, and the card works on the
    filling as on anything else. With advertisements of mixed length less than half of the positions
    are real. To waste fewer: pad only to the longest sample of the micro-batch (dynamic), let
    samples of like length meet (uniform-length), or write several samples into one row (packing),
    where each starts again at position 0 and attends to nothing but itself. A fixed length wastes
    most, and is what graph compilers like, since every step has the same shape.
    """

    name: ClassVar[str] = "padding"
    title: ClassVar[str] = "padding"
    order: ClassVar[int] = 20
    needs: ClassVar[tuple[str, ...]] = ("pack",)
    beside: ClassVar[Any] = {
        "length_window": ("padding", ("uniform-length",)),
        "packed_attention": ("padding", ("packing",)),
        "packed_length": ("packed_attention", ("apart",)),
    }
    capabilities: ClassVar[Any] = {"packed_attention": "dynamic_shapes"}
    excludes: ClassVar[Any] = (
        (
            ("packed_attention", "apart"),
            "attention",
            ("eager", "flash_attention_2", "xformers"),
            "apart is PyTorch's own attention; the job asks for another one",
        ),
        (
            ("padding", "packing"),
            "attention",
            ("flash_attention_2",),
            "transformers tells packed samples apart under flash_attention_2 in single rows only",
        ),
    )

    padding: Literal["dynamic", "fixed", "uniform-length", "packing"] = choice_in_id(
        "dynamic",
        description="dynamic pads to the longest sample of the micro-batch, fixed to max_length; "
        "uniform-length sorts samples within windows so that like lengths meet; packing writes "
        "several samples into one row of at most max_length, separated by position_ids.",
    )
    length_window: int = choice_in_id(
        50, ge=2, description="For uniform-length: sort within windows of so many batches."
    )

    packed_attention: Literal["masked", "apart"] = choice_in_id(
        "masked",
        description="For packing: masked computes attention over whole rows under a mask, apart "
        "over each packed sample by itself (varlen attention on CUDA cards, else one call a "
        "sample); these then lie in one row, however long, so that nothing is padded.",
    )

    packed_length: Literal["exact", "longest"] = choice(
        "exact",
        description="For packed_attention apart: each step's row has the length of its samples, or "
        "is filled up to that of the longest step, so that all have one shape and torch_compile "
        "compiles the whole model once.",
    )

    _attention: Any = None  # SampleAttention, once it is used

    def refusals(self, job: JobDescription) -> Iterable[Refusal]:
        apart = self.packed_attention == "apart"
        if apart and compiles_whole(job.parameters) and not one_shape(job.parameters):
            yield Refusal(
                setting="packed_attention",
                reason="with torch_compile every new length of a row would be compiled",
                hint="write packed_length: longest, compile_scope: layers, or packed_attention: "
                "masked",
            )

    def on_data(self, data: DataPlan) -> None:
        if self.padding == "fixed":
            data.pad_to_most()
        elif self.padding == "packing":
            pack = data.task.function("pack")
            one_row = self.packed_attention == "apart"
            data.collate = lambda samples: pack(samples, data.form, one_row=one_row)
            if self.packed_length == "longest":
                self._one_shape(data)
        elif self.padding == "uniform-length":
            data.arrange = partial(rows.uniform_length, window=self.length_window)

    def _one_shape(self, data: DataPlan) -> None:
        """Pad each step's row to the longest, known once batches are arranged."""
        arrange, collate, lengths = data.arrange, data.collate, [0]

        def arranged(samples: Sequence[Learnable], batch: int) -> list[list[int]]:
            batches = arrange(samples, batch)
            lengths[0] = max(
                sum(samples[index].tokens for index in part)
                for positions in batches
                for card in range(data.cards)
                for part in rows.shared_out(positions, card, data.cards, data.micro_batches)
            )
            data.details["packed_length"] = str(lengths[0])
            return batches

        data.arrange = arranged
        data.collate = lambda samples: rows.filled_up(
            collate(samples), lengths[0], data.form.pad_token_id
        )

    def on_model(self, training: Training) -> None:
        if self.packed_attention == "apart":
            from workloads.training import sample_attention

            self._attention = sample_attention.register()
            training.model.config._attn_implementation = sample_attention.NAME
        if self.padding == "packing":
            training.task.function("check_packing")(training.model, training.device)

    def after_steps(self, training: Training) -> None:
        if self._attention is not None:
            training.details["packed_attention"] = self._attention.method


def compiles_whole(parameters: Mapping[str, Any]) -> bool:
    """Tell if a job with these parameters compiles its model as a whole."""
    return bool(parameters.get("torch_compile")) and parameters.get("compile_scope") != "layers"


def one_shape(parameters: Mapping[str, Any]) -> bool:
    """Tell if all steps of a job have inputs of one shape."""
    return parameters.get("padding") == "fixed" or parameters.get("packed_length") == "longest"


#: Default number of batches that each worker prefetches.
_PREFETCH = 2


class DataLoading(Technique):
    """Data loading: batches made while the card computes.

    Putting samples into tensors is the host's work. Done in turn, the card waits for it; worker
    processes make the next batches in the meantime and hold some ready (prefetch). A copy to a card
    is queued like any other work only from page-locked ("pinned") memory, and only then does it pay
    not to wait for it (non-blocking). The share ``data_s`` of a step shows what is left of this.
    """

    name: ClassVar[str] = "data-loading"
    title: ClassVar[str] = "data loading"
    order: ClassVar[int] = 30
    beside: ClassVar[Any] = {
        "prefetch_batches": ("data_workers", ()),
        "non_blocking_copies": ("pin_memory", (True,)),
    }
    capabilities: ClassVar[Any] = {
        "pin_memory": "pinned_memory",
        "non_blocking_copies": "pinned_memory",
    }

    data_workers: int = choice_in_id(
        0,
        ge=0,
        le=64,
        description="Processes that make batches ahead; 0: the training process makes each batch "
        "when it needs it.",
    )
    prefetch_batches: int | None = choice_in_id(
        None, ge=1, description=f"Batches that each worker holds ready. Left out: {_PREFETCH}."
    )
    pin_memory: bool = choice_in_id(
        False, description="Put batches into page-locked memory before they are copied."
    )
    non_blocking_copies: bool = choice_in_id(
        False, description="Do not wait for copies of batches to the card (with pin_memory)."
    )

    def on_data(self, data: DataPlan) -> None:
        if self.non_blocking_copies:
            card = data.device.torch_device
            data.move = lambda inputs: inputs.changed(
                lambda tensor: tensor.to(card, non_blocking=True)
            )
        data.feed = lambda make: self._feed(data, make)

    def _feed(self, data: DataPlan, make: Callable[[int], StepBatch]) -> Iterator[StepBatch]:
        from torch.utils.data import DataLoader

        workers: dict[str, Any] = {}
        if self.data_workers:
            # Forked to inherit samples and functions; safe, since workers never touch a card.
            workers = {
                "num_workers": self.data_workers,
                "prefetch_factor": self.prefetch_batches or _PREFETCH,
                "multiprocessing_context": "fork",
            }
        loader: DataLoader[Any] = DataLoader(
            range(sys.maxsize),  # type: ignore[arg-type]
            batch_size=None,
            sampler=itertools.count(data.first_step),  # type: ignore[arg-type]
            collate_fn=make,  # type: ignore[arg-type]
            pin_memory=self.pin_memory,
            **workers,
        )
        batches = iter(loader)
        if self.data_workers:
            data.details["data_workers"] = f"{self.data_workers} processes made batches"
            # Deleting the iterator would end them as well, but a traceback may keep it.
            data.ending.callback(batches._shutdown_workers)  # type: ignore[attr-defined]
        return batches


SPECS = (TokenizerKind, Padding, DataLoading)
