"""The control thread of the weight plane, with nodes that answer what the test says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import zmq

from common.config.schema import WeightsConfig
from common.weights import messages
from common.weights.messages import Active, Epoch, Join, Publish, Staged
from learner.publish import receiver_state
from learner.publish.control import PublishControl
from learner.publish.publisher import WeightPublisher
from tests.unit.learner.receivers import snapshot_of
from tests.waiting import LIMIT_S, until


class Through:
    """A group whose broadcasts are through at once."""

    def __init__(self, epoch: Epoch) -> None: ...

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None: ...


class Node:
    """One connection to the control thread."""

    def __init__(self, name: str, address: str, context: "zmq.Context[Any]") -> None:
        self.name, self.socket = name, context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.say(Join(name, 1, transports=("gloo", "relay")))

    def say(self, message: messages.NodeMessage) -> None:
        self.socket.send(messages.encode(message))

    def hear(self, kind: type) -> Any:
        """The next message of this kind; others are passed over, but for a Publish that is not expected yet."""
        while True:
            assert self.socket.poll(int(1000 * LIMIT_S)), f"{self.name} heard no {kind.__name__}"
            message = messages.decode_from_learner(self.socket.recv())
            assert isinstance(message, kind) or not isinstance(message, Publish), f"{message.epoch} without {kind}"
            if isinstance(message, kind):
                return message

    def stage(self) -> Publish:
        """Receive an epoch and a publish, and say that it is staged; back when it is to be used."""
        epoch, publish = self.hear(Epoch), self.hear(Publish)
        assert publish.epoch == epoch.epoch
        self.say(Staged(self.name, 0, publish.version, 0.1, publish.epoch))
        self.hear(messages.Activate)
        return publish

    def flip(self, publish: Publish) -> None:
        self.say(Active(self.name, 0, publish.version, 0.0, publish.checksum))


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishControl]:
    monkeypatch.setattr(receiver_state, "silence_bound", lambda timeout_s: LIMIT_S)  # nodes answer no pings here
    monkeypatch.setattr(receiver_state, "PEER_WAIT_S", LIMIT_S)
    made = PublishControl(WeightsConfig(timeout_s=LIMIT_S), 0, 64, group_factory=Through)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.fixture
def join(control: PublishControl) -> Iterator[Callable[[str], Node]]:
    """Lets a node of this name join; closes its socket at the end."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context[Any]())

        def made(name: str) -> Node:
            node = Node(name, control.address, context)
            stack.callback(node.socket.close, linger=0)
            return node

        yield made


def test_the_announcement_of_a_fetch_from_a_peer_has_the_sha256_that_it_cannot_forge(
    control: PublishControl, join: Callable[[str], Node]
) -> None:
    snapshot = snapshot_of(1)
    snapshot.sha256 = "known"
    a = join("a")
    control.offer(snapshot)
    a.flip(a.stage())
    until(lambda: control.figures.now.version_active == 1)
    b = join("b")
    a.say(messages.Serving("a", a.hear(messages.Serve).key, "tcp://127.0.0.1:7"))
    epoch, publish = b.hear(Epoch), b.hear(Publish)
    assert (epoch.source.address, publish.sha256) == ("tcp://127.0.0.1:7", "known")


def test_a_node_that_joins_anew_while_an_attempt_ends_is_no_member_of_its_group(
    control: PublishControl, join: Callable[[str], Node]
) -> None:
    a, b = join("a"), join("b")
    until(lambda: control.figures.now.nodes == 2)
    control.offer(snapshot_of(1))
    first = {node: node.stage() for node in (a, b)}
    a.flip(first[a])
    a.say(Join("a", 1, transports=("gloo", "relay")))  # as after a long silence of the learner
    a.flip(a.stage())
    until(lambda: len(control.figures.now.undelivered) == 1)
    b.flip(first[b])
    until(lambda: control.figures.now.version_active == 1)
    control.offer(snapshot_of(2))
    for node in (a, b):
        node.flip(node.stage())  # over a new group: the one of version 1 ended with a's first membership
    until(lambda: control.figures.now.version_active == 2)


def test_a_version_that_cannot_be_encoded_is_the_learners_fatal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.publish.snapshot.delta.encode", None)
    publisher = WeightPublisher(0, "float32", WeightsConfig(encoding="delta", timeout_s=LIMIT_S), group_factory=Through)
    publisher.start()
    for version in (1, 2):
        publisher.publish(version, [("a", torch.zeros(4))], None)
    publisher.close()  # after the control thread has described its figures once more
    assert publisher.stats().crashed
    assert str(publisher.stats().fatal).startswith("version 2 cannot be sent: TypeError")
