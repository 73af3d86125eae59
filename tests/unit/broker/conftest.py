"""Brokers in a thread, as `slipstream broker` runs them."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker import main
from broker.client.connection import BrokerClient
from broker.server.server import BrokerServer
from common.config.schema import Config
from tests.rigs.waiting import LIMIT_S, until


@dataclass
class Life:
    """One life of a broker."""

    address: str
    server: BrokerServer

    def client(self, deadline_s: float = LIMIT_S) -> BrokerClient:
        return BrokerClient(self.address, deadline_s=deadline_s)


Running = Callable[[Config], AbstractContextManager[Life]]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    """Runs `run_broker` on a thread and stops its server without a signal."""
    servers: list[BrokerServer] = []

    class Remembered(BrokerServer):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            servers.append(self)

    monkeypatch.setattr(main, "BrokerServer", Remembered)

    @contextmanager
    def life(config: Config) -> Iterator[Life]:
        file = Path(config.run.dir) / "broker.json"
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(main.run_broker, config, b'{"k": 1}')
            until(file.exists, "broker.json", check=lambda: ended.result() if ended.done() else None)
            server = servers[-1]
            try:
                yield Life(json.loads(file.read_text())["address"], server)
            finally:
                server.stop()
                assert ended.result(LIMIT_S) == 0

    return life
