"""The delivery state machine once more, with its records in Redis: the rules and invariants are those of Delivery."""

import secrets

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from broker.delivery.state import DeliveryState
from broker.journal.redis_store.store import RedisStore
from broker.journal.redis_store.term import Term
from tests.property.test_durable_delivery import DurableDelivery
from tests.redis_server import redis_server


class RedisDelivery(DurableDelivery):
    """Delivery over a private Redis server, with a run of its own in every example."""

    def __init__(self) -> None:
        super().__init__()
        self.server, self.name, self.terms = redis_server(), secrets.token_hex(8), 0

    def open(self) -> DeliveryState:
        self.server.ask("DEL", f"slipstream:{{{self.name}}}:leader")  # the term of the broker that died is over
        term = Term(self.server.client(), self.server.address, self.name, "/nowhere")
        assert term.take("tcp://127.0.0.1:1") is None
        self.terms += 1
        assert term.number == self.terms
        return self.recovered(RedisStore(term), "fsync")

    @rule(good_order=st.booleans())
    def the_broker_dies_and_comes_back(self, good_order: bool) -> None:
        before = self.everything()
        self.settle()
        former = self.journal
        if good_order:
            assert former.close()
        self.state = self.open()
        after = self.everything()
        for what, value in before.items():
            assert after[what] == value, what
        if not good_order:
            former.close()


RedisDelivery.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, phases=(Phase.reuse, Phase.generate)
)
TestRedisDelivery = RedisDelivery.TestCase
