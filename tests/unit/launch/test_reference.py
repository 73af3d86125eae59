"""The pages of config keys and metrics: every key is there, with its range, its default and a meaning."""

import re

import pytest

from common.config.loading import key_paths
from common.config.schema import Config
from launch.dev.docs_reference import DOCS, config_page, metrics_page


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Key to the cells behind it."""
    found = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", config_page(), re.MULTILINE)
    return {key: cells.split(" | ") for key, cells in found}


def test_every_key_has_a_row_with_a_meaning(rows: dict[str, list[str]]) -> None:
    sections = {key for key in key_paths(Config) if any(other.startswith(f"{key}.") for other in key_paths(Config))}
    assert set(key_paths(Config)) - sections - set(rows) == set()
    assert [key for key, (_, _, means) in rows.items() if not means.strip()] == []


def test_ranges_choices_and_defaults_are_told(rows: dict[str, list[str]]) -> None:
    assert rows["run.steps"][:2] == ["an integer >= 1", "needed"]
    assert rows["rollout.top_p"][:2] == ["a number > 0 and <= 1", "`1.0`"]
    assert rows["rollout.concurrency"][:2] == ["an integer >= 1 or one of auto", "`128`"]
    assert rows["weights.transport"][:2] == ["one of gloo, nccl, relay", "`gloo`"]
    assert rows["tasks.limits.process"][:2] == ["true or false", "unset"]


def test_pages_that_a_meaning_names_are_links(rows: dict[str, list[str]]) -> None:
    assert "[delta.md](delta.md)" in rows["weights.encoding"][2]
    assert "[waste.md](waste.md)" in metrics_page()


def test_a_bar_in_a_meaning_does_not_end_the_cell() -> None:
    assert (
        "| `canary_max_difference` | nat | max | newest canary: \\|learner's - engine's\\|, largest |" in metrics_page()
    )


def test_the_pages_of_keys_and_metrics_are_what_the_code_declares() -> None:
    advice = "run python -m launch.dev.docs_reference"
    assert (DOCS / "config.md").read_text() == config_page(), advice
    assert (DOCS / "metrics.md").read_text() == metrics_page(), advice
