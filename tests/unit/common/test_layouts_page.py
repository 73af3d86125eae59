"""The page and the committed result list the layouts that the integration suite proves, and no others."""

import json
from pathlib import Path

from bench.layouts import PAGE, rows_of, table
from tests.integration.layouts import LAYOUTS

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "layouts.json"


def decided(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without what was measured."""
    return [{k: v for k, v in row.items() if k not in ("worst gradient error", "repeatable")} for row in rows]


def test_the_page_lists_the_layouts_that_the_suite_proves() -> None:
    assert decided(rows_of(PAGE.read_text())) == [layout.cells for layout in LAYOUTS]


def test_the_page_shows_the_committed_results() -> None:
    rows = json.loads(RESULTS.read_text())
    assert rows_of(PAGE.read_text()) == rows
    assert table(rows) in PAGE.read_text()


def test_every_layout_has_a_name_of_its_own() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
