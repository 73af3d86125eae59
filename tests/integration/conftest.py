"""Models that several files share, each built once in a session, and the weight plane of a test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's random model, tokenizer and problems."""
    from tests.rigs.jobs import make_assets

    return make_assets(tmp_path_factory.mktemp("assets") / "assets")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer, for learners without engines."""
    from launch.quickstart.assets import build_model, dense

    folder = tmp_path_factory.mktemp("model") / "model"
    build_model(dense(64, 128, 2, 4, 0.05) | {"max_position_embeddings": 256}, 1, folder)
    return folder


@pytest.fixture
def plane() -> Iterator[Any]:
    """A Plane, which ends what it has started."""
    from tests.rigs.weight_plane import Plane

    made = Plane()
    yield made
    made.close()
