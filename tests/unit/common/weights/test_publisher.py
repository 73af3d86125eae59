"""The control thread of the weight plane, with nodes that answer what the test says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest
import torch
import zmq

from common.config.schema import WeightsConfig
from common.span_buffer import SPANS
from common.weights.source import nodes
from common.weights.source.control import PublishControl
from common.weights.source.publisher import WeightPublisher
from common.weights.transports.groups import RelayedStore
from common.weights.wire import messages
from common.weights.wire.messages import Active, Epoch, Join, Publish, Staged
from tests.rigs.telemetry import recorded
from tests.rigs.waiting import LIMIT_S, until
from tests.unit.common.weights.node_views import address_of, snapshot_of


class Through:
    """A group whose broadcasts are through at once."""

    waits_for = ""  # an entry that a node sets

    def __init__(self, epoch: Epoch, store: RelayedStore) -> None:
        if self.waits_for:
            store.set("rank 0", b"here")
            store.get(self.waits_for)

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None: ...


class Node:
    """One connection to the control thread. Others can fetch at `listens`; None: it does not answer a Welcome."""

    def __init__(
        self, name: str, address: str, context: "zmq.Context[Any]", listens: str | None, pool: str = ""
    ) -> None:
        self.name, self.socket, self.listens = name, context.socket(zmq.DEALER), listens
        self.socket.connect(address)
        self.say(Join(name, 1, transports=("gloo", "relay"), pool=pool))

    def say(self, message: messages.NodeMessage) -> None:
        self.socket.send(messages.encode(message))

    def leave(self) -> None:
        self.say(messages.Leave(self.name))
        self.socket.close(linger=200)

    def heard(self) -> list[Any]:
        """All messages until the learner has read everything that the node said; the last one is a refusal."""
        self.socket.send(b"nonsense")
        found = [self.hear(object)]
        while not isinstance(found[-1], messages.Eject):
            found.append(self.hear(object))
        return found

    def hear(self, kind: type) -> Any:
        """The next message of this kind; others are passed over, but for a Publish that is not expected yet."""
        while True:
            assert self.socket.poll(int(1000 * LIMIT_S)), f"{self.name} heard no {kind.__name__}"
            message = messages.decode_from_learner(self.socket.recv())
            if isinstance(message, messages.Welcome) and self.listens is not None:
                self.say(messages.Listening(self.name, self.listens))
            assert isinstance(message, kind) or not isinstance(message, Publish), f"{message.epoch} without {kind}"
            if isinstance(message, kind):
                return message

    def stage(self) -> Publish:
        """Receive an epoch and a publish, and say that it is staged; back when it is to be used."""
        epoch = self.hear(Epoch)
        publish = self.hear_and_stage()
        assert publish.epoch == epoch.epoch
        return publish

    def hear_and_stage(self) -> Publish:
        """As `stage`, over the group that there is."""
        publish = self.hear(Publish)
        self.say(Staged(self.name, 0, publish.version, 0.1, publish.epoch))
        self.hear(messages.Activate)
        return publish

    def flip(self, publish: Publish) -> None:
        self.say(Active(self.name, 0, publish.version, 0.0, publish.checksum))


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishControl]:
    monkeypatch.setattr(nodes, "silence_bound", lambda timeout_s: LIMIT_S)  # nodes answer no pings here
    monkeypatch.setattr(nodes, "LISTEN_WAIT_S", LIMIT_S)
    made = PublishControl(WeightsConfig(timeout_s=LIMIT_S), 0, group_factory=Through)

    def run() -> None:
        with suppress(MemoryError):
            made.run()

    thread = threading.Thread(target=run)
    thread.start()
    yield made
    made.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.fixture
def join(control: PublishControl) -> Iterator[Callable[..., Node]]:
    """Lets a node of this name join; at the end it leaves."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context[Any]())

        def made(name: str, *listens: str | None, pool: str = "") -> Node:
            node = Node(name, control.address, context, *(listens or [address_of(name)]), pool=pool)
            stack.callback(node.leave)
            return node

        yield made


@pytest.fixture
def first(control: PublishControl, join: Callable[..., Node]) -> Node:
    """The first node, which runs version 1."""
    node = join("first")
    control.offer(snapshot_of(1))
    node.flip(node.stage())
    until(lambda: control.figures.now.version_active == 1)
    return node


def test_a_newcomer_gets_the_version_in_parts_from_a_node_that_has_it_and_the_next_from_the_newcomer(
    first: Node, join: Callable[..., Node]
) -> None:
    second = join("second")
    epoch, publish = second.hear(Epoch), second.hear(Publish)
    told = first.hear(messages.Serve)
    [part] = publish.parts
    assert (epoch.transport, epoch.rank, publish.epoch) == ("relay", 1, epoch.epoch)
    assert (publish.sources, publish.bucket_checksums) == ([address_of("first")], [])
    assert (told.version, told.part) == (1, msgspec.structs.replace(part, digests=b""))
    assert part.digests and part.size == publish.payload_bytes and part.origin.startswith("tcp://127.0.0.1:")
    assert join("third").hear(Publish).sources == [address_of("second")]


def test_the_thread_sleeps_while_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, control = list[int](), PublishControl(WeightsConfig(), 0)

    def wait(timeout_ms: int) -> None:
        asked.append(timeout_ms)
        control._stop_by = 0.0 if len(asked) == 20 else None

    monkeypatch.setattr(control._socket, "wait", wait)
    control.run()  # closes its socket
    assert asked[-1] == 250


def test_a_node_that_gets_nothing_is_led_around_its_source(first: Node, join: Callable[..., Node]) -> None:
    second = join("second")
    publish = second.hear(Publish)
    second.say(messages.Stalled("second", publish.epoch, 0, publish.sources[0], 0, "not served here any more"))
    assert second.hear(messages.Reroute) == messages.Reroute(publish.epoch, 0, publish.parts[0].origin)


def test_a_node_that_does_not_say_where_it_serves_gets_weights_all_the_same(
    first: Node, join: Callable[..., Node], control: PublishControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute, other = join("mute", None), join("other")
    mute.hear(messages.Welcome)
    assert other.hear(Publish).sources == [address_of("first")]
    assert not [m for m in mute.heard() if isinstance(m, Publish)], "it may still answer"
    monkeypatch.setattr(nodes, "LISTEN_WAIT_S", 0.0)
    assert mute.hear(Publish).sources == [address_of("other")]
    late = join("late", "ipc:///somewhere")
    assert late.hear(Publish).sources == [address_of("first")], "nobody can fetch from mute"
    last = join("last")
    assert last.hear(Publish).sources in ([address_of("first")], [address_of("other")])


def test_entries_of_a_groups_store_go_from_each_member_to_all_and_from_nobody_else(
    control: PublishControl, join: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Through, "waits_for", "rank 1")
    a, b = join("a"), join("b")
    until(lambda: control.figures.now.nodes == 2)
    control.offer(snapshot_of(1))
    for node in (a, b):
        epoch = node.hear(Publish).epoch
        assert node.hear(messages.StoreEntries) == messages.StoreEntries(epoch, {"rank 0": b"here"})
    stranger, outsider = join("stranger"), join("outsider")
    outsider.hear(Epoch)  # it fetches
    stranger.say(messages.Leave("stranger"))
    for node in (stranger, outsider):
        node.say(messages.StoreEntries(epoch, {"rank 1": b"wrong"}))
        node.heard()
    a.say(messages.StoreEntries(epoch + 99, {"rank 1": b"of another group"}))
    a.say(messages.StoreEntries(epoch, {"rank 1": b"right"}))
    b.say(messages.StoreEntries(epoch, {"rank 2": b"too"}))
    for node in (a, b):
        found = dict[str, bytes]()
        while "rank 2" not in found or "rank 1" not in found:
            told = node.hear(messages.StoreEntries)
            found |= told.entries
            assert told.epoch == epoch
        assert found == {"rank 1": b"right", "rank 2": b"too"}


def test_parts_that_cannot_be_sealed_are_the_learners_fatal_error(
    first: Node,
    join: Callable[..., Node],
    control: PublishControl,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("common.weights.source.snapshot.new_part", fails)
    join("second").hear(messages.Welcome)
    until(lambda: control.figures.now.crashed)
    assert control.figures.now.fatal
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [MemoryError]


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
    monkeypatch.setattr("common.weights.source.snapshot.delta.encode", None)
    publisher = WeightPublisher(0, "float32", WeightsConfig(encoding="delta", timeout_s=LIMIT_S), group_factory=Through)
    publisher.start()
    for version in (1, 2):
        publisher.publish(version, [("a", torch.zeros(4))], None)
    publisher.close()  # after the control thread has described its figures once more
    assert publisher.stats().crashed
    fatal = publisher.stats().fatal or ""
    assert "version 2" in fatal and "TypeError" in fatal


def test_a_hold_keeps_newer_versions_from_every_node_and_the_newest_goes_out_at_its_end(
    first: Node, join: Callable[..., Node], control: PublishControl
) -> None:
    control.post(lambda: control.schedule.hold("watch", 1))
    for version in (2, 3):
        control.offer(snapshot_of(version))
    second = join("second")
    assert second.hear(Publish).version == 1, "a newcomer gets the version that the others keep"
    until(lambda: (control.figures.now.published, control.figures.now.held) == (3, ("watch",)))
    assert not [m for m in first.heard() if isinstance(m, Publish)]
    assert control.figures.wait_settled(3, 3, timeout_s=0), "nobody waits for a version that is held back"
    control.post(lambda: control.schedule.release("watch"))
    assert first.hear(Publish).version == 3
    until(lambda: control.figures.now.held == ())


def test_a_publisher_holds_back_what_it_gets_after_the_call() -> None:
    publisher = WeightPublisher(0, "float32", WeightsConfig(timeout_s=LIMIT_S), group_factory=Through)
    with zmq.Context[Any]() as context:
        node = Node("node", publisher.start(), context, address_of("node"))
        until(lambda: publisher.stats().nodes == 1)
        publisher.publish(1, [("a", torch.zeros(4))], None)
        publisher.hold("watch")
        publisher.publish(2, [("a", torch.ones(4))], None)
        assert node.hear(Publish).version == 1
        node.leave()
        publisher.close()


def test_a_publish_is_in_the_trace_until_all_nodes_have_it_or_a_newer_one_comes(
    first: Node, control: PublishControl
) -> None:
    def named(kind: str) -> list[str]:
        return [span.name for span in spans() if span.kind == kind]

    def staged() -> Publish:
        publish = first.hear(Publish)
        first.say(Staged(first.name, 0, publish.version, 0.1, publish.epoch))
        first.hear(messages.Activate)
        return publish

    with recorded() as spans:
        control.offer(snapshot_of(2))
        publish = staged()
        assert named("publish") == []
        control.offer(snapshot_of(3))
        until(lambda: named("publish") == ["publish version 2"], "a newer one has come")
        first.flip(publish)
        publish, before = staged(), SPANS.now()
        first.flip(publish)
        until(lambda: named("publish") == ["publish version 2", "publish version 3"])
        newest = next(span for span in spans() if span.name == "publish version 3")
        assert newest.args == {"version": 3, "incarnation": 0}
        assert newest.start_s + newest.duration_s >= before, "it lasts until the version is active"


def test_a_node_of_the_pool_gets_evaluated_versions_only_and_keeps_each_until_its_round_ends(
    first: Node, join: Callable[..., Node], control: PublishControl
) -> None:
    pool = join("pool", pool="eval")
    assert not [m for m in pool.heard() if isinstance(m, Publish)], "version 1 is not evaluated"
    control.post(lambda: control.schedule.evaluate((2,)))
    control.offer(snapshot_of(2))
    first.flip(first.hear_and_stage())
    pool.flip(pool.stage())
    until(lambda: control.figures.now.version_active == 2 and not control.figures.now.undelivered)
    control.post(lambda: control.schedule.evaluate((2, 3)))
    for version in (3, 4):
        control.offer(snapshot_of(version))
    until(lambda: control.figures.now.published == 4)
    assert not [m for m in pool.heard() if isinstance(m, Publish)], "its round is under way"
    assert control.figures.now.nodes == 1, "the pool is not part of the fleet"
    late = join("late", pool="eval")
    assert late.hear(Publish).version == 2, "the learner has a copy of it"
    control.post(lambda: control.schedule.evaluate((3,)))
    assert pool.hear(Publish).version == 3, "although version 4 is the newest"


def test_a_silent_or_excluded_node_of_the_pool_is_no_matter_of_the_fleets(
    first: Node, join: Callable[..., Node], control: PublishControl
) -> None:
    pool = join("pool", pool="eval")
    control.post(lambda: control.schedule.evaluate((2,)))
    control.offer(snapshot_of(2))
    publish = pool.hear(Publish)
    first.flip(first.hear_and_stage())
    assert control.figures.wait_settled(2, 2, timeout_s=LIMIT_S), "no wait for the pool"
    [late] = control.figures.now.undelivered
    assert (late.node_id, late.version) == ("pool", 2)
    pool.say(messages.Rejected("pool", 0, 2, "the proof failed", epoch=publish.epoch, fatal=True))
    until(lambda: not control.figures.now.undelivered)
    assert control.figures.now.fatal is None
