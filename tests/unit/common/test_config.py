"""What follows from a config without looking at anything else."""

from common.config.schema import EngineConfig, RolloutConfig
from launch.dev.docs_reference import DOCS, config_page, metrics_page


def test_concurrency_is_a_number_or_follows_the_engine() -> None:
    engine = EngineConfig(max_num_seqs=32)
    assert RolloutConfig(concurrency=64, engine=engine).concurrency_bounds == (64, 64)
    assert RolloutConfig(concurrency="auto", group_size=4, engine=engine).concurrency_bounds == (4, 64)
    small = RolloutConfig(concurrency="auto", group_size=4, engine=EngineConfig(max_num_seqs=1))
    assert small.concurrency_bounds == (4, 4)


def test_the_pages_of_keys_and_metrics_are_what_the_code_declares() -> None:
    advice = "run python -m launch.dev.docs_reference"
    assert (DOCS / "config.md").read_text() == config_page(), advice
    assert (DOCS / "metrics.md").read_text() == metrics_page(), advice
