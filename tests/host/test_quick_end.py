"""The end of a process that is not taken apart."""

import subprocess
import sys

import pytest

_PROGRAM = """
import atexit, sys, threading, time
from orchestrator.host.quick_end import end_quickly
class TakenApart:
    def __del__(self):
        print("taken apart")
kept = TakenApart()
atexit.register(lambda: print("registered"))
def work():
    time.sleep(0.2)
    print("worked")
{thread}
sys.stdout.write("printed, ")
end_quickly(7)
print("returned")
"""


@pytest.mark.parametrize(
    ("thread", "told"),
    [
        ("", "printed, registered\n"),
        ("threading.Thread(target=work, daemon=True).start()", "printed, registered\n"),
        (
            "threading.Thread(target=work).start()",
            "printed, returned\nworked\nregistered\ntaken apart\n",
        ),
    ],
    ids=["no thread", "a daemon", "a thread that is waited for"],
)
def test_what_is_left_to_do_is_done_and_nothing_else(thread: str, told: str) -> None:
    """Output, functions for the end and threads; only those need the ordinary end."""
    command = [sys.executable, "-c", _PROGRAM.format(thread=thread)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (told, "")
    assert done.returncode == (0 if "returned" in told else 7)
