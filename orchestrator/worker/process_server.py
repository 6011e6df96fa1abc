"""One small server on every node starts the worker processes and sees every one of them die.

A worker process can hang with the interpreter lock held, be killed for memory, or leave children
behind, and its card is free only when all of that is gone. So workers are children of this server:
a single thread that starts a process on request, kills all that descends from it when whoever asked
for it goes away, waits until nothing of that is left, and then says how it died (``serving.py``).

The server itself may be the first to be killed: Ray kills the children of an actor's process when
that process ends. So there are two generations, each of which ends all when the other goes: a
guardian, which the agent starts and which only waits, and the server beneath it.

Where cards are emulated on the CPU, importing torch and transformers for sixteen workers would
take longer than their jobs. There the server imports them once, before it has any thread, and
forks. On real cards every worker is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from orchestrator.host import output
from orchestrator.worker.child import adopt_orphans, die_with_parent, end_all
from orchestrator.worker.redaction import redact
from orchestrator.worker.serving import ProcessServer, tell

#: Mark at the end of a module's name: workers are forked even where it cannot be imported.
OPTIONAL = "?"


def installed(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` whose package is installed here."""
    return [name for name in modules if find_spec(name.removesuffix(OPTIONAL).partition(".")[0])]


def preload(modules: Sequence[str]) -> bool:
    """Import ``modules``, the optional ones last, and say whether forking is safe: one thread, and
    all of them there that are not optional."""
    in_turn = sorted(modules, key=lambda name: name.endswith(OPTIONAL))
    if not all(map(_preload_one, in_turn)):
        return False
    gc.freeze()  # shared pages stay shared
    return len(os.listdir("/proc/self/task")) == 1


def _preload_one(asked: str) -> bool:
    """Import one module; False if it cannot be imported and is not optional."""
    name = asked.removesuffix(OPTIONAL)
    started = time.monotonic()
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken library is the worker's to report
        text = redact(str(error), os.environ)
        if asked != name:
            output.say_aside(f"cannot preload {name}: {text}; workers are forked without it")
            return True
        output.say_aside(f"cannot preload {name}: {text}; workers start afresh")
        return False
    output.say(f"imported {name} in {time.monotonic() - started:.1f} s")
    return True


def main(argv: Sequence[str]) -> None:
    """``process_server SOCKET [MODULE[?] …]``: stdin is the lifeline."""
    sys.stdout, sys.stderr = output.guarded(sys.stdout), output.guarded(sys.stderr)
    sys.exit(run(argv[0], lambda: bool(argv[1:]) and preload(argv[1:])))


def run(path: str, preload: Callable[[], bool], asker: socket.socket | None = None) -> int:
    """Become a guardian with a server beneath it; exit status of whichever of the two returns.

    Args:
        path: of the socket, alone in a directory. Standard input is the lifeline.
        preload: imports what is to be imported, and says whether workers are forked.
        asker: is told the guardian's number and where the server listens, and gives the socket its
            name; one that has gone has not, and may have another server there.
    """
    adopt_orphans()
    lifeline, held = os.pipe()
    loading, loaded = os.pipe()  # closed by the server once it serves, or by its end
    # The guardian has it, too, so that who connects once the server is gone waits until its workers
    # are.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guardian = os.getpid()
    # A process that finds the socket's file connects at once, so it is named once it listens.
    unnamed = os.path.join(os.path.dirname(path), f"_{guardian}")
    listener.bind(unnamed)
    server = os.fork()
    if server:
        os.close(lifeline)
        os.close(loaded)
        if asker is not None:
            asker.close()
        return _guard(server, loading, path, unnamed)
    os.close(held)
    os.close(loading)
    # While it imports it watches no lifeline.
    die_with_parent()
    if os.getppid() != guardian:
        os._exit(70)
    os.setpgid(0, 0)  # a signal to the guardian's group leaves one of the two to clean up
    listener.listen(128)  # requests made while modules are imported wait here
    if asker is None:
        os.rename(unnamed, path)
    else:
        tell(asker, {"pid": guardian, "socket": unnamed})
        asker.close()
    adopt_orphans()
    preloaded = preload()
    output.say(f"serving, {'preloaded' if preloaded else 'fresh processes'}")
    die_with_parent(then=False)  # from now on it ends its workers before itself
    os.close(loaded)
    ProcessServer(listener=listener, preloaded=preloaded).serve(0, lifeline)
    _remove_socket(path, unnamed)
    return 0


def _guard(server: int, loading: int, path: str, unnamed: str) -> int:
    """Wait for the server and kill what it leaves, which is this process's own by then; how it
    ended, as a shell says it. A server that nobody wants any more while it still imports is
    killed."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.register(loading, 0)
    if loading not in dict(hung_up.poll()):
        os.kill(server, signal.SIGKILL)
        _remove_socket(path, unnamed)
    _, status = os.waitpid(server, 0)
    end_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _remove_socket(path: str, unnamed: str) -> None:
    """Remove a server's socket and the directory that was made for it alone; where it never got its
    name, what has that name is another's."""
    with contextlib.suppress(OSError):
        os.remove(unnamed)
        return
    with contextlib.suppress(OSError):
        os.remove(path)
        os.rmdir(os.path.dirname(path))


if __name__ == "__main__":
    main(sys.argv[1:])
