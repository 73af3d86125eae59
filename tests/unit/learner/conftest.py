"""Configs for the learner's unit tests."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from common.config.schema import Config

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "test", "dir": "unset", "steps": 4},
    "model": {"path": "unset"},
    "tasks": {"environment": "addition", "dataset": "unset"},
    "learner": {"groups_per_step": 2, "checkpoint": {"every": 2}},
    "rollout": {"group_size": 2},
    "weights": {"canary_tokens": 4},
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


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """The module loop_fakes.py: a world for the training loop."""
    spec = importlib.util.spec_from_file_location("loop_fakes", Path(__file__).with_name("loop_fakes.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["loop_fakes"] = module
    spec.loader.exec_module(module)
    return module
