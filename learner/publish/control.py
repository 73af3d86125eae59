"""The thread that leads the weight plane: it feeds events to the receivers' state machines and carries out actions.

- Settled nodes get the newest version in one broadcast. A newer version waits until that attempt is over and then goes
  out; versions between them are skipped. A newcomer gets the current version at once over the relay.
- Only Staged counts as received. When an attempt fails, members that answer are tried again, and by relay when
  broadcasts keep failing with them. Dead and silent members are ejected, and the others regroup at once.
- Every wait has a deadline; docs/weights.md lists them.
"""

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec

from common.config.schema import WeightsConfig
from common.weights import messages
from common.weights.collectives import Group, GroupFactory, Meeting
from common.weights.pieces import piece_bytes
from common.weights.transports.nccl import mismatch
from common.weights.transports.registry import open_group
from learner.publish import receiver_state
from learner.publish.attempt import Attempt, Groups, new_attempt
from learner.publish.chains import Chains
from learner.publish.control_socket import Endpoint
from learner.publish.figures import Figures
from learner.publish.other_sources import OtherSources
from learner.publish.receiver_state import Action, Receiver, State, Step
from learner.publish.snapshot import Snapshot, Targets

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
        self._endpoint = Endpoint(weights.address, credentials)
        self.address = self._endpoint.address
        self._reach = self.address.removeprefix("tcp://")
        self._groups = Groups(weights.transport, weights.timeout_s, self._reach)
        self.password = secrets.token_urlsafe(24) if credentials is not None else ""
        self._chains = Chains(weights.address, incarnation, self._endpoint.send, self.password)
        self.sources = OtherSources(incarnation, self._endpoint.send)
        self._receivers: dict[bytes, Receiver] = {}
        self._attempts: list[Attempt] = []
        self.targets = Targets()  # only calls that are given to `post` change it
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
            self._feed(identity, receiver_state.hear, message, time.perf_counter())
            if isinstance(message, messages.Stalled):
                self._chains.stalled(identity, message, time.perf_counter())
            elif isinstance(message, messages.Meet):
                self._meet(message, identity)
        elif not isinstance(message, messages.Leave | messages.Pong):  # late pongs follow an ejection
            self._endpoint.send(identity, messages.Eject("not a member; join again"))

    def _join(self, identity: bytes, message: messages.Join) -> None:
        self._feed(identity, receiver_state.drop, "it joined anew", ejected=False)
        if self._transport == "nccl" and "nccl" in message.transports and (why := mismatch(message.versions)):
            logger.error("node %s may not join: %s", message.node_id, why)
            self._endpoint.send(identity, messages.Eject(why, final=True))
            return
        logger.info("node %s (pid %d) joined the weight plane", message.node_id, message.pid)
        # The Welcome clears the node's staging buffer, so what the node runs is no base of a delta.
        version = message.version if message.incarnation == self._incarnation else -1
        about = {"version": version, "machine": message.machine, "pool": message.pool}
        known = identity, message.node_id, time.perf_counter(), message.transports
        self._receivers[identity] = Receiver(*known, **about)

    def _meet(self, new: messages.Meet, sender: bytes = b"") -> None:
        """Pass entries of a group's store on to its members; `sender`: the one that they come from, b'' the learner."""
        for attempt in self._attempts:
            for member in attempt.meet(new, sender):
                self._endpoint.send(member, new)

    def _tick(self, now: float) -> None:
        current = self.targets.current
        for identity, receiver in list(self._receivers.items()):
            if current is not None and receiver.welcomed is None:
                welcome = messages.Welcome(self._incarnation, current.layout, self._reach, self.password)
                self._feed(identity, receiver_state.greet, welcome, now)
            self._feed(identity, receiver_state.tick, self._timeout_s, now)
        self._chains.tick(now)
        if now - self._pinged >= (BUSY_PING_S if self._attempts else IDLE_PING_S):
            self._pinged = now
            for identity in list(self._receivers):
                if not self._endpoint.send(identity, messages.Ping()):
                    self._feed(identity, receiver_state.drop, "its connection closed")

    def _feed(
        self, identity: bytes, event: Callable[Concatenate[Receiver, P], Step], *args: P.args, **options: P.kwargs
    ) -> None:
        """Let a receiver take the step of an event, then carry out the actions of it."""
        before = self._receivers.get(identity)
        if before is None:
            return
        after, actions = event(before, *args, **options)
        if after.state is State.GONE:
            del self._receivers[identity]
            self._chains.leave(identity)
        else:
            self._receivers[identity] = after
        if after.state is State.EXCLUDED and before.state is not State.EXCLUDED:
            logger.error("node %s is excluded: %s", after.node_id, after.reason)
            self._chains.leave(identity)
        attempt = after.attempt if after.attempt is not None else before.attempt
        for action in actions:
            self._carry_out(before, attempt, action)

    def _carry_out(self, receiver: Receiver, attempt: Attempt | None, action: Action) -> None:
        """Do what `receiver` asks for; `attempt` is the one that its step was about."""
        if isinstance(action, receiver_state.Send):
            self._endpoint.send(receiver.identity, action.message)
        elif isinstance(action, receiver_state.Drop):
            self._drop(receiver, action)
        elif attempt is not None:
            match action:
                case receiver_state.Fail():
                    self._fail(attempt, f"node {receiver.node_id}: {action.reason}")
                case receiver_state.NoteStaged():
                    attempt.last_staged = time.perf_counter()
                    self._chains.staged(receiver.identity, attempt.last_staged, attempt.last_staged - attempt.started)
                    attempt.snapshot.bytes_staged += attempt.payload.size
                case receiver_state.NoteActive():
                    whole = not attempt.newcomers and not self._members(attempt)
                    self.figures.activated(attempt, whole, action.difference)

    def _drop(self, receiver: Receiver, drop: receiver_state.Drop) -> None:
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
                self._feed(identity, receiver_state.doubt)

    # ---- attempts

    def _members(self, attempt: Attempt) -> list[bytes]:
        """The nodes for which the attempt is not over."""
        return [identity for identity, r in self._receivers.items() if r.attempt is attempt]

    def _settle(self) -> None:
        """Release the members of a failed attempt once all are told apart; end attempts that are over."""
        for attempt in list(self._attempts):
            members = self._members(attempt)
            states = {self._receivers[m].state for m in members}
            if State.ANSWERED in states and not states & {State.STAGING, State.DOUBTED}:
                for identity in members:
                    if attempt.relayed:
                        self._chains.leave(identity, failed=True)
                    self._feed(identity, receiver_state.release, self.figures.now.published)
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
        together, relayed, probation = receiver_state.split(ready, fleet, self._transport, published, current.version)
        self._start_fetches(current, relayed)
        if (evaluated := self.targets.evaluated) is not None:
            self._start_fetches(evaluated, [r for r in everyone if r.pool and r.awaits(evaluated.version)])
        if together and all(a.relayed for a in self._attempts):
            self._start_broadcast(current, together, probation)

    def _start_broadcast(self, snapshot: Snapshot, members: list[Receiver], probation: Receiver | None) -> None:
        identities = [m.identity for m in members]
        epoch, group = self._groups.take(identities)
        payload = snapshot.payload_for({m.base for m in members})
        attempt = new_attempt(snapshot, payload, epoch, identities, self._incarnation, [])
        attempt.probation = probation.identity if probation is not None else None
        self._attempts.append(attempt)
        for rank, identity in enumerate(identities, start=1):
            self._feed(identity, receiver_state.begin, attempt, rank if group is None else 0)
        post = self.post
        if group is None:
            attempt.broadcast.meeting = Meeting(
                self._timeout_s, lambda key, value: post(lambda: self._meet(messages.Meet(epoch.epoch, {key: value})))
            )
        attempt.broadcast.start(attempt, group, self._group_factory, lambda *sent: post(partial(self._sent, *sent)))

    def _start_fetches(self, snapshot: Snapshot, receivers: list[Receiver]) -> None:
        now = time.perf_counter()
        listening = [r for r in receivers if r.listens(now) and not self._chains.busy(r.identity, now)]
        for receiver in self._chains.in_order(listening):
            self._start_fetch(snapshot, receiver)

    def _start_fetch(self, snapshot: Snapshot, receiver: Receiver) -> None:
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
        self._feed(receiver.identity, receiver_state.begin, attempt, epoch.rank)
