"""The delivery contract is the same over every store."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.backends import BACKENDS, Backend, run_info


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Backend]]:
    """Starts a broker; keywords are facts of the run."""
    with asyncio.Runner() as runner:
        started: list[Iterator[Backend]] = []

        def factory(**facts: Any) -> Backend:
            started.append(BACKENDS[request.param](run_info(**facts), runner))
            return next(started[-1])

        yield factory
        for generator in started:
            assert next(generator, None) is None


@pytest.fixture
def backend(make: Callable[..., Backend]) -> Backend:
    return make()
