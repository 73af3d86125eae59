"""The weight plane of a test."""

from collections.abc import Iterator

import pytest

from tests.integration.weights.plane_rig import Plane


@pytest.fixture
def plane() -> Iterator[Plane]:
    made = Plane()
    yield made
    made.close()
