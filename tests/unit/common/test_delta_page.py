"""The page shows the committed figures of bench/delta.py."""

import json

from bench.delta import BEGIN, END, PAGE, RESULTS, table


def test_the_page_shows_the_committed_results() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table(json.loads(RESULTS.read_text()))
