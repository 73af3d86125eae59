"""The delivery state machine once more, over Redis: the rules and invariants are those of Delivery."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from broker.contract import RunInfo
from tests.property.redis_delivery import RedisDelivery, clock_of_the_test
from tests.property.test_delivery_state import NODES, Delivery
from tests.redis_server import RedisServer


class RedisMachine(Delivery):
    """Delivery over a private Redis server, with its own run in every example."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.redis: RedisDelivery | None = None

    def new_state(self, run: RunInfo, new_token: Callable[[], str]) -> Any:
        self.redis = RedisDelivery(self.server, run, lambda: self.now, NODES)
        return self.redis

    @rule(one_in=st.integers(1, 6))
    def the_server_is_killed_and_comes_back(self, one_in: int) -> None:
        if self.redis is None or one_in > 1:  # it takes a while, compared with everything else
            return
        before = self.redis.tasks, self.redis.ledger()
        self.server.kill()
        self.server.start()
        assert (self.redis.tasks, self.redis.ledger()) == before

    def teardown(self) -> None:
        if self.redis is not None:
            self.redis.close()


RedisMachine.TestCase.settings = settings(  # looking for a shorter example takes minutes here
    max_examples=25, stateful_step_count=50, deadline=None, phases=(Phase.reuse, Phase.generate)
)


class TestRedisDelivery(RedisMachine.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="slipstream-redis-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        RedisMachine.server = RedisServer(cls.folder, {"appendonly": "yes", "appendfsync": "always"})
        cls.addClassCleanup(RedisMachine.server.stop)
        cls.enterClassContext(clock_of_the_test())
