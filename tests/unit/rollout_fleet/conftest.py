"""Makes the fakes beside the tests importable, and ends what they start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def close_hosts() -> Iterator[None]:
    """End the environments' threads of a test."""
    yield
    from fleet_fakes import HOSTS

    while HOSTS:
        HOSTS.pop().close()
