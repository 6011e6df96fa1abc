"""``nightgrid watch [RUN]``: a run as a web page that updates itself."""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import socket
import threading

from orchestrator.commands.options import add_results_argument
from orchestrator.host import output

DEFAULT_PORT = 8600

EPILOG = f"""\
example:
  nightgrid watch smoke        then open the address that it prints

The page reads the run's own files, so the driver may run elsewhere on the same storage.
From another machine:  ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} HOST, then http://127.0.0.1:{DEFAULT_PORT}/
With --host other than loopback a token is made and asked for; what is sent is not encrypted.
exit codes: 0 ended by Ctrl-C or SIGTERM; 1 the address cannot be had; 4 no such run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid watch`."""
    parser.add_argument("run_name", nargs="?", metavar="RUN", help="default: the newest run")
    add_results_argument(parser)
    parser.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="where to listen (default: %(default)s, for this machine alone)",
    )
    parser.add_argument(
        "--port",
        metavar="NUMBER",
        type=_port,
        default=DEFAULT_PORT,
        help="0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--token", action="store_true", help="ask for a token on loopback too (other users here)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; in the background of a shell, Ctrl-C is not heard."""
    from orchestrator.core.errors import NightgridError
    from orchestrator.results.finding import find_run
    from orchestrator.watching.access import TOKEN, is_loopback
    from orchestrator.watching.feed import RunFeed
    from orchestrator.watching.server import WatchServer

    # The page itself says what is damaged; the log would say so every two seconds.
    logging.getLogger("nightgrid.store").setLevel(logging.ERROR)
    store = find_run(args.run_name, args.results)
    beyond = not is_loopback(args.host)
    token = secrets.token_urlsafe(24) if beyond or args.token else None
    try:
        server = WatchServer(args.host, args.port, store=store, feed=RunFeed(store), token=token)
    except (OSError, TypeError, ValueError) as error:  # the latter two of what is no host's name
        why = getattr(error, "strerror", None) or error
        raise NightgridError(
            f"cannot listen on {args.host} port {args.port}: {why}; "
            "--port 0 takes a free port, --host is an address of this machine"
        ) from error
    with server:
        name = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
        name = f"[{name}]" if ":" in name else name
        query = f"?{TOKEN}={token}" if token else ""
        output.say(f"{store.run}: http://{name}:{server.server_address[1]}/{query}")
        if beyond:
            output.say("  anyone who has this address can watch; the connection is not encrypted")
        output.say("  Ctrl-C ends the page, not the run")
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            output.say()
    return 0


def _port(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)
