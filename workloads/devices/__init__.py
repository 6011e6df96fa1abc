"""Kinds of cards. Each file here declares one as ``SPEC``.

A ``DeviceSpec`` is the static description that plans, the doctor and technique rules read; a
``base.Device`` drives the one card of a process. Other packages add devices by the entry point
``nightgrid.devices`` (docs/extending.md). Specs must not import torch: every plan reads them.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from workloads.base import BadConfiguration, Support, WorkloadError
from workloads.registry import Declared, function_of

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: Capabilities that rules may ask of a device, with their meanings.
CAPABILITIES: Mapping[str, str] = {
    "own_memory": "memory apart from the host's, to which batches are copied",
    "native_eager": "torch computes on it as it does on a CPU: the stock engine needs no more",
    "dynamic_shapes": "shapes may change at every step, and nothing is compiled anew",
    "graphs": "a step is captured once and replayed",
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
    "exclusive": "only one process can hold a card: a server beside the worker gets none",
    "host_cores": "it computes on cores of its host that others share: its jobs take turns",
}

#: int4 by bitsandbytes.
NF4 = "bitsandbytes NF4, 4-bit weights in blocks of 64, expanded to bf16 for each product"

#: Error classes, and the fragments of messages (lower case) that map to each.
Texts = Mapping[type[WorkloadError], tuple[str, ...]]

#: Index groups that a job may use on one server, best first.
Groups = tuple[tuple[int, ...], ...]


def any_groups(count: int, server_cards: int) -> Groups:
    """Return groups of neighbours, aligned if the count is a power of two: less fragmentation."""
    step = count if count & (count - 1) == 0 else 1
    starts = range(0, server_cards - count + 1, step)
    return tuple(tuple(range(start, start + count)) for start in starts)


def aligned_groups(count: int, server_cards: int) -> Groups:
    """Return aligned groups, powers of two only: cards are linked in pairs and quads."""
    return any_groups(count, server_cards) if count & (count - 1) == 0 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """A process to be started for one card."""

    card_index: int  # on its node
    threads: int | None = None  # of OpenMP; None: the library's default
    kind: str = ""  # required by its jobs (``engines.process_kind``)
    cards: int = 1  # in its gang
    gang: tuple[int, ...] = ()  # cards of the gang on this node, by local rank; empty: no gang
    uuids: Mapping[int, str] = field(default_factory=dict)  # of cards to be shown by them
    #: Local directory for compiled code, specific to the image and the kind of card.
    compiled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """State of one card as reported by the vendor's tool."""

    index: int  # the module id on Gaudi
    product: str = ""  # the tool's name for it
    links: int | None = None  # to the other cards of its server; None: unknown
    links_up: int | None = None
    occupied: str | None = None  # reason why it is in use; None: free or unknown
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    lost: str = ""  # why it cannot be used


def shown_cards(
    variable: str, value: str, cards: Collection[int], uuids: Callable[[], Mapping[int, str]]
) -> tuple[int, ...]:
    """Return the cards that a variable shows a process: by index, by UUID or its beginning.

    As CUDA does, it ends at -1. Raises BadConfiguration, which says what the value is instead.
    """
    what = f"{variable}={value!r}"
    words = [word.strip() for word in value.split(",")]
    if value.strip().lower() == "all":
        return tuple(sorted(cards))
    if words[0].lower() in _NO_CARD:
        raise BadConfiguration(f"{what} hides every card; unset it, or list the cards to use")
    shown: list[int] = []
    for word in words[: words.index("-1")] if "-1" in words else words:
        if word.isdecimal():
            matches = [index for index in cards if index == int(word)]
        elif word.upper().startswith("MIG-"):
            raise BadConfiguration(
                f"{what} names a MIG instance, which is a part of a card; jobs get whole cards: "
                "name the card, and turn MIG off there"
            )
        else:
            known = uuids() if word else {}
            matches = [index for index in known if known[index].lower().startswith(word.lower())]
        if len(matches) != 1:
            here = ", ".join(map(str, sorted(cards)))
            many = "is the beginning of several UUIDs" if matches else "is no card of this machine"
            raise BadConfiguration(f"{what}: {word!r} {many}, which has the cards {here}")
        if matches[0] in shown:
            raise BadConfiguration(f"{what} names card {matches[0]} twice")
        shown += matches
    return tuple(sorted(shown))


#: Values that show no card; schedulers write NoDevFiles where a job asked for none.
_NO_CARD = ("", "-1", "nodevfiles", "none", "void")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Input of ``DeviceSpec.examine``."""

    versions: Mapping[str, str]  # by package, nightgrid included
    cards: tuple[CardFacts, ...] = ()
    driver_version: str | None = None  # of the cards
    kernel: str = ""  # such as "Linux 6.8.0-45-generic"
    kernel_arguments: str = ""
    governors: Mapping[str, int] = field(default_factory=dict)  # CPU governor -> number of cores
    max_cstate: int | None = None  # deepest state of idle cores; None: unknown
    hugepages_asked: Mapping[str, int] = field(default_factory=dict)  # sysctl file -> pages
    hugepages_total: int = 0
    hugepage_bytes: int = 0


def release_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (1, 24, 1) of ``1.24.1-b336d5e``; () without any."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


class Level(enum.IntEnum):
    """Severity of a finding."""

    NOTE = 0  # worth knowing
    WARNING = 1  # a run works, but its figures or speed may suffer
    ERROR = 2  # a run would fail, at least on a node

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a cluster or a server, with its remedy."""

    check: str  # identifier for scripts
    message: str
    remedy: str
    level: Level = Level.WARNING
    where: str = "cluster"  # or the node's name


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Static description of one kind of card."""

    name: str  # of its software and file; used in engines' lists and --emulate 1x2:GPU:cuda
    accelerator: str  # name in grids and rows, in capitals
    title: str  # in messages: "Gaudi"
    summary: str  # in the schema: "Intel Gaudi"
    also_called: tuple[str, ...] = ()  # aliases that people write in grids: maker, software
    handle: str  # "module:Class", imported only where a card is used
    order: int = 1000  # sort key; the first one of this folder is a grid's default
    torch_type: str = ""  # torch's device type; default: ``name``
    host: bool = False  # the node's processor; exactly one kind

    #: Ray's resource name; ``ray_option`` if Ray has an argument for it ("num_gpus").
    ray_resource: str
    ray_option: str = ""
    #: Prefix of Ray's ``accelerator_type:``, where kinds share a resource.
    ray_type: str = ""
    #: True if Ray reports which cards of a node are in use; else a node is claimed whole.
    ray_indices: bool = False
    registration: str = ""  # how to register the cards with Ray, for clusters that show none

    visible_variable: str = ""  # comma-separated indices of the cards that a process sees
    container_variable: str = ""  # cards that a container's runtime puts into it
    #: True if each process of a gang sees all of the gang's cards on its server.
    gang_visible: bool = False
    #: Further environment variables, set before torch is imported. Pure.
    variables: Callable[[CardProcess], Mapping[str, str]] = lambda process: {}
    groups: Callable[[int, int], Groups] = any_groups
    server_cards: int | None = None  # if all servers have the same number
    #: Host cores left to Ray, the driver and starting workers, if there is more than one.
    spare_cores: int = 0

    precisions: Mapping[str, Support]  # by name; missing ones are unsupported
    capabilities: frozenset[str] = frozenset()
    errors: Texts = field(default_factory=dict)  # of its software; the first match counts

    imports: tuple[str, ...] = ()  # modules that jobs need besides torch and transformers
    packages: tuple[str, ...] = ()  # whose versions are recorded in rows
    tool: str = ""  # the vendor's command that lists the cards
    driver_command: tuple[str, ...] = ()  # prints the driver's version
    versions: Callable[[], Mapping[str, str]] = dict  # of other software, for rows
    no_cards_remedy: str = ""  # advice if the tool lists no card
    examine: Callable[[int, ServerFacts], Iterable[Finding]] = lambda cards, facts: ()
    #: (Pattern for the driver's whole name of a card, product in devices.csv).
    data_sheets: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.accelerator):
            raise ValueError(f"{self.name}: {self.accelerator!r} is no name in capitals")
        if unknown := self.capabilities - CAPABILITIES.keys():
            raise ValueError(f"{self.name}: no capabilities {', '.join(sorted(unknown))}")
        if not self.torch_type:
            object.__setattr__(self, "torch_type", self.name)

    def answers_to(self, word: str) -> bool:
        """Tell if a word names this device: its software, its maker or one of its cards."""
        word = word.casefold()
        own = {self.name, self.torch_type, self.title, self.accelerator, *self.also_called}
        cards = {
            part for _, sheet in self.data_sheets for part in re.split(r"\W+", sheet.casefold())
        }
        return any(word.startswith(name.casefold()) for name in own) or word in cards

    def can(self, capability: str) -> bool:
        """Tell if the device has a capability of ``CAPABILITIES``."""
        if capability not in CAPABILITIES:
            raise ValueError(f"no capability '{capability}'. There is: {', '.join(CAPABILITIES)}.")
        return capability in self.capabilities

    def visible(self, *cards: int | str) -> dict[str, str]:
        """Return the variable that limits a process to these cards, by index or UUID; empty if
        there is none."""
        shown = {self.visible_variable: ",".join(map(str, cards))}
        return shown if self.visible_variable else {}

    def product(self, name: str) -> str:
        """Return the product in devices.csv for a card's name; "" if there is none."""
        for pattern, product in self.data_sheets:
            # Match the whole name: MIG slices and other boards of a chip are different products.
            if re.fullmatch(pattern, name.strip(), re.IGNORECASE):
                return product
        return ""

    def shown(self, process: CardProcess) -> dict[str, str]:
        """Return the variable that limits this process to its cards."""
        gang = process.gang if self.gang_visible else ()
        cards = gang or (process.card_index,)
        return self.visible(*(process.uuids.get(card) or card for card in cards))

    def ray_request(self, cards: int) -> dict[str, object]:
        """Return the arguments that request this many cards from Ray."""
        if self.ray_option:
            return {self.ray_option: cards}
        return {"resources": {self.ray_resource: cards}}

    def precision(self, name: str) -> Support:
        """Return this device's support of a precision."""
        missing = Support(supported=False, reason=f"nobody has said what {name} is on {self.title}")
        return self.precisions.get(name, missing)


#: Every device by name; other packages cannot replace those of this folder.
DEVICES: Declared[DeviceSpec] = Declared(__name__, DeviceSpec, "nightgrid.devices")


@cache
def own_devices() -> tuple[DeviceSpec, ...]:
    """Return the devices of this folder in their declared order."""
    return tuple(sorted((DEVICES[name] for name in DEVICES.own), key=lambda spec: spec.order))


@cache
def all_devices() -> tuple[DeviceSpec, ...]:
    """Return the devices of this folder, then those of other packages, in their declared order."""
    devices = {spec.accelerator: spec for spec in own_devices()}
    theirs = (DEVICES[name] for name in DEVICES if name not in DEVICES.own)
    for spec in sorted(theirs, key=lambda spec: (spec.order, spec.name)):
        if devices.setdefault(spec.accelerator, spec) is not spec:
            message = "device %s is left out: there is an accelerator %s"
            logging.getLogger("nightgrid.devices").warning(message, spec.name, spec.accelerator)
    return tuple(devices.values())


@cache
def of_accelerator(name: str) -> DeviceSpec:
    """Return the device of an accelerator; raises BadConfiguration, which lists the known ones."""
    for devices in (own_devices, all_devices):
        for spec in devices():
            if spec.accelerator == name:
                return spec
    there_is = ", ".join(spec.accelerator for spec in all_devices())
    raise BadConfiguration(f"no accelerator '{name}'; there is: {there_is}")


@cache
def host_device() -> DeviceSpec:
    """Return the node's processor, which also emulates all other cards."""
    return next(spec for spec in own_devices() if spec.host)


def device_spec(name: str) -> DeviceSpec:
    """Return the device of this name; raises BadConfiguration if there is none."""
    if name not in DEVICES:
        raise BadConfiguration(f"no device '{name}'. There is: {', '.join(DEVICES)}.")
    return DEVICES[name]


def device_class(name: str) -> type[Device]:
    """Return the ``Device`` class of this device; raises as ``device_spec``."""
    return cast("type[Device]", function_of(device_spec(name).handle))


def device_for(name: str) -> Device:
    """Return a handle on this process's card; the card is opened on first use."""
    return device_class(name)()


def environment_for(name: str, card_index: int, **process: Any) -> dict[str, str]:
    """Return variables that show a process its card only, to be set before torch is imported;
    ``card_index`` is the driver's (Gaudi: module id), the rest are fields of ``CardProcess``."""
    spec, card_process = device_spec(name), CardProcess(card_index=card_index, **process)
    variables = {"TOKENIZERS_PARALLELISM": "false"}
    if card_process.threads is not None:
        variables["OMP_NUM_THREADS"] = str(card_process.threads)
    return {**variables, **spec.shown(card_process), **spec.variables(card_process)}
