"""Configs for the learner's unit tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config.schema import Config
from tests.unit.learner.loop_fakes import BROKERS, MakeWorld, world

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "test", "dir": "unset", "steps": 4},
    "model": {"path": "unset"},
    "tasks": {"environment": "addition", "dataset": "unset"},
    "learner": {"groups_per_step": 2, "checkpoint": {"every": 2}},
    "rollout": {"group_size": 2},
    "weights": {"canary_tokens": 4},
    "telemetry": {"transcripts": "none"},  # the model folder has no tokenizer
}


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A config with a problem file in tmp_path; keyword arguments replace keys of its sections."""

    def make(**sections: dict[str, Any]) -> Config:
        dataset = tmp_path / "problems.jsonl"
        dataset.write_text("".join(f'{{"n": {i}}}\n' for i in range(40)))
        document = {name: dict(section) for name, section in BASE.items()}
        document["run"]["dir"] = str(tmp_path / "run")
        document["tasks"]["dataset"] = str(dataset)
        for name, section in sections.items():
            document.setdefault(name, {}).update(section)
        return msgspec.convert(document, Config)

    return make


@pytest.fixture
def make_world(make_config: Callable[..., Config]) -> MakeWorld:
    """A learner with its broker and fleet for a config of `make_config`."""
    return lambda lag=0, **sections: world(make_config(**sections), lag=lag)


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    while BROKERS:
        BROKERS.pop().close()
