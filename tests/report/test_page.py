"""The HTML page, read as text: self-contained, escaped, complete. See also the Chromium tests."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from measurement_factory import HOSTILE, Night, a_job, every_state, large_run

from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report import html, interactive
from orchestrator.report.html import render

VOID = {"meta", "link", "input", "br", "img", "path", "rect"}


class Outline(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:], self.getpos())
        self.open.pop()

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def data_of(rows: list[Measurement]) -> dict[str, Any]:
    return dict(json.loads(Outline(render(summarize(rows), rows)).scripts[0]))


@pytest.fixture(scope="module")
def page() -> str:
    rows = every_state()
    return render(summarize(rows), rows)


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


def test_the_page_refers_to_nothing_outside(page: str, outline: Outline) -> None:
    assert not re.search(r"https?://", page.replace("http://www.w3.org/2000/svg", ""))
    assert "url(" not in page and "@import" not in page
    for tag, attributes in outline.tags:
        assert "src" not in attributes, tag
        href = attributes.get("href")
        assert href is None or href.startswith("#") or href == "data:,"
        if href and href.startswith("#"):
            assert any(a.get("id") == href[1:] for _, a in outline.tags), href


def test_hostile_text_makes_no_element(outline: Outline) -> None:
    tags = [tag for tag, _ in outline.tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert '</script><script>document.title="owned"' in outline.text
    assert "\x1b" not in outline.text and "\x00" not in outline.text


def test_the_policy_allows_this_script_and_no_request(page: str, outline: Outline) -> None:
    (policy,) = [
        a["content"] or ""
        for tag, a in outline.tags
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    script = page.rsplit("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy


def test_the_data_reads_back(page: str, outline: Outline) -> None:
    rows = every_state()
    summary = summarize(rows)
    data = json.loads(outline.scripts[0])
    assert data["count"] == len(summary.rows)
    assert data["columns"]["job_id"]["v"] == [row.job_id for row in summary.rows]
    assert render(summary, rows) == page, "rendering is deterministic"
    assert "left-out" not in page and "one after the other" not in page  # as of a large run
    assert any(HOSTILE[:40] in text for text in data["columns"]["outputs"]["d"])


def test_banners_say_what_is_not_real(outline: Outline) -> None:
    for words in ("Emulated cards in every row", "Random weights in every", "Synthetic data in"):
        assert words in outline.text
    real = Night(emulated=False).add(a_job(dataset="english-prompts"))
    text = Outline(render(summarize([real]), [real])).text
    assert "Emulated cards" not in text and "Random weights" not in text


def test_figures_have_names_and_a_table_has_the_times_of_the_cards(outline: Outline) -> None:
    figures = [a for tag, a in outline.tags if tag == "svg" and a.get("role") == "img"]
    assert 4 <= len(figures) <= [tag for tag, _ in outline.tags].count("title")
    assert "The same as a table" in outline.text
    headers = [a for tag, a in outline.tags if tag == "th"]
    assert all(a.get("scope") in ("row", "col") for a in headers)


def test_odd_rows_do_not_break_the_page() -> None:
    night = Night()
    row = night.add(a_job(batch_size="max"), State.OUT_OF_MEMORY)
    bare = replace(row, device_name=None, nodes=(), card_indices=(), started_at=None)
    night.add(a_job(precision="😀", batch_size=1))
    strange = night.add(a_job(batch_size=2))
    metrics = replace(strange.metrics, throughput=float("inf"), ttft_s=float("nan"))
    rows = [bare, replace(strange, metrics=metrics), *night.rows[1:]]
    Outline(render(summarize(rows), rows))


def test_outputs_can_be_read_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_TEXT", 20_000)
    night = Night()
    row = night.add(a_job())
    huge = "x" * 500
    rows = []
    for number in range(50):
        rank, item = row.items[0]
        items = ((rank, replace(item, output_text=f"{number} {huge}")),)
        rows.append(replace(row, job_id=f"{number:016x}", items=items))
    outputs = data_of(rows)["columns"]["outputs"]
    assert outputs["d"][0].startswith("0 xxx")
    assert sum(map(len, outputs["d"])) < 21_000
    assert "Left out of the page for its size" in outputs["d"][-1]


def test_the_scatter_is_sampled_and_keeps_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "MOST_POINTS", 500)
    rows = large_run(200, items=10)
    data = data_of(rows)["scatter"]
    latencies = [i.latency_s for r in rows for _, i in r.items if r.state is State.SUCCEEDED]
    assert data["total"] == len(latencies) > 500
    assert len(data["row"]) == 500
    assert max(data["latency"]) == pytest.approx(max(latencies), rel=1e-4)
