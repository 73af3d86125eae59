"""Pages show the committed results; the results were measured completely; verdicts and ranges follow from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import figures, pages
from bench.figures import RESULTS, ROOT, Row, provenance, result, span, table
from bench.pages import BLOCKS, MARKS, PAGES, differing, over_best, written
from common.config.schema import WeightsConfig
from common.weights.transports.groups import bucket_timeout
from tests.faults.scenario import load_all
from tests.rigs.layouts import LAYOUTS

WAYS = {
    "raw_zeromq", "slipstream_memory", "slipstream_everysec", "slipstream_fsync", "redis_pickled_lists",
    "msgspec_lists_zeromq",
}  # fmt: skip


def test_every_page_is_what_the_results_say() -> None:
    assert [str(page.relative_to(ROOT)) for page in differing()] == [], "run python -m bench.pages"


def test_a_changed_figure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = json.loads(json.dumps(result("quickstart")))
    slow["runs"][0]["reward_last_10"] = 0.123
    monkeypatch.setattr(pages, "result", lambda name: slow if name == "quickstart" else result(name))
    page = "<!-- figures: quickstart -->\nold\n<!-- end of figures -->\n"
    assert "0.123" in written(page) and "old" not in written(page)


def test_every_block_is_on_a_page_and_every_mark_has_a_block() -> None:
    marked = [name for page in PAGES for _, name, _ in MARKS.findall(page.read_text())]
    assert set(marked) == set(BLOCKS)
    with pytest.raises(KeyError):
        written("<!-- figures: missing -->\n<!-- end of figures -->")
    page = written("before\n<!-- figures: machine -->\nold\n<!-- end of figures -->\nafter\n")
    assert page.startswith("before\n<!-- figures: machine -->\n\nMeasured on"), "what is outside the marks stays"
    assert page.endswith("\n<!-- end of figures -->\nafter\n")


def test_every_result_is_used_by_a_page_or_by_a_record_of_a_decision() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    unused = {path.stem for path in RESULTS.glob("*.json") if path.name not in text}
    assert unused <= {"layouts"}, "its tables name no file"


def test_a_table_has_a_line_for_head_rule_and_every_row_and_figures_that_round_to_the_same_are_given_once() -> None:
    assert table(["a", "b"], [[1, "x"], [2.5, "y"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2.5 | y |"
    assert span([3.1, 4.9], ".0f") == "3 to 5"
    assert span([3.1, 2.9], ".0f") == "3"


@pytest.mark.parametrize(
    ("row", "value", "shown", "verdict"),
    [
        (Row("x", [0.9, 1.3, 1.0], at_most=1.0), "1.00", "0.90 to 1.30", "met"),
        (Row("x", [0.9, 1.3, 1.1], at_most=1.0), "1.10", "0.90 to 1.30", "missed"),
        (Row("x", [0.9], ".1f", "s", at_least=1.0), "0.9 s", "one value", "missed"),
        (Row("x", [2, 2], ".0f"), "2", "2", ""),
    ],
)
def test_a_row_gives_the_median_the_range_and_a_verdict_on_the_median(
    row: Row, value: str, shown: str, verdict: str
) -> None:
    assert (row.value, row.range, row.verdict) == (value, shown, verdict)


def test_a_source_names_what_the_result_has_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    (tmp_path / "old.json").write_text('{"rows": []}')
    lacking = "machine not recorded; commit not recorded; arguments not recorded."
    assert " ".join(provenance("old").split()).endswith(lacking)
    whole = {"machine": {"cores": 2, "processor": "P"}, "commit": "abc", "arguments": {"size": ["1k"]}, "rounds": 3}
    (tmp_path / "new.json").write_text(json.dumps(whole))
    assert " ".join(provenance("new").split()).endswith("2 cores of P; commit abc; arguments `size=1k`; 3 rounds.")


def test_the_results_were_measured_completely_with_the_defaults_and_with_enough_rounds() -> None:
    sizes = result("broker_overhead")["sizes"]
    assert set(sizes) == {"1k", "8k"}
    for measured in sizes.values():
        assert set(measured["ways"]) >= WAYS, "the floor, ours and the ways of others"
    found = result("weight_broadcast")
    assert found["timeout_s"] == WeightsConfig().timeout_s
    assert all(r["rounds"] >= 4 for r in found["broadcast"])
    assert all(death["worst_s"] < found["timeout_s"] for death in found["death"])
    for run in result("guessing")["runs"]:
        assert run["success_first_5"] < 0.4 and run["success_last_10"] >= 0.85
        assert run["episodes_of_several_versions"] > 0
    assert all(pages.section_rows(section["result"]) for section in pages.SECTIONS)


def test_auto_is_compared_with_the_best_fixed_number_by_medians_and_is_close_to_it_in_every_case() -> None:
    def turn(few: float, many: float, auto: float) -> dict[str, Any]:
        return {"8": {"tokens_per_s": few}, "128": {"tokens_per_s": many}, "auto": {"tokens_per_s": auto}}

    assert over_best({"0": turn(100, 50, 90)}) == pytest.approx(0.9)
    assert over_best({"0": turn(90, 50, 95), "1": turn(100, 200, 90), "2": turn(110, 60, 100)}) == pytest.approx(0.95)
    cases = result("adaptive_concurrency")["cases"]
    assert {"tail-8", "tail-64", "long-64"} <= cases.keys()
    assert all(over_best(case) >= 0.95 for case in cases.values())


def test_every_fault_is_measured_within_its_bound_and_has_a_text_of_its_own() -> None:
    scenarios, measured = load_all(), result("guarantees")["scenarios"]
    assert list(measured) == list(scenarios), "run bench/guarantees.py"
    for name, scenario in scenarios.items():
        assert measured[name]["bound_s"] == scenario.bound_s
        assert measured[name]["worst_s"] <= scenario.bound_s, name
        assert measured[name]["runs"] >= 3, name
    assert len({s.fault for s in scenarios.values()}) == len(scenarios)


def test_the_layouts_on_the_page_are_those_that_the_suite_proves() -> None:
    measured = ("worst gradient error", "repeatable")
    decided = [{k: v for k, v in row.items() if k not in measured} for row in result("layouts")["rows"]]
    assert decided == [layout.cells for layout in LAYOUTS]
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)


def test_the_deadlines_on_the_page_of_weights_are_those_of_the_code() -> None:
    from common.weights.receive.weight_client import REJOIN_AFTER_S
    from common.weights.source.nodes import LISTEN_WAIT_S, MAX_ATTEMPTS
    from common.weights.transports.relay import STALL_S

    text = (ROOT / "docs" / "weights.md").read_text()
    assert bucket_timeout(20.0) == 5.0 and "a quarter of `weights.timeout_s`" in text
    assert f"{MAX_ATTEMPTS} attempts" in text
    assert f"{LISTEN_WAIT_S:g} s for the answer to a Welcome" in text and f"{STALL_S:g} s without a piece" in text
    assert f"{REJOIN_AFTER_S:g} s without a message" in text


def test_the_readme_can_be_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700
