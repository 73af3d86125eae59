"""A node that joins the weight plane again while versions travel as deltas."""

from collections.abc import Iterator

import pytest
import zmq

from common.weights import messages
from tests.integration.plane_rig import Plane, weights
from tests.waiting import LIMIT_S, until


@pytest.fixture
def plane() -> Iterator[Plane]:
    made = Plane()
    yield made
    made.close()


def test_it_gets_the_next_version_whole_though_it_runs_a_base_and_beside_the_delta_of_the_others(plane: Plane) -> None:
    publisher = plane.publisher(encoding="delta")
    address = publisher.start()

    def step(version: int) -> None:
        """Publish a version of which a tenth of the elements is new."""
        now = weights(1)
        now[0][1].view(-1)[::10] = float(version)
        publisher.publish(version, now, None)

    (node,) = plane.following(address, "n0")
    step(1)
    node.wait("active", version=1)
    until(lambda: publisher.stats().version_active == 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as again:
        again.setsockopt(zmq.LINGER, 0)
        again.connect(address)
        again.send(messages.encode(messages.Join("n1", 1, 0, 1)))  # as after an ejection: it runs version 1
        until(lambda: publisher.stats().nodes == 2)
        step(2)
        heard: list[object] = []
        while not any(isinstance(message, messages.Publish) for message in heard):
            assert again.poll(int(LIMIT_S * 1000)), heard
            heard.append(messages.decode_from_learner(again.recv()))
    assert any(isinstance(message, messages.Welcome) for message in heard), "which empties its buffer"
    assert (heard[-1].encoding, heard[-1].base_version) == ("full", -1)
    assert node.wait("active", version=2)["value"] == 2.0
