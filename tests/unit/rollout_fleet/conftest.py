"""Ends what the fakes beside the tests start."""

from collections.abc import Iterator

import pytest

from tests.unit.rollout_fleet.fleet_fakes import HOSTS


@pytest.fixture(autouse=True)
def close_hosts() -> Iterator[None]:
    """End the environments' threads of a test."""
    yield
    while HOSTS:
        HOSTS.pop().close()
