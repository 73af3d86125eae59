"""The delivery state machine once more, with its records in Redis: the rules and invariants are those of Delivery."""

import secrets

from hypothesis import Phase, settings

from broker.delivery.state import DeliveryState
from broker.journal.journal import Journal
from broker.journal.redis_store import RedisStore
from tests.property.test_durable_delivery import DurableDelivery
from tests.rigs.redis_servers import leading, redis_server


class RedisDelivery(DurableDelivery):
    """Delivery over a private Redis server, with a run of its own in every example."""

    def __init__(self) -> None:
        super().__init__()
        self.server, self.name, self.terms = redis_server(), secrets.token_hex(8), 0

    def open(self) -> DeliveryState:
        self.server.ask("DEL", f"slipstream:{{{self.name}}}:leader")  # the term of the broker that died is over
        term = leading(self.server, self.name)
        self.terms += 1
        assert term.number == self.terms
        former: Journal | None = getattr(self, "journal", None)
        state = self.recovered(RedisStore(term), "fsync")
        if former is not None:
            former.close()  # nothing more comes of a broker that was killed: its term is over
        return state

    def end(self, good_order: bool) -> None:
        assert not good_order or self.journal.close()


RedisDelivery.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, phases=(Phase.reuse, Phase.generate)
)
TestRedisDelivery = RedisDelivery.TestCase
