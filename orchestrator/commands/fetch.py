"""``nightgrid fetch RUN``: bring the rows and the report of a run on a cluster to this machine."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.commands.options import add_results_argument
from orchestrator.host import output
from orchestrator.results.directory import is_address

if TYPE_CHECKING:
    from orchestrator.on_ray.jobs import JobServer
    from orchestrator.results.parcels import Receiver

EPILOG = """\
examples:
  nightgrid fetch smoke --address http://127.0.0.1:8265    then: nightgrid report smoke
  nightgrid fetch smoke --address http://127.0.0.1:8265 --as smoke-monday
  nightgrid fetch smoke --address s3://bucket/nights       a copy that `--results s3://…` made

It may be repeated while the run goes on, and interrupted: what has come is whole, and the next one
brings the rest. Files travel in the log of a job on the head, in parts with checksums; no further
port is needed.
exit codes: 0 all there; 4 no such run, or this machine has one of this name or has gone on with the
copy; 5 not reachable, or not all came
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `nightgrid fetch`."""
    parser.add_argument("id", metavar="RUN", help="name of a run, or id of a submitted job")
    parser.add_argument(
        "--address",
        metavar="URL",
        help="the cluster's dashboard, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS), or the "
        "address of a copy, s3://BUCKET/PREFIX",
    )
    parser.add_argument(
        "--from", dest="there", metavar="DIR", help="where runs lie there (default: as it was sent)"
    )
    parser.add_argument("--as", dest="name", metavar="NAME", help="here (default: its own name)")
    add_results_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(args: argparse.Namespace) -> int:
    """Bring what is not here yet."""
    from orchestrator.core.errors import SubmitError
    from orchestrator.on_ray.jobs import JobServer, directory_there
    from orchestrator.results.fetched import fetched_directory
    from orchestrator.results.parcels import Receiver, what_is_there

    if args.address and is_address(args.address):
        return _from_copy(args)
    server = JobServer(args.address)
    job = server.sent(args.id)
    run_name = job.run if job is not None and job.run else args.id
    name = args.name or run_name
    there = directory_there(args.there, job)
    receiver = Receiver(
        begin=lambda told: fetched_directory(args.results, name, server.address, told)
    )
    _transfer(server, run_name, there, what_is_there(args.results / name), receiver)
    path = args.results / name
    if args.json:
        told = {"run": name, "path": str(path), "received": receiver.received}
        output.say_json(told | {"damaged": receiver.damaged, "finished": receiver.finished})
    else:
        files = "1 file" if len(receiver.received) == 1 else f"{len(receiver.received)} files"
        output.say(f"{name}: {files} came, all is in {path}")
    if receiver.damaged or not receiver.finished:
        what = ", ".join(receiver.damaged[:3]) or "the rest"
        raise SubmitError(f"{what} did not come whole; the same command fetches it again")
    return 0


def _from_copy(args: argparse.Namespace) -> int:
    """Bring the copy that lies at an address of an object store."""
    from orchestrator.results.fetched import fetched_directory
    from orchestrator.results.mirror import fetch_from, shown

    name = args.name or args.id
    source = shown(args.address)
    received = fetch_from(
        args.address,
        args.id,
        lambda run_id: fetched_directory(args.results, name, source, {"run_id": run_id}),
    )
    path = args.results / name
    if args.json:
        output.say_json(
            {
                "run": name,
                "path": str(path),
                "received": received,
                "damaged": [],
                "finished": True,
            }
        )
    else:
        output.say(f"{name}: {len(received)} files came, all is in {path}")
    return 0


def _transfer(
    server: JobServer, run_name: str, there: str, have: dict[str, str], receiver: Receiver
) -> None:
    """Have a job on the head print what is not here, and write it."""
    with tempfile.TemporaryDirectory(prefix="nightgrid-fetch-") as directory:
        known = Path(directory, "have.json")
        known.write_text(json.dumps(have), encoding="ascii")
        arguments = [run_name, "--have", known.name]
        arguments += ["--results", there] if there else []
        module = "orchestrator.results.parcels"
        with server.helper(module, arguments, {known.name: known}) as helper:
            server.follow(helper, receiver.feed)
