"""The control thread of the weight plane: it feeds events to the nodes and carries out what they ask for.

publisher.py draws a version's way, and says what its words mean.
"""

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec

from common.config.schema import WeightsConfig
from common.weights.source import nodes
from common.weights.source.attempt import Attempt, Epochs, new_attempt
from common.weights.source.chains import Chains
from common.weights.source.fleet import Fleet, Pace, Pings
from common.weights.source.nodes import Action, DropNode, DropReason, Figures, NodeState, NodeView, Step
from common.weights.source.snapshot import Snapshot, VersionSchedule
from common.weights.source.sources import OtherSources
from common.weights.transports.groups import BroadcastGroup, GroupFactory, RelayedStore, open_group
from common.weights.transports.nccl import mismatch
from common.weights.wire import messages
from common.weights.wire.failures import Failure, FailureKind
from common.weights.wire.messages import EjectCode
from common.weights.wire.pieces import piece_bytes
from common.weights.wire.sockets import ControlSocket

logger = logging.getLogger(__name__)

PING = messages.Ping()
P = ParamSpec("P")


class PublishControl:
    """Feeds events to the nodes' state machines and carries out their actions.

    Runs in one thread; other threads may use `offer`, `post`, `stop` and `figures`.
    """

    def __init__(
        self,
        weights: WeightsConfig,
        incarnation: int,
        credentials: str | None = None,
        group_factory: GroupFactory = open_group,
    ) -> None:
        """Bind the endpoint on `weights.address`; raises zmq.ZMQError, or UsageError (`credentials`)."""
        self.figures = Figures(incarnation)
        self._incarnation = incarnation
        self._group_factory = group_factory
        self._timeout_s = weights.timeout_s
        self._transport = weights.transport
        self._socket = ControlSocket(weights.address, credentials)
        self.address = self._socket.address
        self._learner_endpoint = self.address.removeprefix("tcp://")
        self._epochs = Epochs(weights.transport, weights.timeout_s, self._learner_endpoint)
        self.password = secrets.token_urlsafe(24) if credentials is not None else ""
        self._chains = Chains(weights.address, incarnation, self._socket.send, self.password)
        self.sources = OtherSources(incarnation, self._socket.send)
        self._fleet = Fleet()
        self._pings = Pings(weights.timeout_s)
        self._ticking = Pace()
        self._starting = Pace()
        self._meeting = Pace()
        self._describing = Pace()
        self.schedule = VersionSchedule()  # only calls that are given to `post` change it
        self._rate = 0.0  # bytes/s at which the newest whole version arrived at the last node
        self._stop_by: float | None = None  # perf_counter seconds

    def post(self, call: Callable[[], object]) -> None:
        def made() -> None:
            self._fleet.stir()
            call()

        self._socket.post(made)

    def offer(self, snapshot: Snapshot) -> None:
        """Send a version that has its checksums, once all sources have it."""
        self.post(partial(self.sources.add, snapshot))

    def stop(self) -> None:
        """Let `run` return when no attempt is under way."""
        self._stop_by = time.perf_counter() + self._timeout_s
        self.post(lambda: None)

    def run(self) -> None:
        """Serve until `stop`; an attempt that is under way then is cut after weights.timeout_s."""
        try:
            while self._stop_by is None or (self._fleet.attempts and time.perf_counter() < self._stop_by):
                self._socket.wait(self._patience_ms())
                for identity, message in self._socket.received():
                    self._handle(identity, message)
                for snapshot in self.sources.whole(self.schedule.wanted):
                    self.figures.offered(snapshot)
                    if snapshot.whole:
                        self.schedule.add(snapshot)
                self._tick(time.perf_counter())
                self._settle()
                self._start_attempts()
                self._pass_on()
                self._describe()
        except Exception:
            logger.exception("the weight plane stopped")
            self.figures.change(fatal="the publisher's control thread failed; see the log", crashed=True)
            raise
        finally:
            self.figures.describe(self._fleet.nodes.values(), self.schedule)
            self._socket.close()
            self._epochs.drop()
            self._chains.close()

    def _patience_ms(self) -> int:
        """Until there is something to do without any message."""
        fleet = self._fleet
        entries = fleet.broadcast is not None and fleet.broadcast.entries
        startable = fleet.stirred and self.schedule.current is not None
        paced = ((fleet.changed, self._describing), (startable, self._starting), (entries, self._meeting))
        left_s = min((pace.next - time.perf_counter() for wanted, pace in paced if wanted), default=1.0)
        return min(50 if fleet.attempts else 250, max(1, int(1000 * left_s)))

    def _describe(self) -> None:
        if self._fleet.changed and self._describing.due():
            with self._describing:
                self.figures.describe(self._fleet.nodes.values(), self.schedule)
            self._fleet.changed = False

    # ---- events

    def _sent(self, attempt: Attempt, group: BroadcastGroup | None, failure: Failure | None) -> None:
        """The thread of a broadcast has ended, with its group or with the reason why there is none."""
        attempt.done = True
        self._fleet.touch(attempt)
        if failure is not None:
            self._fail(attempt, failure)
        elif attempt in self._fleet.attempts:
            attempt.group = group
        elif group is not None:
            group.close()  # the attempt was given up in the meantime

    def _handle(self, identity: bytes, message: messages.NodeMessage | messages.SourceMessage) -> None:
        if isinstance(message, messages.Join):
            self._join(identity, message)
        elif isinstance(message, messages.SourceMessage):
            self.sources.hear(identity, message, self.schedule.snapshots.get(message.version))
        elif identity in self._fleet.nodes:
            self._feed(identity, nodes.hear, message, time.perf_counter())
            if isinstance(message, messages.Stalled):
                self._chains.stalled(identity, message, time.perf_counter())
            elif isinstance(message, messages.StoreEntries) and self._fleet.broadcast is not None:
                self._fleet.broadcast.take_entries(message, identity)
        elif not isinstance(message, messages.Leave | messages.Pong):  # late pongs follow an ejection
            self._socket.send(identity, messages.Eject("not a member; join again", code=EjectCode.NOT_MEMBER))

    def _join(self, identity: bytes, message: messages.Join) -> None:
        self._feed(identity, nodes.drop, DropNode(DropReason.REJOINED))
        why = mismatch(message.versions) if self._transport == "nccl" and "nccl" in message.transports else ""
        if message.schema != messages.SCHEMA:
            why = f"its messages have schema {message.schema}, the learner's {messages.SCHEMA}; use one release"
        if why:
            logger.error("node %s may not join: %s", message.node_id, why)
            self._socket.send(identity, messages.Eject(why, final=True, code=EjectCode.VERSIONS))
            return
        logger.info("node %s (pid %d) joined the weight plane", message.node_id, message.pid)
        joined = NodeView(
            identity=identity,
            node_id=message.node_id,
            heard=time.perf_counter(),
            transports=message.transports,
            # The Welcome clears the node's staging buffer, so what the node runs is no base of a delta.
            version=message.version if message.incarnation == self._incarnation else -1,
            machine=message.machine,
            pool=message.pool,
            kept=message.frozen if "relay" in message.transports else None,
        )
        self._fleet.add(joined)

    def _pass_on(self) -> None:
        """Tell the members what came since the last time, together: each of N members sets an entry for N others."""
        attempt = self._fleet.broadcast
        if attempt is not None and attempt.entries and self._meeting.due():
            with self._meeting:
                keys = list(itertools.islice(attempt.entries, messages.MOST_KEYS))
                told = messages.StoreEntries(attempt.publish.epoch, {key: attempt.entries.pop(key) for key in keys})
                for member in self._fleet.members(attempt):
                    self._socket.send(member, told)

    def _tick(self, now: float) -> None:
        if (current := self.schedule.current) is not None:
            welcome = messages.Welcome(
                self._incarnation, current.layout, self._learner_endpoint, self.password, current.adapter_layout
            )
            for identity in self._fleet.strangers:
                self._feed(identity, nodes.greet, welcome, now, current.frozen)
            self._fleet.strangers.clear()
        if self._ticking.due():
            with self._ticking:
                read_until = self._socket.read_until(now)
                for identity in list(self._fleet.nodes):
                    self._feed(identity, nodes.tick, self._timeout_s, read_until)
                self._chains.tick(now)
        for identity in self._pings.due(self._fleet, now):
            if not self._socket.send(identity, PING):
                self._feed(identity, nodes.drop, DropNode(DropReason.CLOSED))

    def _feed(
        self, identity: bytes, event: Callable[Concatenate[NodeView, P], Step], *args: P.args, **options: P.kwargs
    ) -> None:
        """Let a node take the step of an event, then carry out the actions of it."""
        before = self._fleet.nodes.get(identity)
        if before is None:
            return
        after, actions = event(before, *args, **options)
        if after is before and not actions:
            return
        self._fleet.take(identity, after)
        if after.state is NodeState.GONE:
            self._chains.leave(identity)
        if after.excluded is not None and before.excluded is None:
            logger.error("node %s is excluded: %s", after.node_id, after.excluded.text)
            self.figures.lost.put(nodes.LostNode(after.node_id, after.excluded.text))
            self._chains.leave(identity)
        attempt = after.attempt if after.attempt is not None else before.attempt
        for action in actions:
            self._carry_out(before, attempt, action)

    def _carry_out(self, node: NodeView, attempt: Attempt | None, action: Action) -> None:
        """Do what `node` asks for; `attempt` is the one that its step was about."""
        if isinstance(action, nodes.SendMessage):
            self._socket.send(node.identity, action.message)
        elif isinstance(action, DropNode):
            self._drop(node, action)
        elif attempt is not None:
            match action:
                case nodes.FailAttempt():
                    self._fail(attempt, action.failure, node)
                case nodes.NoteStaged():
                    attempt.last_staged = time.perf_counter()
                    took_s = attempt.last_staged - attempt.started
                    if attempt.payload.encoding == "full":  # a delta's time is of other things than its size
                        self._rate = attempt.payload.size / max(took_s, 1e-6)
                    self._chains.staged(node.identity, attempt.last_staged, took_s)
                    attempt.snapshot.bytes_staged += attempt.payload.size
                case nodes.NoteActive():
                    whole = not attempt.newcomers and not self._fleet.members(attempt)
                    self.figures.activated(attempt, whole, action.difference)

    def _drop(self, node: NodeView, drop: DropNode) -> None:
        logger.info("node %s leaves the weight plane: %s", node.node_id, drop.sentence)
        if node.attempt is not None and not node.attempt.done:
            self._fail(node.attempt, Failure(FailureKind.LEFT, "it left"), node)
        self._epochs.drop(node.identity)
        if drop.ejected:
            self.figures.change(ejections=self.figures.now.ejections + 1)
            self.figures.lost.put(nodes.LostNode(node.node_id, drop.sentence))
            self._socket.send(node.identity, messages.Eject(drop.sentence, code=EjectCode.DROPPED))

    def _fail(self, attempt: Attempt, failure: Failure, node: NodeView | None = None) -> None:
        """Note the first sign of trouble, of a node or of the sender.

        Every member that has not staged must now show that it is alive.
        """
        who = f"node {node.node_id}: " if node is not None else ""
        logger.warning("version %d to %d nodes: %s%s", attempt.version, len(attempt.members), who, failure.text)
        self._fleet.touch(attempt)
        if not attempt.failed:
            attempt.failed = True
            for identity in self._fleet.members(attempt):
                self._feed(identity, nodes.doubt)

    # ---- attempts

    def _settle(self) -> None:
        """Release the members of a failed attempt once all are told apart; end attempts that are over."""
        for attempt in self._fleet.touched():
            members = self._fleet.members(attempt)
            states = {self._fleet.nodes[m].state for m in members}
            if NodeState.ANSWERED in states and not states & {NodeState.STAGING, NodeState.DOUBTED}:
                for identity in members:
                    if attempt.relayed:
                        self._chains.leave(identity, failed=True)
                    self._feed(identity, nodes.release, self.figures.now.published)
                attempt.broadcast.abandon()
            if not self._fleet.members(attempt) and (attempt.done or attempt.failed):
                self._fleet.end(attempt)
                if attempt.failed:
                    attempt.broadcast.abandon()  # its thread may still wait for members that left
                self._epochs.give_back(attempt)

    def _start_attempts(self) -> None:
        current = self.schedule.current
        if current is None or (self._stop_by is not None and not self._fleet.attempts):
            return
        self.sources.keep(self.schedule.snapshots.keys() | self._chains.tidy(current))
        evaluated = self.schedule.evaluated
        if not self._starting.due():
            return
        with self._starting:
            ready = self._fleet.ready(current, evaluated)
            ways = nodes.split(
                [node for node in ready if not node.pool],
                (node for node in self._fleet.nodes.values() if not node.pool),
                transport=self._transport,
                published=self.figures.now.published,
                version=current.version,
            )
            fetches = [(current, self._fetching(current, ways.relayed))]
            if evaluated is not None:
                fetches.append((evaluated, self._fetching(evaluated, [node for node in ready if node.pool])))
        for snapshot, found in fetches:
            for node in self._chains.in_order(found):
                self._start_fetch(snapshot, node)
        if ways.together and self._fleet.broadcast is None:
            self._start_broadcast(current, ways.together, ways.probation)

    def _start_broadcast(self, snapshot: Snapshot, members: list[NodeView], probation: NodeView | None) -> None:
        identities = [member.identity for member in members]
        epoch, group = self._epochs.take(identities)
        payload = snapshot.payload_for({member.start for member in members})
        attempt = new_attempt(
            snapshot, payload, epoch, members=identities, incarnation=self._incarnation, rate=self._rate
        )
        attempt.probation = probation.identity if probation is not None else None
        self._fleet.begin(attempt)
        for rank, identity in enumerate(identities, start=1):
            self._feed(identity, nodes.begin, attempt, rank if group is None else 0)

        def tell(key: str, value: bytes) -> None:
            self.post(lambda: attempt.take_entries(messages.StoreEntries(epoch.epoch, {key: value}), b""))

        def report(attempt: Attempt, group: BroadcastGroup | None, failure: Failure | None) -> None:
            self.post(lambda: self._sent(attempt, group, failure))

        if group is None:
            attempt.broadcast.store = RelayedStore(self._timeout_s, tell)
        attempt.broadcast.start(attempt, group, self._group_factory, report)

    def _fetching(self, snapshot: Snapshot, receivers: list[NodeView]) -> list[NodeView]:
        """Those of `receivers` that can begin to fetch; the parts of the others are being sealed, or they are busy."""
        now = time.perf_counter()
        listening = [node for node in receivers if node.listens(now) and not self._chains.busy(node.identity, now)]
        payloads = {start: snapshot.payload_for({start}) for start in {node.start for node in listening}}
        for payload in payloads.values():
            if not payload.parts:
                piece = piece_bytes(payload.size, len(self._fleet.nodes), self._chains.rate)
                self.sources.seal(snapshot.version, payload, piece)
                payload.seal_own_part(piece, origin=self._chains.origin(), secured=bool(self.password), post=self.post)
        return [node for node in listening if payloads[node.start].parts]

    def _start_fetch(self, snapshot: Snapshot, node: NodeView) -> None:
        payload = snapshot.payload_for({node.start})
        epoch = self._epochs.relay()
        sources = self._chains.begin(snapshot, payload, node, epoch=epoch.epoch, everyone=self._fleet.nodes.values())
        attempt = new_attempt(
            snapshot,
            payload,
            epoch,
            members=[node.identity],
            incarnation=self._incarnation,
            sources=sources,
            rate=self._rate,
        )
        attempt.newcomers = not node.settled or bool(node.pool)
        self._fleet.begin(attempt)
        self._feed(node.identity, nodes.begin, attempt, epoch.rank)
