"""Facts of a node that its agent finds, for the launch of workers there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts that the agent of a node found."""

    hostname: str
    address: str  # by which other nodes reach it
    cores: int  # physical ones that this host gives us
    threads: int  # each worker's share of them, at least 1, or what THREADS asks for
    version: str  # of Nightgrid there
    server: str  # socket of the process server
    log_dir: str
    compiled: str = ""  # a directory for code that is compiled for its cards; it outlives Ray
    cards: tuple[str, ...] = ()  # indices of those that Ray gave the agent, as Ray words them
    #: By card: memory in use on those that were idle when the agent came. Emulated ones have none.
    idle_memory_bytes: Mapping[int, int] = field(default_factory=dict)
