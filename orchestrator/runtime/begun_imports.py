"""Imports that a command begins at once, for an agent that will start on this host.

On a cluster that runs already an agent is there two seconds after the command, and the imports of
its workers take three more. So ``nightgrid run`` starts this process first. An agent on this host
that would make the same imports has its process server forked from it, as from kept imports
(``worker/kept_imports.py``); any other makes its own. It holds no card, and it ends with the
command or after an idle minute. It begins nothing where the command's nodes do not compute on this
host, or where another run of the cluster is at work on it: the command will wait for that one's
end, and three seconds of a core would disturb what that one measures.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from orchestrator.worker.child import die_with_parent
from orchestrator.worker.leftovers import VARIABLE, Owner
from orchestrator.worker.private_directory import BEGUN_IMPORTS, private_directories_in_use
from orchestrator.worker.process_settings import start_without_owner
from orchestrator.worker.process_table import processes


@contextlib.contextmanager
def begun_imports(address: str) -> Iterator[None]:
    """Have them begun within the block, where nodes of the cluster at an address will need them."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), address]
    try:
        process = start_without_owner(command, os.environ, subprocess.DEVNULL)
    except OSError:  # the agent imports, then
        yield
        return
    try:
        yield
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End it and remove its directory; process servers that it has forked go on."""
    there = private_directories_in_use(BEGUN_IMPORTS)
    process.kill()
    process.wait()
    for directory in there:
        if directory.process.pid == process.pid:
            directory.remove()


def main(argv: Sequence[str]) -> None:
    """``begun_imports PARENT ADDRESS``."""
    die_with_parent()
    parent, address = argv
    if os.getppid() != int(parent):  # it ended before the kernel was told
        return
    from orchestrator.on_ray.cluster import nodes_of
    from orchestrator.on_ray.raylets import raylets_here
    from orchestrator.worker.host_server import begin_imports, threads_of_nodes

    raylets = raylets_here(address)
    if not raylets or works_in({each.session for each in raylets}):
        return
    threads = threads_of_nodes(nodes_of([each.node for each in raylets]))
    if threads is not None:
        begin_imports(threads=threads, first=_first_of_ray())


def works_in(sessions: Collection[Path]) -> bool:
    """Return whether a run of this user has processes here on a cluster of these sessions of Ray.
    This process's own run has none yet."""
    return any(
        Owner.of(process.variable(VARIABLE) or "") is not None
        and any(process.writes_in(session) for session in sessions)
        for process in processes().values()
    )


def _first_of_ray() -> list[str]:
    """Places in which Ray has its processes look for modules before all others."""
    spec = find_spec("ray")
    places = spec.submodule_search_locations if spec is not None else None
    return [os.path.join(os.path.abspath(place), "thirdparty_files") for place in places or ()]


if __name__ == "__main__":
    main(sys.argv[1:])
