"""Declarations of engines, the libraries that can run a model.

``workloads/engines/NAME.py`` declares one in a ``SPEC``, without importing torch or the library;
plan, workers, doctor and documentation read it. An engine's *abilities* are functions that only the
process that runs them imports:

    generate   load(request, device) -> loaded.GenerationEngine    text, token by token
    train      run(request, context) -> Result                     optimizer steps, each timed
    calibrate  run(request, context) -> Result                     what a precision starts from
    serve      serve(request, place) -> ServerCommand              a server of OpenAI's protocol

A workload runs on every engine with its ability (``WorkloadSpec.ability``); packages may add more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workloads.base import JobDescription, Metric, Refusal, Support
from workloads.devices import Texts, device_spec, release_of
from workloads.models.catalog import checkpoint_kind
from workloads.registry import task_of
from workloads.settings import Settings, load_choice

#: The mode that any process can run.
ORDINARY_MODE = "eager"

#: Names by which libraries call the types of plain weights.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


#: For engines that run exported graphs.
EXPORT = Metric(
    name="export_s",
    title="export",
    unit="s",
    description="Time that the export of the graph took, whenever it was; not in load_s "
    "where the node's cache had it.",
    better="lower",
    ranks="largest",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One thing that an engine can do."""

    function: str  # "module:function", imported only where it runs
    tasks: tuple[str, ...] = ()  # by name (``registry.TASKS``); empty: all of a workload
    #: Refusals beside the workload's rules; must be pure, since the plan calls it.
    refuse: Callable[[JobDescription], Iterable[Refusal]] | None = None
    settings: type[Settings] | None = None  # the engine's own, beside the workload's in a grid
    adapters: bool = False  # applies trained adapters
    attentions: tuple[str, ...] | None = ("sdpa",)  # values of ``attention``; None: all
    default: bool = False  # of jobs whose grid names no engine, before the default engine
    #: Its jobs may share a worker although the engine's others may not (``EngineSpec.alone``).
    shares_worker: bool = False
    #: Its library makes weights for ``random:`` models; None: if Nightgrid loads the model.
    random_weights: bool | None = None

    def takes(self, task: str) -> bool:
        """Return whether it supports a task, by name."""
        return not self.tasks or task in self.tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Place of a server that is to be started: its address, its key and its cards."""

    host: str
    port: int
    key: str = field(repr=False)  # that requests must bear
    device: str  # by name
    cards: int = 1  # which the environment of its process shows it
    threads: int = 1  # of the host, to compute with


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """Result of an engine's ``serve``: how its server is started, asked and read."""

    #: Command line; empty: the server at ``url`` is there already.
    arguments: tuple[str, ...] = ()
    #: Variables, which may hold the key; None: unset.
    environment: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    model: str  # its name in requests
    url: str = ""  # up to and without ``/v1``; "": the place's
    key: str = field(default="", repr=False)  # "": the place's
    health: str = "/health"
    token_ids: bool = True  # completions take prompts as token ids
    usage: bool = True  # streams report token counts when asked (``stream_options``)
    body: Mapping[str, Any] = field(default_factory=dict)  # more fields of each request
    #: Fields with which a request goes on past the end.
    past_end: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    #: Figure (``SERVER_FIGURES``) -> name of a gauge or counter in ``/metrics``.
    counters: Mapping[str, str] = field(default_factory=dict)


def python_command(
    *words: str, options: Mapping[str, object], switches: Iterable[str] = ()
) -> tuple[str, ...]:
    """Command line of a module in this Python: options ``--NAME=VALUE`` of the values that are not
    None, then switches."""
    given = (f"--{name}={value}" for name, value in options.items() if value is not None)
    return (sys.executable, "-m", *words, *given, *(f"--{switch}" for switch in switches))


#: Figures of a server's own counters: name -> title, what it is. Gauges are means over the load,
#: names ending in ``_total`` the increase during it.
SERVER_FIGURES: Mapping[str, tuple[str, str]] = {
    "server_running": ("running", "Requests that the server worked on, in the mean."),
    "server_waiting": ("waiting", "Requests that waited in the server, in the mean."),
    "server_kv_cache": ("KV cache", "Share of the key/value cache in use, in the mean."),
    "server_preemptions_total": ("preemptions", "Requests whose cache was given to others."),
    "server_prefix_queries_total": ("prefix queries", "Tokens of prompts looked up in the cache."),
    "server_prefix_hits_total": ("prefix hits", "Tokens of prompts that the cache had."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that an engine imports."""

    name: str  # of pip
    module: str
    below: Mapping[str, str] = field(default_factory=dict)  # package -> version it must be below
    builds: tuple[str, ...] = ()  # other packages with the same module

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and those of its other builds."""
        return self.name, *self.builds


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Execution modes of a device; a process is started in one."""

    setting: str  # that chooses one; default: the first
    names: tuple[str, ...]
    lacking: Mapping[str, str] = field(default_factory=dict)  # unsupported modes -> reason
    #: Ability -> mode, for jobs whose grid names neither engine nor mode; default: the first.
    chosen_for: Mapping[str, str] = field(default_factory=dict)
    #: (mode, package versions) -> what the mode lacks with them; "" for nothing.
    lacks: Callable[[str, Mapping[str, str]], str] = lambda mode, versions: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: where it runs, what it is made of, and what it can do."""

    name: str  # in grids and rows
    summary: str  # one line
    also_called: tuple[str, ...] = ()  # other names, for the message that refuses them
    devices: tuple[str, ...] = ()
    needs: str = ""  # capability of further devices that it runs on (``devices.CAPABILITIES``)
    abilities: Mapping[str, Ability]
    install: str  # command
    packages: tuple[Package, ...] = ()
    default: bool = False  # runs jobs whose grid names no engine; exactly one has it
    #: Devices on which it is chosen before the default, where installed: device -> rank.
    preferred: Mapping[str, int] = field(default_factory=dict)
    #: (model, precision, package versions of a node) -> whether to prefer it there.
    preferred_for: Callable[[str, str, Mapping[str, str]], bool] = lambda model, precision, has: (
        True
    )
    in_images: bool = True  # the usual images of its devices include it
    own_process: bool = True  # changes its process in ways that break other engines
    alone: bool = False  # one job a process: sized for one job, frees memory only at exit
    variables: Mapping[str, str] = field(default_factory=dict)  # set before any import
    modes: Mapping[str, Modes] = field(default_factory=dict)  # by device
    #: Differences from the default engine, by precision and device.
    precisions: Mapping[tuple[str, str], Support] = field(default_factory=dict)
    #: Precision -> workload that must run first, once per model and number of cards.
    calibrations: Mapping[str, str] = field(default_factory=dict)
    #: These precisions and their calibrations switch their process for good.
    calibrated_apart: bool = False
    #: ``tensor_parallel``: splits matrices over cards; ``continuous_batching``: ended rows take the
    #: next prompt; ``library_trainer``: its library's trainer trains, not Nightgrid's loop.
    features: frozenset[str] = frozenset()
    own_loader: bool = False  # its library opens checkpoints; else the task loads the model
    opens_protected: bool = False  # loads from memory, as protected models (``protect``) need
    #: Its attention ignores sliding windows, so texts must fit into them.
    sees_whole_texts: bool = False
    warmup_passes: int = 1  # untimed passes over every shape
    counts_compilations: bool = True  # compiles in the timed process, where they can be counted
    metrics: tuple[Metric, ...] = ()  # ``figures`` of its loaded models, beside those of tasks
    errors: Texts = field(default_factory=dict)  # of its library, which may raise ValueErrors

    def runs_on(self, device: str) -> bool:
        """Return whether it runs on a device, by name."""
        if device in self.devices:
            return True
        return bool(self.needs) and device_spec(device).can(self.needs)

    def settings(self, ability: str | None) -> type[Settings] | None:
        """Its own settings of an ability; None without any, or without the ability."""
        able = self.abilities.get(ability) if ability is not None else None
        return able.settings if able is not None else None

    def mode(self, device: str, settings: Mapping[str, Any]) -> str:
        """Execution mode of a job; ``ORDINARY_MODE`` if the device has no modes."""
        if (modes := self.modes.get(device)) is None:
            return ORDINARY_MODE
        return str(settings.get(modes.setting) or modes.names[0])

    def apart(self, workload: str, precision: str) -> str:
        """The precision for which this job or calibration needs its own process; else ""."""
        for calibrated, calibration in self.calibrations.items() if self.calibrated_apart else ():
            if calibrated == precision or calibration == workload:
                return calibrated
        return ""

    def lacks(self, device: str, mode: str, versions: Mapping[str, str]) -> str:
        """Describe what it lacks with these package versions; "" if nothing."""
        for package in self.packages:
            if not any(name in versions for name in package.names):
                return f"{package.name} is not installed there: {self.install}"
            for other, limit in package.below.items():
                there = versions.get(other)
                if there is None or release_of(there) >= release_of(limit):
                    return f"{package.name} needs {other} below {limit}, not {there or 'none'}"
        modes = self.modes.get(device)
        return modes.lacks(mode, versions) if modes is not None else ""

    def process_kind(self, mode: str, apart: str = "") -> str:
        """Kind of process that runs this engine in a mode; "" for an ordinary one."""
        own = self.name if self.own_process else ""
        return "/".join(part for part in (own, apart, mode) if part and part != ORDINARY_MODE)


def is_encoder_decoder(model: str) -> bool:
    """Return whether a model, by name, is known to be sequence-to-sequence."""
    kind = checkpoint_kind(model)
    task = task_of(kind) if kind is not None else None
    return task is not None and task.encoder_decoder


class GaudiSettings(Settings):
    """Settings of a Gaudi card's execution."""

    hpu_mode: Literal["lazy", "compile", "eager"] | None = load_choice(
        None,
        description="How a Gaudi card executes: lazy collects operations into graphs, which are "
        "captured and replayed; compile hands torch.compile's graphs to the card (transformers: "
        "with a static cache and prompts padded to multiples of 128); eager runs one "
        "operation after the other. Left out: lazy with optimum-habana, compile with "
        "vllm-gaudi, eager with others; where the grid names no engine either, the plan "
        "chooses (docs/gaudi.md).",
    )


class ServerSettings(Settings):
    """Settings that every server has."""

    max_sequences: int | None = load_choice(
        None,
        ge=1,
        description="Most requests that a server works on at a time (vLLM: max_num_seqs); the "
        "others wait. Left out: the engine's own default, 16 with the engine graph.",
    )
    max_model_len: int | None = load_choice(
        None,
        ge=2,
        description="Most tokens of a prompt and its answer, for which a server makes room. Left "
        "out: what the model allows, with the engine graph at most 4,096.",
    )


class ScheduledServerSettings(ServerSettings):
    """Settings of servers whose library schedules requests over a paged cache (vLLM, SGLang)."""

    tensor_parallel: int | None = load_choice(
        None, ge=1, description="Cards that split each matrix of a server."
    )
    pipeline_parallel: int | None = load_choice(
        None, ge=1, description="Stages of layers of a server, each on its cards."
    )
    data_parallel: int | None = load_choice(
        None,
        ge=1,
        description="Copies of the model in one server. Cards beyond those of one server get "
        "servers of their own, asked in turn.",
    )
    max_batched_tokens: int | None = load_choice(
        None, ge=1, description="Most tokens of a scheduler's step."
    )
    chunked_prefill: bool | None = load_choice(
        None,
        description="Read long prompts in parts beside decoding. Left out: the engine's default.",
    )
    prefix_caching: bool = load_choice(
        False, description="Reuse the cache of beginnings that prompts share."
    )
    kv_cache_dtype: str | None = load_choice(
        None,
        min_length=1,
        description="Numbers of the key/value cache, by the engine's name: fp8_e4m3, fp8_e5m2. "
        "Left out: those of the model.",
    )
    speculative_tokens: int | None = load_choice(
        None,
        ge=1,
        description="Tokens that are guessed ahead in each step: from the prompt (n-grams), or by "
        "draft_model.",
    )
    draft_model: str | None = load_choice(
        None,
        min_length=1,
        description="A smaller model of the same tokenizer that guesses.",
    )


def refuse_idle_draft(job: JobDescription) -> Iterator[Refusal]:
    """Refuse a draft model without tokens to guess."""
    if job.parameters.get("draft_model") and not job.parameters.get("speculative_tokens"):
        yield Refusal(
            setting="draft_model", reason="it guesses nothing", hint="write speculative_tokens"
        )


class CompileSettings(Settings):
    """Settings of torch's compiler."""

    torch_compile: bool = load_choice(
        False,
        description="Compile the model (torch.compile, Inductor), with a static cache and, with "
        "transformers, prompts padded to multiples of 128: graphs for each shape, which warm-up "
        "meets before timing. On Gaudi hpu_mode says so; graph compiles always on CUDA cards.",
    )
