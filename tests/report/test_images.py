"""Images in the report: which are shown, how many, and that nothing but an image can be."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

from measurements import row

from orchestrator.report.html import MOST_BYTES, images_of
from orchestrator.report.run_report import page_text, read_summary
from orchestrator.store.reader import with_raw
from orchestrator.store.store import Store

#: A red point.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def test_an_image_comes_back_from_the_tables_as_it_went_in(tmp_path: Path) -> None:
    with Store.open(tmp_path, "night") as store:
        store.append(row(0, image=PNG))
        store.append(row(1))
    first, second = store.measurements()
    assert first.image == PNG and second.image is None
    lean = store.measurements(samples=False)
    assert [one.image for one in lean] == [None, None]
    assert [one.image for one in with_raw(store.tables_path, lean, "items", "image")] == [PNG, None]


def test_the_page_shows_the_first_image_of_each_job(tmp_path: Path) -> None:
    with Store.open(tmp_path, "night") as store:
        store.append(row(0, image=PNG, random_weights=True))
    text = page_text(store, *read_summary(store))
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in text
    assert 'id="images"' in text and "Random weights: they mean nothing" in text
    with Store.open(tmp_path, "other") as store:
        store.append(row(0))
    assert 'id="images"' not in page_text(store, *read_summary(store))


def test_what_is_no_image_is_not_shown() -> None:
    """Rows come from files that anybody may have written."""
    odd = [row(0, image=b"<script>alert(1)</script>"), row(1, image=b""), row(2)]
    assert images_of(odd)["shown"] == []


def test_a_page_carries_so_many_bytes_of_images() -> None:
    large = PNG + bytes(MOST_BYTES // 2)
    rows = [replace(row(number), image=large) for number in range(3)] + [row(3, image=PNG)]
    found = images_of(rows)
    assert [row.job_id for row, _ in found["shown"]] == [rows[0].job_id, rows[3].job_id]
    assert found["left_out"] == 2 and found["random_weights"] is False
