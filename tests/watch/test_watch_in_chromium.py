"""The watch page in a real browser, while the run that it shows goes on beneath it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from driver_cases import STATUS
from headless_chromium import Page, needs_chromium
from measurement_factory import every_state
from run_directory import RunDirectory
from test_server import serving

from orchestrator.analysis.summary import STALE_AFTER_S, summarize
from orchestrator.core.job import State
from orchestrator.core.status import BestSoFar, FailedAttempt
from orchestrator.report.html import render

pytestmark = needs_chromium


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.append(0)
    directory.append(1, state=State.FAILED, reason="<b>no</b> such layer", final=False)
    best = BestSoFar(job="LoRA b=8", per_s=1204.4, unit="tokens/s", rows=9, provisional="")
    crash = FailedAttempt(
        at=time.time() - 5,
        job="tiny-chatglm3 text-generation int4 b=32 HPU",
        state="FAILED",
        failure_class="crash",
        reason="the worker process died of SIGSEGV",
        card="hpu-1/HPU1",
        final=False,
    )
    directory.status(
        failures=(crash,),
        failure_counts={"crash": 1},
        flag_counts={"contended": 3},
        repeats=2,
        best=(dataclasses.replace(best, provisional="2 flagged rows may be faster"), best),
    )
    return directory


@contextmanager
def watching(
    browser: Page, directory: RunDirectory, path: str = "", **options: Any
) -> Iterator[str]:
    """The page open in the browser while its server runs; the address of its root."""
    with serving(directory) as server:
        origin = f"http://127.0.0.1:{server.server_address[1]}/"
        browser.open(origin + path, **options)
        yield origin
        browser.evaluate("location.replace('about:blank')")


ROWS = "document.querySelectorAll('#rows tr').length === {}"


def text(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).innerText"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_loads_and_shows_the_run(
    browser: Page, directory: RunDirectory, dark: bool, width: int
) -> None:
    screen = {"width": width, "dark": dark, "touch": width < 500}
    with watching(browser, directory, **screen) as origin:
        browser.wait_for(ROWS.format(2))
        assert "17 of 48 jobs done" in text(browser, "#sentence")
        assert "measure 12s" in text(browser, "#cards") and "HPU2" in text(browser, "#cards")
        assert "1,204 tokens/s" in text(browser, "#key")
        assert text(browser, "#best-head") == "Best so far"
        assert text(browser, "#flags") == "flagged rows: 3 contended, 2 repeats"
        open_one, settled = text(browser, "#best li.open"), text(browser, "#best li:last-child")
        assert "LoRA b=8" in open_one and "Provisional: 2 flagged rows may be" in open_one
        assert "of 9 rows" in settled and "Provisional" not in settled
        assert "Emulated cards" in text(browser, "#banners")
        assert "died of SIGSEGV" in text(browser, "#failures")
        assert "<b>no</b> such layer" in text(browser, "#rows")  # shown, not obeyed
        assert browser.evaluate("document.title").startswith("17/48 night")
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(background[4:].split(",")[0]) < 60) is dark
        assert browser.errors == []
        assert [u for u in browser.requests if not u.startswith((origin, "data:"))] == []


def test_the_page_follows_the_run_by_itself(browser: Page, directory: RunDirectory) -> None:
    """What stays is the same element, so that a selection survives."""
    with watching(browser, directory):
        browser.wait_for(ROWS.format(2))
        browser.evaluate("window.first = document.querySelector('#rows tr:last-child'); 1")
        sensors = {"power_w": 412.4, "temperature_c": 61.0, "utilization_percent": 97.0}
        moved = dataclasses.replace(
            STATUS.cards[0],
            phase="load",
            job="another job",
            memory_used_bytes=80 * 2**30,
            **sensors,
        )
        directory.append(2)
        cards = (moved, *STATUS.cards[1:])
        directory.status(done=18, cards=cards, paused="no room for results on /data")
        browser.wait_for(ROWS.format(3))
        assert text(browser, "#cards .sensors") == "412 W · 61 °C · 97% utilization · 80.0 GiB"
        assert "412 W" in text(browser, "#key") and "of 1 card" in text(browser, "#key")
        assert "no room for results on /data" in text(browser, "#banners")
        assert "18 of 48" in text(browser, "#sentence")
        assert "another job" in text(browser, "#cards") and "load" in text(browser, "#cards")
        assert browser.evaluate("document.querySelector('#rows tr:last-child') === window.first")
        directory.status(done=48, finished=True, cards=())
        browser.wait_for("document.querySelector('#sentence').innerText.startsWith('Finished')")
        assert browser.evaluate("document.querySelector('#cards-section').hidden")
        assert browser.errors == []


def test_a_silent_driver_and_a_server_that_has_gone_are_said(
    browser: Page, directory: RunDirectory
) -> None:
    directory.status(at=time.time() - STALE_AFTER_S - 60)
    with serving(directory) as server:
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
        browser.wait_for("document.querySelector('#sentence').classList.contains('open')")
        assert "silent for 3 min" in text(browser, "#sentence")
        assert "may be dead" in text(browser, "#heard")
        directory.status()  # it was only slow
        browser.wait_for("!document.querySelector('#sentence').classList.contains('open')")
        assert text(browser, "#heard") == "The driver is there."
    browser.wait_for("document.querySelector('#heard').innerText.includes('does not answer')")
    assert "old" in text(browser, "#heard")
    browser.evaluate("location.replace('about:blank')")


def test_the_report_works_in_its_own_origin(browser: Page, directory: RunDirectory) -> None:
    rows = every_state()
    directory.store.write_file("report.html", render(summarize(rows), rows))
    with watching(browser, directory, "report") as origin:
        assert browser.errors == []
        assert browser.evaluate("document.querySelectorAll('#rows-table tbody tr').length") == 50
        assert browser.evaluate("window.origin") == "null"
        read = "fetch('/state').then(() => 'read', () => 'refused')"
        assert browser.evaluate(read) == "refused"
        foreign = """<!DOCTYPE html><title>ours</title><script>document.title = 'theirs'</script>
<img src="x" onerror="document.title = 'theirs'"><script src="/watch.js"></script>"""
        directory.store.write_file("report.html", foreign)
        browser.open(f"{origin}report")
        assert browser.evaluate("document.title") == "ours"
        assert browser.errors != []  # the browser says what it refused
