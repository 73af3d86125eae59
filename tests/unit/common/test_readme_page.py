"""The README's figures of the fleet are those of the committed results, and its verdicts follow from them."""

import pytest

from bench import readme_page
from bench.readme_page import BEGIN, END, PAGE, render


def test_the_readme_shows_the_committed_figures() -> None:
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == render(), "run python bench/readme_page.py"


def test_the_readme_counts_the_faults_that_are_measured() -> None:
    faults = len(readme_page.result("guarantees")["scenarios"])
    assert f"[guarantees](docs/guarantees.md): {faults} faults" in PAGE.read_text()


def test_an_aim_that_was_missed_is_called_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = readme_page.result
    slow = {**real("node_throughput"), "ratio_tokens_per_s": 0.9}
    monkeypatch.setattr(readme_page, "result", lambda name: slow if name == "node_throughput" else real(name))
    (row,) = readme_page.node_rows()
    assert "0.90 / " in row and "| missed: " in row


def test_figures_that_round_to_the_same_are_given_once() -> None:
    assert readme_page.span([3.1, 4.9], ".0f") == "3 to 5"
    assert readme_page.span([3.1, 2.9], ".0f") == "3"
