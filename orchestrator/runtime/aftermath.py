"""Work that is left after a driver died without a message: its report, and its notification.

``python -m orchestrator.runtime.aftermath`` is started by the supervisor, with a JSON object on
standard input. It says on standard error what went wrong, and raises nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from orchestrator.host import output


def settle(told: dict[str, Any]) -> None:
    """Write the page of what was measured, and tell the hooks."""
    from orchestrator.report import read_summary, write_page
    from orchestrator.results.store import Store
    from orchestrator.watching.notice import Ending
    from orchestrator.watching.notify import hooks_of, notice_of_death, tell_all

    store = Store.open(Path(told["results"]), told["run"])
    page = None
    try:
        if store.exists:
            page = write_page(store, *read_summary(store, lean=True))
    except Exception as error:  # who asked is told all the same
        output.say_aside(f"the report of {store.path} could not be written: {error}")
    try:
        hooks = hooks_of(told["notify"])
    except Exception as error:
        output.say_aside(f"cannot notify anyone: {error}")
        return
    if hooks:
        ending = Ending(told["ending"])
        notice = notice_of_death(store, ending, told["reason"], told["exit_code"], page)
        tell_all(hooks, notice, output.say_aside)


if __name__ == "__main__":
    settle(json.load(sys.stdin))
