"""An engine whose server is ``faulty_server.py``, with the fault that a job names.

Tests install it by an entry point (``SPEC``), or call ``command``. Its faults are those of the
server; ``once:FAULT`` comes only at the first start of all, which is noted in the directory
FAULTY_SERVER_MARKS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workloads.base import Request
from workloads.engines.base import Ability, EngineSpec, ServerCommand, ServerPlace
from workloads.serving import servers
from workloads.settings import Settings, choice

SCRIPT = Path(__file__).with_name("faulty_server.py")
#: A minute and ten seconds otherwise.
SILENCE_S, END_S = 2.0, 1.0


class FaultSettings(Settings):
    fault: str = choice("", loads=True, description="What goes wrong.")


def command(fault: str, place: ServerPlace) -> ServerCommand:
    return ServerCommand(
        arguments=(sys.executable, str(SCRIPT), str(place.port), *([fault] if fault else [])),
        environment={"FAULTY_SERVER_KEY": place.key},
        model="fake",
        counters={"server_running": "fake:running"},
    )


def serve(request: Request, place: ServerPlace) -> ServerCommand:
    servers.SILENCE_S, servers.END_S = SILENCE_S, END_S
    fault = str(request.settings.get("fault") or "")
    if fault.startswith("once:"):
        try:
            Path(os.environ["FAULTY_SERVER_MARKS"], fault).touch(exist_ok=False)
            fault = fault.removeprefix("once:")
        except FileExistsError:
            fault = ""
    return command(fault, place)


SPEC = EngineSpec(
    name="faulty-server",
    summary="A server that fails as asked.",
    devices=("cpu", "cuda", "hpu"),
    abilities={"serve": Ability(function=f"{__name__}:serve", settings=FaultSettings)},
    install="nothing to install",
    own_process=False,
)
