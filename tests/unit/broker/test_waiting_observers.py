"""Observers that ask for more than the broker tells: they wait, the learner does not, nobody is refused."""

from collections.abc import Iterator

import pytest
import zmq

from broker.guard import observer_rate_limit
from broker.guard.rejected_messages import Later
from broker.guard.request_guard import Gate
from broker.messaging import wire
from broker.messaging.sync_client import BrokerClient
from broker.server.server import BrokerServer
from common.security.credentials import Identity
from tests.broker_rig import new_state, serving

BUDGET = 3 << 20  # three answers with events


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerServer]:
    monkeypatch.setattr(observer_rate_limit, "BURST_BYTES", BUDGET)
    monkeypatch.setattr(observer_rate_limit, "BYTES_A_SECOND", BUDGET)
    with serving() as started:
        yield started


def test_an_observer_that_asks_without_a_pause_waits_and_is_answered(server: BrokerServer) -> None:
    """A refusal would end a learner without keys that asks for the status at that moment."""
    with BrokerClient(server.address, deadline_s=30, retry_s=0.2) as client:
        assert [client.events(-1) for _ in range(6)] == [[]] * 6
        assert client.status().refused_messages == 0


def test_what_others_ask_does_not_hold_up_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_rate_limit, "BURST_BYTES", BUDGET)
    monkeypatch.setattr(observer_rate_limit, "BYTES_A_SECOND", 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, new_state())
    request = wire.AskEvents(id=1, after=-1)
    for _ in range(3):
        gate.check(Identity("k", "observer", "observer"), request)
    with pytest.raises(Later):
        gate.check(Identity("k", "observer", "observer"), request)
    gate.check(Identity("l", "learner", "learner"), request)
    gate.close()
    context.term()
