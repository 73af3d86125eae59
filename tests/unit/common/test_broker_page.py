"""The page of the broker's figures shows the committed results, and the results were measured completely."""

import json

from bench.broker_page import PAGE, RESULTS, render, table


def test_the_page_is_what_the_committed_results_say() -> None:
    assert PAGE.read_text() == render()


def test_the_results_hold_the_floor_ours_and_the_peers_at_both_sizes() -> None:
    sizes = json.loads((RESULTS / "broker_overhead.json").read_text())["sizes"]
    assert set(sizes) == {"1k", "8k"}
    for measured in sizes.values():
        needed = {"raw_zeromq", "slipstream_memory", "slipstream_fsync", "redis_pickled_lists", "msgspec_lists_zeromq"}
        assert needed <= set(measured["ways"])


def test_a_table_has_a_line_for_the_head_the_rule_and_every_row() -> None:
    assert table(["a", "b"], [[1, "x"], [2.5, "y"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2.5 | y |\n"
