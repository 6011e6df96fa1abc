"""Devices: the kinds of cards there are. Each file here declares one in its ``SPEC``.

``DeviceSpec`` says all that a plan, a cluster, the doctor and the rules of techniques have to know
of a kind of card; the class behind it (``base.Device``) drives the one card of a process. Another
installed package adds a device by the entry point ``nightgrid.devices`` (docs/extending.md).
A spec imports neither torch nor a vendor's tools, since every plan reads the specs of this folder.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from workloads.base import BadConfiguration, Support, WorkloadError
from workloads.registry import Declared

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: What rules may ask of a device, and what it means.
CAPABILITIES: Mapping[str, str] = {
    "own_memory": "memory apart from the host's, to which batches are copied",
    "native_eager": "torch computes on it as it does on a CPU: the stock engine needs no more",
    "dynamic_shapes": "shapes may change at every step, and nothing is compiled anew",
    "graphs": "a step is captured once and replayed",
    "side_copies": "batches are copied beside the work, which waits for them (Device.side_copies)",
    "pinned_memory": "copies from page-locked memory need not be waited for",
    "pinned_offload": "what DeepSpeed keeps on the host lies in page-locked memory",
    "paged_memory": "bitsandbytes moves the optimizer's state to the host when a card runs full",
    "fused_optimizer": "an AdamW that makes one pass over memory",
    "optimizers_8bit": "8-bit optimizers of bitsandbytes and torchao",
    "loss_scaling": "torch's gradient scaler, for products in fp16",
    "matmul_precision": "torch's setting for the precision of fp32 products",
    "flash_attention_2": "kernels of the package flash-attn",
    "xformers": "kernels of the package xformers",
    "liger_kernels": "kernels of the package liger-kernel",
    "fp8_products": "products in fp8; else fp8 is a format of weights alone",
    "nf4_any_width": "NF4 kernels take rows that are not whole blocks",
    "onednn": "fp32 products by oneDNN instead of PyTorch's BLAS",
    "sparse_2_4": "kernels that skip two zeros of every four inputs",
    "overlapped_exchange": "DeepSpeed exchanges gradients while they are computed",
    "contiguous_gradients": "DeepSpeed keeps gradients in one piece",
    "reduce_scatter": "ZeRO 2 sends each card its part of the gradients only",
    "compilation_counters": "its software compiles, and counts it (Device.compilations)",
    "host_cores": "it computes on cores of its host that others share: its jobs take turns",
}

#: What int4 is wherever bitsandbytes does it.
NF4 = "bitsandbytes NF4, 4-bit weights in blocks of 64, expanded to bf16 for each product"

#: An error class and the fragments of messages (lower case) that mean it.
Texts = tuple[type[WorkloadError], tuple[str, ...]]

#: Index groups that a job may hold on one server, best first.
Groups = tuple[tuple[int, ...], ...]


def any_groups(count: int, server_cards: int) -> Groups:
    """Neighbours; aligned where the count is a power of two, which keeps the rest usable."""
    return _neighbours(count, server_cards, count if count & (count - 1) == 0 else 1)


def aligned_groups(count: int, server_cards: int) -> Groups:
    """Aligned neighbours, in powers of two only, as cards are joined in pairs and quads."""
    return _neighbours(count, server_cards, count) if count & (count - 1) == 0 else ()


def _neighbours(count: int, server_cards: int, step: int) -> Groups:
    starts = range(0, server_cards - count + 1, step)
    return tuple(tuple(range(start, start + count)) for start in starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """A process that is to be started for one card."""

    card_index: int  # on its node
    threads: int | None = None  # of OpenMP; None: left to the library
    kind: str = ""  # what it must be for its jobs (``engines.process_kind``)
    cards: int = 1  # of the gang that it belongs to
    gang: tuple[int, ...] = ()  # cards of the gang on this node, by local rank; none: no gang
    #: A directory of the node's own for compiled code: of its image and kind of card alone.
    compiled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card as the vendor's tool sees it from outside."""

    index: int  # the module id on Gaudi
    product: str = ""  # as the tool calls it
    links: int | None = None  # to the other cards of its server; None: nobody can tell
    links_up: int | None = None
    occupied: str | None = None  # who has it; None: free, or nobody can tell
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Facts that a device's rules for servers look at (``DeviceSpec.examine``)."""

    versions: Mapping[str, str]  # of packages, and of nightgrid, by name
    cards: tuple[CardFacts, ...] = ()
    driver_version: str | None = None  # of the cards
    kernel: str = ""  # such as "Linux 6.8.0-45-generic"
    kernel_arguments: str = ""
    governors: Mapping[str, int] = field(default_factory=dict)  # of the cores: how many have which
    max_cstate: int | None = None  # that idle cores may enter; None: nobody can tell
    hugepages_asked: Mapping[str, int] = field(default_factory=dict)  # by files of sysctl: pages
    hugepages_total: int = 0
    hugepage_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """One thing on a server that is not as its cards need it, and what to do about it."""

    check: str  # a word for scripts
    message: str
    remedy: str
    level: Literal["note", "warning", "error"] = "warning"  # error: a run would fail


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One kind of card, as everybody sees it but the class that drives it."""

    name: str  # of its software, and of its file: in engines' lists and in --emulate 1x2:GPU:cuda
    accelerator: str  # in grids and rows, in capitals
    title: str  # in messages: "Gaudi"
    summary: str  # beside its name in the schema: "Intel Gaudi"
    also_called: tuple[str, ...] = ()  # its maker, its software: what people write in grids
    handle: str  # "module:Class", imported where a card is driven
    order: int = 1000  # among all kinds; the first of this folder is the default of a grid
    torch_type: str = ""  # as torch calls it; left out: as ``name``
    host: bool = False  # it is the node's processor; one kind is

    #: Ray's name for the cards of a node, and the option by which Ray is told of a resource that
    #: it knows itself ("num_gpus").
    ray_resource: str
    ray_option: str = ""
    #: How Ray's ``accelerator_type:`` begins, where kinds share a resource.
    ray_type: str = ""
    #: Whether Ray says which cards of a node are held by whom; where not, a node is claimed whole.
    ray_indices: bool = False
    registration: str = ""  # how a node tells Ray of them, for whoever has a cluster without cards

    visible_variable: str = ""  # names the cards that a process sees, by index, with commas between
    #: Whether each process of a gang is shown all of the gang's cards on its server, and told its
    #: own by another variable.
    gang_visible: bool = False
    #: What a process needs in its environment besides, before it imports torch. Pure.
    variables: Callable[[CardProcess], Mapping[str, str]] = lambda process: {}
    groups: Callable[[int, int], Groups] = any_groups
    server_cards: int | None = None  # where all servers have as many
    #: Cores of its host that its jobs leave to Ray, the driver and workers that start, where they
    #: have more than one.
    spare_cores: int = 0

    precisions: Mapping[str, Support]  # by name; one that is left out is unsupported
    capabilities: frozenset[str] = frozenset()
    errors: tuple[Texts, ...] = ()  # what its software says, the first that fits counts

    imports: tuple[str, ...] = ()  # modules that a job needs besides torch and transformers
    packages: tuple[str, ...] = ()  # whose versions may explain a difference between two rows
    tool: str = ""  # the vendor's command that lists the cards
    driver_command: tuple[str, ...] = ()  # prints the driver's version
    versions: Callable[[], Mapping[str, str]] = dict  # of software that is no package, for rows
    no_cards_remedy: str = ""  # when the tool shows none
    examine: Callable[[int, ServerFacts], Iterable[Complaint]] = lambda cards, facts: ()
    #: What its driver calls a card (a pattern for the whole name) -> its line in devices.csv.
    data_sheets: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.accelerator):
            raise ValueError(f"{self.name}: {self.accelerator!r} is no name in capitals")
        if unknown := self.capabilities - CAPABILITIES.keys():
            raise ValueError(f"{self.name}: no capabilities {', '.join(sorted(unknown))}")
        if not self.torch_type:
            object.__setattr__(self, "torch_type", self.name)

    def answers_to(self, word: str) -> bool:
        """Tell if a word may mean this kind of card: its software, its maker, or one card."""
        word = word.casefold()
        own = {self.name, self.torch_type, self.title, self.accelerator, *self.also_called}
        cards = {
            part for _, sheet in self.data_sheets for part in re.split(r"\W+", sheet.casefold())
        }
        return any(word.startswith(name.casefold()) for name in own) or word in cards

    def can(self, capability: str) -> bool:
        """Tell if the device has a capability, by its name in ``CAPABILITIES``."""
        if capability not in CAPABILITIES:
            raise ValueError(f"no capability '{capability}'. There is: {', '.join(CAPABILITIES)}.")
        return capability in self.capabilities

    def visible(self, *indices: int) -> dict[str, str]:
        """The variable by which a process sees these cards only; empty where there is none."""
        shown = {self.visible_variable: ",".join(map(str, indices))}
        return shown if self.visible_variable else {}

    def product(self, name: str) -> str:
        """The line of devices.csv for a card of this name; "" where there is none."""
        for pattern, product in self.data_sheets:
            # The whole name: a slice of a card (MIG), or another board of its chip, is not it.
            if re.fullmatch(pattern, name.strip(), re.IGNORECASE):
                return product
        return ""

    def shown(self, process: CardProcess) -> dict[str, str]:
        """The variable by which this process sees its cards."""
        if self.gang_visible and process.gang:
            return self.visible(*process.gang)
        return self.visible(process.card_index)

    def ray_request(self, cards: int) -> dict[str, object]:
        """The arguments by which Ray is told of so many of these cards."""
        if self.ray_option:
            return {self.ray_option: cards}
        return {"resources": {self.ray_resource: cards}}

    def precision(self, name: str) -> Support:
        """Support of a precision on this device."""
        missing = Support(supported=False, reason=f"nobody has said what {name} is on {self.title}")
        return self.precisions.get(name, missing)


#: Every device by name; nobody else's takes the place of one of ours.
DEVICES: Declared[DeviceSpec] = Declared(__name__, DeviceSpec, "nightgrid.devices")


@cache
def own_devices() -> tuple[DeviceSpec, ...]:
    """The devices of this folder, in their declared order."""
    return tuple(sorted((DEVICES[name] for name in DEVICES.own), key=lambda spec: spec.order))


@cache
def all_devices() -> tuple[DeviceSpec, ...]:
    """Our devices, and after them those of other packages, in their declared orders."""
    taken = {spec.accelerator for spec in own_devices()}
    devices = list(own_devices())
    theirs = (DEVICES[name] for name in DEVICES if name not in DEVICES.own)
    for spec in sorted(theirs, key=lambda spec: (spec.order, spec.name)):
        if spec.accelerator in taken:
            message = "device %s is left out: there is an accelerator %s"
            logging.getLogger("nightgrid.devices").warning(message, spec.name, spec.accelerator)
            continue
        taken.add(spec.accelerator)
        devices.append(spec)
    return tuple(devices)


@cache
def of_accelerator(name: str) -> DeviceSpec:
    """The device behind a name in grids. Other packages are looked for where it is none of ours.

    Raises:
        BadConfiguration: there is none; the message lists what there is.
    """
    for devices in (own_devices, all_devices):
        for spec in devices():
            if spec.accelerator == name:
                return spec
    there_is = ", ".join(spec.accelerator for spec in all_devices())
    raise BadConfiguration(f"no accelerator '{name}'; there is: {there_is}")


@cache
def host_device() -> DeviceSpec:
    """The processor of a node, which also emulates all other cards."""
    return next(spec for spec in own_devices() if spec.host)


def device_spec(name: str) -> DeviceSpec:
    """The device of this name.

    Raises:
        BadConfiguration: there is no such device.
    """
    if name not in DEVICES:
        raise BadConfiguration(f"no device '{name}'. There is: {', '.join(DEVICES)}.")
    return DEVICES[name]


def device_class(name: str) -> type[Device]:
    """The class that drives a card of this device.

    Raises:
        BadConfiguration: there is no such device.
    """
    module, _, attribute = device_spec(name).handle.partition(":")
    return cast("type[Device]", getattr(importlib.import_module(module), attribute))


def device_for(name: str) -> Device:
    """A handle on this process's card. Opening the card itself waits for the first real use.

    Raises:
        BadConfiguration: there is no such device.
    """
    return device_class(name)()


def environment_for(name: str, card_index: int, **process: Any) -> dict[str, str]:
    """Variables to set before torch is imported, so that the process sees only its own card.

    ``card_index`` counts as the driver does on its node (on Gaudi: the module id); the other
    arguments are those of ``CardProcess``.

    Raises:
        BadConfiguration: there is no such device.
    """
    spec, card_process = device_spec(name), CardProcess(card_index=card_index, **process)
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if card_process.threads is not None:
        variables["OMP_NUM_THREADS"] = str(card_process.threads)
    return {**variables, **spec.shown(card_process), **spec.variables(card_process)}
