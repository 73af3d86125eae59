"""Overrides of the quickstart are refused before the model and the datasets are made."""

from pathlib import Path

import pytest

from common.errors import EXIT_DONE, EXIT_USAGE
from launch.quickstart.check_overrides import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The quickstart's config as in a fresh clone: nothing that it names exists."""
    text = (ROOT / "configs" / "quickstart.yaml").read_text().replace("runs/", f"{tmp_path}/runs/")
    file = tmp_path / "quickstart.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("words", [[], ["staleness.max=0", "run.seed=2"]])
def test_what_is_made_later_may_be_missing(config: str, words: list[str]) -> None:
    assert main([config, *words]) == EXIT_DONE


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo=bar", "unknown key 'foo'"),
        ("rollout.group_size=1", "rollout.group_size: expected at least 2"),
        ("weights.publish_every=9", "weights.publish_every: expected at most"),
        ("tasks.environment=additon", "nearest built-in: 'addition'"),
        ("model.path=/nowhere/at/all", "model.path: expected a Hugging Face model folder"),
        ("tasks.dataset=/nowhere.jsonl", "tasks.dataset: expected a JSONL file"),
    ],
)
def test_a_bad_override_is_refused(config: str, override: str, expected: str, capsys: pytest.CaptureFixture) -> None:
    assert main([config, override]) == EXIT_USAGE
    assert expected in capsys.readouterr().err


def test_the_quickstart_asks_before_it_makes_anything() -> None:
    script = (ROOT / "launch" / "quickstart.sh").read_text()
    asked = script.index("launch.quickstart.check_overrides configs/quickstart.yaml")
    assert asked < script.index("launch.quickstart.assets --out")
