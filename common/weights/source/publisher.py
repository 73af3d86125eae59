"""The thread that leads the weight plane: it feeds events to the receivers' state machines and carries out actions.

- Settled nodes get the newest version in one broadcast. A newer version waits until that attempt is over and then goes
  out; versions between them are skipped. A newcomer gets the current version at once over the relay.
- Only Staged counts as received. When an attempt fails, members that answer are tried again, and by relay when
  broadcasts keep failing with them. Dead and silent members are ejected, and the others regroup at once.
- Every wait has a deadline; docs/weights.md lists them.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Concatenate, ParamSpec

from torch import Tensor

from common.config.schema import WeightsConfig
from common.weights.source import nodes
from common.weights.source.attempt import Attempt, Epochs, new_attempt
from common.weights.source.chains import Chains
from common.weights.source.nodes import Action, Figures, NodeState, NodeView, PublishStats, Step
from common.weights.source.snapshot import Deltas, Snapshot, SnapshotMaker, TensorSpecs, VersionSchedule
from common.weights.source.sources import LeadEndpoint, OtherSources
from common.weights.transports.groups import Group, GroupFactory, RelayedStore, open_group
from common.weights.transports.nccl import mismatch, own_stream, remember_device
from common.weights.wire import messages
from common.weights.wire.messages import Canary
from common.weights.wire.pieces import piece_bytes
from common.weights.wire.sockets import ControlSocket

logger = logging.getLogger(__name__)

BUSY_PING_S, IDLE_PING_S = 0.25, 1.0
P = ParamSpec("P")


class PublishControl:
    """Runs in one thread; other threads may use `offer`, `stop` and `figures`."""

    def __init__(
        self,
        weights: WeightsConfig,
        incarnation: int,
        credentials: str | None = None,
        group_factory: GroupFactory = open_group,
    ) -> None:
        """Bind the endpoint on `weights.address`; raises zmq.ZMQError, or UsageError (`credentials`)."""
        self.figures = Figures(incarnation)
        self._incarnation, self._group_factory = incarnation, group_factory
        self._timeout_s, self._transport = weights.timeout_s, weights.transport
        self._endpoint = ControlSocket(weights.address, credentials)
        self.address = self._endpoint.address
        self._learner_endpoint = self.address.removeprefix("tcp://")
        self._groups = Epochs(weights.transport, weights.timeout_s, self._learner_endpoint)
        self.password = secrets.token_urlsafe(24) if credentials is not None else ""
        self._chains = Chains(weights.address, incarnation, self._endpoint.send, self.password)
        self.sources = OtherSources(incarnation, self._endpoint.send)
        self._receivers: dict[bytes, NodeView] = {}
        self._attempts: list[Attempt] = []
        self.targets = VersionSchedule()  # only calls that are given to `post` change it
        self.post = self._endpoint.post
        self._pinged = 0.0
        self._stop_by: float | None = None  # perf_counter seconds

    def offer(self, snapshot: Snapshot) -> None:
        """Send a sealed version, once all sources have it."""
        self.post(partial(self.sources.add, snapshot))

    def stop(self) -> None:
        """Let `run` return when no attempt is under way."""
        self._stop_by = time.perf_counter() + self._timeout_s
        self.post(lambda: None)

    def run(self) -> None:
        """Serve until `stop`; an attempt that is under way then is cut after weights.timeout_s."""
        try:
            while self._stop_by is None or (self._attempts and time.perf_counter() < self._stop_by):
                self._endpoint.wait(50 if self._attempts else 250)
                for identity, message in self._endpoint.received():
                    self._handle(identity, message)
                for snapshot in self.sources.whole(self.targets.wanted):
                    self.figures.offered(snapshot)
                    if snapshot.whole:
                        self.targets.add(snapshot)
                self._tick(time.perf_counter())
                self._settle()
                self._start_attempts()
                self.figures.describe(self._receivers.values(), self.targets)
        except Exception:
            logger.exception("the weight plane stopped")
            self.figures.change(fatal="the publisher's control thread failed; see the log", crashed=True)
            raise
        finally:
            self._endpoint.close()
            self._groups.drop()
            self._chains.close()

    # ---- events

    def _sent(self, attempt: Attempt, group: Group | None, error: str) -> None:
        """The thread of a broadcast has ended, with its group or with the reason why there is none."""
        attempt.done = True
        if error:
            self._fail(attempt, error)
        elif attempt in self._attempts:
            attempt.group = group
        elif group is not None:
            group.close()  # the attempt was given up in the meantime

    def _handle(self, identity: bytes, message: messages.NodeMessage) -> None:
        if isinstance(message, messages.Join):
            self._join(identity, message)
        elif isinstance(message, messages.SourceMessage):
            self.sources.hear(identity, message, self.targets.snapshots.get(message.version))
        elif identity in self._receivers:
            self._feed(identity, nodes.hear, message, time.perf_counter())
            if isinstance(message, messages.Stalled):
                self._chains.stalled(identity, message, time.perf_counter())
            elif isinstance(message, messages.StoreEntries):
                self._relay(message, identity)
        elif not isinstance(message, messages.Leave | messages.Pong):  # late pongs follow an ejection
            self._endpoint.send(identity, messages.Eject("not a member; join again"))

    def _join(self, identity: bytes, message: messages.Join) -> None:
        self._feed(identity, nodes.drop, "it joined anew", ejected=False)
        if self._transport == "nccl" and "nccl" in message.transports and (why := mismatch(message.versions)):
            logger.error("node %s may not join: %s", message.node_id, why)
            self._endpoint.send(identity, messages.Eject(why, final=True))
            return
        logger.info("node %s (pid %d) joined the weight plane", message.node_id, message.pid)
        # The Welcome clears the node's staging buffer, so what the node runs is no base of a delta.
        version = message.version if message.incarnation == self._incarnation else -1
        about = {"version": version, "machine": message.machine, "pool": message.pool}
        known = identity, message.node_id, time.perf_counter(), message.transports
        self._receivers[identity] = NodeView(*known, **about)

    def _relay(self, new: messages.StoreEntries, sender: bytes = b"") -> None:
        """Pass entries of a group's store on to its members; `sender`: the one that they come from, b'' the learner."""
        for attempt in self._attempts:
            for member in attempt.meet(new, sender):
                self._endpoint.send(member, new)

    def _tick(self, now: float) -> None:
        current = self.targets.current
        for identity, receiver in list(self._receivers.items()):
            if current is not None and receiver.welcomed is None:
                welcome = messages.Welcome(self._incarnation, current.layout, self._learner_endpoint, self.password)
                self._feed(identity, nodes.greet, welcome, now)
            self._feed(identity, nodes.tick, self._timeout_s, now)
        self._chains.tick(now)
        if now - self._pinged >= (BUSY_PING_S if self._attempts else IDLE_PING_S):
            self._pinged = now
            for identity in list(self._receivers):
                if not self._endpoint.send(identity, messages.Ping()):
                    self._feed(identity, nodes.drop, "its connection closed")

    def _feed(
        self, identity: bytes, event: Callable[Concatenate[NodeView, P], Step], *args: P.args, **options: P.kwargs
    ) -> None:
        """Let a receiver take the step of an event, then carry out the actions of it."""
        before = self._receivers.get(identity)
        if before is None:
            return
        after, actions = event(before, *args, **options)
        if after.state is NodeState.GONE:
            del self._receivers[identity]
            self._chains.leave(identity)
        else:
            self._receivers[identity] = after
        if after.state is NodeState.EXCLUDED and before.state is not NodeState.EXCLUDED:
            logger.error("node %s is excluded: %s", after.node_id, after.reason)
            self._chains.leave(identity)
        attempt = after.attempt if after.attempt is not None else before.attempt
        for action in actions:
            self._carry_out(before, attempt, action)

    def _carry_out(self, receiver: NodeView, attempt: Attempt | None, action: Action) -> None:
        """Do what `receiver` asks for; `attempt` is the one that its step was about."""
        if isinstance(action, nodes.SendMessage):
            self._endpoint.send(receiver.identity, action.message)
        elif isinstance(action, nodes.DropNode):
            self._drop(receiver, action)
        elif attempt is not None:
            match action:
                case nodes.FailAttempt():
                    self._fail(attempt, f"node {receiver.node_id}: {action.reason}")
                case nodes.NoteStaged():
                    attempt.last_staged = time.perf_counter()
                    self._chains.staged(receiver.identity, attempt.last_staged, attempt.last_staged - attempt.started)
                    attempt.snapshot.bytes_staged += attempt.payload.size
                case nodes.NoteActive():
                    whole = not attempt.newcomers and not self._members(attempt)
                    self.figures.activated(attempt, whole, action.difference)

    def _drop(self, receiver: NodeView, drop: nodes.DropNode) -> None:
        logger.info("node %s leaves the weight plane: %s", receiver.node_id, drop.why)
        if receiver.attempt is not None and not receiver.attempt.done:
            self._fail(receiver.attempt, f"node {receiver.node_id} left")
        self._groups.drop(receiver.identity)
        for attempt in self._attempts:
            attempt.lost |= receiver.identity in attempt.members
        if drop.ejected:
            self.figures.change(ejections=self.figures.now.ejections + 1)
            self._endpoint.send(receiver.identity, messages.Eject(drop.why))

    def _fail(self, attempt: Attempt, reason: str) -> None:
        """Note the first sign of trouble; every member that has not staged must now show that it is alive."""
        logger.warning("version %d to %d nodes: %s", attempt.version, len(attempt.members), reason)
        if not attempt.failed:
            attempt.failed = True
            for identity in self._members(attempt):
                self._feed(identity, nodes.doubt)

    # ---- attempts

    def _members(self, attempt: Attempt) -> list[bytes]:
        """The nodes for which the attempt is not over."""
        return [identity for identity, r in self._receivers.items() if r.attempt is attempt]

    def _settle(self) -> None:
        """Release the members of a failed attempt once all are told apart; end attempts that are over."""
        for attempt in list(self._attempts):
            members = self._members(attempt)
            states = {self._receivers[m].state for m in members}
            if NodeState.ANSWERED in states and not states & {NodeState.STAGING, NodeState.DOUBTED}:
                for identity in members:
                    if attempt.relayed:
                        self._chains.leave(identity, failed=True)
                    self._feed(identity, nodes.release, self.figures.now.published)
                attempt.broadcast.abandon()
            if not self._members(attempt) and (attempt.done or attempt.failed):
                self._attempts.remove(attempt)
                if attempt.failed:
                    attempt.broadcast.abandon()  # its thread may still wait for members that left
                self._groups.give_back(attempt)

    def _start_attempts(self) -> None:
        current = self.targets.current
        if current is None or (self._stop_by is not None and not self._attempts):
            return
        everyone = list(self._receivers.values())
        self.sources.keep(self.targets.snapshots.keys() | self._chains.tidy(current))
        fleet = [r for r in everyone if not r.pool]
        ready = [r for r in fleet if r.awaits(current.version)]
        published = self.figures.now.published
        together, relayed, probation = nodes.split(ready, fleet, self._transport, published, current.version)
        self._start_fetches(current, relayed)
        if (evaluated := self.targets.evaluated) is not None:
            self._start_fetches(evaluated, [r for r in everyone if r.pool and r.awaits(evaluated.version)])
        if together and all(a.relayed for a in self._attempts):
            self._start_broadcast(current, together, probation)

    def _start_broadcast(self, snapshot: Snapshot, members: list[NodeView], probation: NodeView | None) -> None:
        identities = [m.identity for m in members]
        epoch, group = self._groups.take(identities)
        payload = snapshot.payload_for({m.base for m in members})
        attempt = new_attempt(snapshot, payload, epoch, identities, self._incarnation, [])
        attempt.probation = probation.identity if probation is not None else None
        self._attempts.append(attempt)
        for rank, identity in enumerate(identities, start=1):
            self._feed(identity, nodes.begin, attempt, rank if group is None else 0)
        post = self.post
        if group is None:
            attempt.broadcast.store = RelayedStore(
                self._timeout_s,
                lambda key, value: post(lambda: self._relay(messages.StoreEntries(epoch.epoch, {key: value}))),
            )
        attempt.broadcast.start(attempt, group, self._group_factory, lambda *sent: post(partial(self._sent, *sent)))

    def _start_fetches(self, snapshot: Snapshot, receivers: list[NodeView]) -> None:
        now = time.perf_counter()
        listening = [r for r in receivers if r.listens(now) and not self._chains.busy(r.identity, now)]
        for receiver in self._chains.in_order(listening):
            self._start_fetch(snapshot, receiver)

    def _start_fetch(self, snapshot: Snapshot, receiver: NodeView) -> None:
        payload = snapshot.payload_for({receiver.base})
        if not payload.parts:  # it is tried again when they are sealed
            piece = piece_bytes(payload.size, len(self._receivers), self._chains.rate)
            self.sources.seal(snapshot.version, payload, piece)
            payload.seal(piece, self._chains.origin(), bool(self.password), self.post)
            return
        epoch = self._groups.relay_epoch()
        sources = self._chains.begin(snapshot, payload, receiver, epoch.epoch, self._receivers.values())
        attempt = new_attempt(snapshot, payload, epoch, [receiver.identity], self._incarnation, sources)
        attempt.newcomers = not receiver.settled or bool(receiver.pool)
        self._attempts.append(attempt)
        self._feed(receiver.identity, nodes.begin, attempt, epoch.rank)


class WeightPublisher:
    """Sends policy versions to the nodes."""

    def __init__(
        self,
        incarnation: int,
        dtype: str,
        weights: WeightsConfig,
        credentials: str | None = None,
        group_factory: GroupFactory = open_group,
        bucket_bytes: int | None = None,
    ) -> None:
        """`dtype` is the engines' dtype; with `credentials`, a key folder, only its nodes may join.

        `bucket_bytes` replaces `weights.bucket_mib`, for buckets below one MiB.
        """
        self._incarnation, self._weights, self._credentials = incarnation, weights, credentials
        self._group_factory = group_factory
        self._bucket_bytes = bucket_bytes if bucket_bytes is not None else weights.bucket_mib << 20
        self._published, self._version = 0, -1
        self._deltas = Deltas(weights.encoding, weights.anchor_every)
        self._device = remember_device() if weights.buffers == "device" else None
        self._maker = SnapshotMaker(dtype, self._device)
        self._control: PublishControl | None = None
        self._thread: threading.Thread | None = None
        self._sealing: threading.Thread | None = None

    def start(self) -> str:
        """Bind the control endpoint and start the sending thread; returns the endpoint's address."""
        self._control = PublishControl(self._weights, self._incarnation, self._credentials, self._group_factory)
        self._thread = threading.Thread(target=self._control.run, daemon=True, name="weight-plane")
        self._thread.start()
        return self._control.address

    @property
    def _plane(self) -> PublishControl:
        assert self._control is not None, "used before start"
        return self._control

    def share(self, parts: list[TensorSpecs]) -> None:
        """Send the first of `parts` only, (name, shape) of tensors source by source; the others send theirs."""
        self._maker.share(parts, 0)
        self._plane.sources.count = len(parts) - 1

    @property
    def lead(self) -> LeadEndpoint:
        """The address, incarnation and password that the other sources need."""
        return LeadEndpoint(self._plane.address, self._incarnation, self._plane.password)

    def publish(self, version: int, named: Iterable[tuple[str, Tensor]], canary: Canary | None) -> int:
        """Copy `named` (Hugging Face name, full tensor) into the flat buffer, and send it in the background.

        Returns the size of the version in bytes; the parameters may change again. After `share` these are the tensors
        of the first part. It consumes `named` to its end, because every rank must take part in producing it.
        Without `weights.overlap` it also waits until the version is active on every node, at most `timeout_s`. Raises
        ValueError when names or shapes differ from the first version's.
        """
        if self._sealing is not None:
            self._sealing.join()  # versions are offered in order; hashing and encoding are far shorter than a step
        snapshot = self._maker.make(version, named, canary)
        self._sealing = threading.Thread(target=self._seal, args=(snapshot, self._plane), name="seal-weights")
        self._sealing.start()
        self._published, self._version = self._published + 1, version
        if not self._weights.overlap:
            timeout_s = self._weights.timeout_s
            if not self._plane.figures.wait_settled(self._published, version, timeout_s):
                logger.warning("version %d is not active on every node after %g s; continuing", version, timeout_s)
        return snapshot.layout.total_bytes

    def hold(self, reason: str) -> None:
        """Let the nodes keep the newest version that `publish` got so far, until `release(reason)`; see
        VersionSchedule.

        Call it from the thread that publishes. Several reasons may overlap.
        """
        self._plane.post(partial(self._plane.targets.hold, reason, self._version))

    def release(self, reason: str) -> None:
        """Send the newest version, unless another reason remains."""
        self._plane.post(partial(self._plane.targets.release, reason))

    def evaluate(self, *versions: int) -> None:
        """Keep a copy of each of these versions, and give the first one to the nodes of the pool.

        A version is the one that `publish` got last, or is in the list of the call before.
        """
        self._plane.post(partial(self._plane.targets.evaluate, versions))

    def stats(self) -> PublishStats:
        """Figures so far; cheap, callable from any thread."""
        return self._control.figures.now if self._control is not None else PublishStats()

    def close(self) -> None:
        """Stop sending and release the endpoint; a publish under way is finished or cut after the timeout."""
        if self._control is None or self._thread is None:
            return
        if self._sealing is not None:
            self._sealing.join()
        self._control.stop()
        self._thread.join(self._weights.timeout_s + 5)
        if self._thread.is_alive():
            logger.warning("the weight plane did not stop in time")

    def _seal(self, snapshot: Snapshot, control: PublishControl) -> None:
        try:
            with own_stream(self._device):
                self._deltas.seal(snapshot, self._bucket_bytes)
            control.offer(snapshot)
        except Exception as error:
            logger.exception("version %d cannot be sent", snapshot.version)
            control.figures.change(fatal=f"version {snapshot.version} cannot be sent: {error!r}", crashed=True)
