"""A job and its run folder; a file that needs more in its config has a fixture `config` of its own."""

from pathlib import Path

import pytest

from common.config.schema import Config
from common.process.run_dir import RunDir
from tests.rigs.configs import config_of, prepared, write_job


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path / "run")


@pytest.fixture
def run(config: Config) -> RunDir:
    return prepared(config)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The file of a job whose model and dataset are there."""
    return write_job(tmp_path)


@pytest.fixture
def one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures over steps only: each axis takes a second, and here they are not the claim."""
    monkeypatch.setattr("launch.results.plots.AXES", {"steps": "optimizer steps"})
