"""A driver that takes link as the real one does, and then does what the test wrote for it: the
n-th line of ``script`` is for the n-th driver. No Ray, no torch; it starts in milliseconds.

    python supervised_driver.py DIRECTORY
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.driver.supervisor import VARIABLE, link_to_supervisor

place = Path(sys.argv[1])
link = link_to_supervisor()
assert link is not None and VARIABLE not in os.environ
got: list[int] = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
lives = place / "lives.jsonl"
told = {"pid": os.getpid(), "life": link.number, "ends_at": link.ends_at, "cards": link.cards}
told["succeeded"] = link.succeeded
with lives.open("a") as file:
    file.write(json.dumps(told) + "\n")
words = (place / "script").read_text().splitlines()[link.number - 1].split()
for word in words:
    act, _, value = word.partition(":")
    if act == "drives":
        link.report(run="night", results=str(place / "results"), cards={"HPU": 8})
        link.report(succeeded=True)
        link.report(drives=True, address=value.replace("/", ":"))
    elif act == "row":
        rows = place / "results" / "night" / "rows"
        rows.mkdir(parents=True, exist_ok=True)
        (rows / f"{link.number}.parquet").write_bytes(b"")
    elif act == "again":
        link.report(again=value, ended=3)
        sys.exit(3)
    elif act == "say":
        print(value, flush=True)
    elif act == "end":
        link.report(ended=int(value))
        sys.exit(int(value))
    elif act == "leave":  # a process that outlives it, with all that a process can inherit
        left = subprocess.Popen(["sleep", value], close_fds=False, start_new_session=True)
        (place / "left").write_text(str(left.pid))
    elif act == "vanish":  # as Ray's core does
        os._exit(int(value))
    elif act == "die":
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), int(value))
    elif act == "until":  # so many signals came; then say which
        (place / "waits").touch()
        while len(got) < int(value):
            time.sleep(0.01)
        (place / "signals").write_text(" ".join(signal.Signals(n).name for n in got))
    else:
        raise ValueError(word)
