"""docs/scheduling.md shows the committed figures of bench/adaptive_concurrency.py, and what they must say."""

import json

import pytest

from bench.adaptive_page import BEGIN, END, PAGE, RESULT, over_best, written


def test_the_page_shows_the_committed_results() -> None:
    page = PAGE.read_text()
    assert BEGIN in page and END in page
    assert written(page, json.loads(RESULT.read_text())) == page, "run python bench/adaptive_page.py"


def test_auto_is_compared_with_the_best_fixed_number_by_medians() -> None:
    def turn(few: float, many: float, auto: float) -> dict:
        return {"8": {"tokens_per_s": few}, "128": {"tokens_per_s": many}, "auto": {"tokens_per_s": auto}}

    assert over_best({"0": turn(100, 50, 90)}) == pytest.approx(0.9)
    assert over_best({"0": turn(90, 50, 95), "1": turn(100, 200, 90), "2": turn(110, 60, 100)}) == pytest.approx(0.95)


def test_auto_comes_close_to_the_best_fixed_number_in_every_measured_case() -> None:
    cases = json.loads(RESULT.read_text())["cases"]
    assert {"tail-8", "tail-64", "long-64"} <= cases.keys()
    assert all(over_best(case) >= 0.95 for case in cases.values())
