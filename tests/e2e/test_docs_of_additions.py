"""Pages of additions are true; they start no cluster, so no process of clusters has to run them."""

from __future__ import annotations

from itertools import filterfalse
from pathlib import Path

import pytest
from doc_pages import RUN, run_page, starts_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGES = [*filterfalse(starts_cluster, RUN)]


def test_there_are_such_pages() -> None:
    """Else nothing would be run here, and nobody would see it."""
    assert len(PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_of_an_addition_says_to_type_works(page: Path, tmp_path: Path) -> None:
    """Its blocks in order, in a place of its own: commands and programs end with 0."""
    run_page(page, tmp_path)
