"""The thread that leads the weight plane: who is in it, what each node holds, what is on its way.

Rules, all of them bounded in time:
- The group gets the newest version; a newer one waits until the group is through and then goes out, skipping
  what lies between. A newcomer gets the current version at once over the relay, beside the group.
- Only Staged counts as received. A member that fails is retried without stopping the others, and by relay when the
  collective keeps failing with it; one that is dead (its connection is gone) or silent is ejected, and the rest
  regroup at once instead of waiting for the transport.
"""

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from common.weights import messages
from common.weights.collectives import Group, GroupFactory
from common.weights.transports.registry import open_group
from learner.publish.collective_groups import Groups
from learner.publish.control_socket import Endpoint
from learner.publish.protocol import PublishStats
from learner.publish.receivers import Member, after_failure, split
from learner.publish.relay import Relays
from learner.publish.snapshot import Snapshot
from learner.publish.transfer import Transfer, announcement, new_transfer, send_in_thread
from learner.publish.undelivered import undelivered

logger = logging.getLogger(__name__)

BUSY_PING_S, IDLE_PING_S = 0.25, 1.0

Sent = tuple[Transfer, Group | None, str]


class PublishControl:
    """Runs in one thread; `offer`, `stop`, `stats` and `wait_settled` may be called from others."""

    def __init__(
        self,
        address: str,
        incarnation: int,
        bucket_bytes: int,
        timeout_s: float,
        group_factory: GroupFactory = open_group,
        credentials: str | None = None,
        transport: str = "gloo",
    ) -> None:
        """Bind the control endpoint and the store on `address`.

        Raises zmq.ZMQError or OSError when that fails, UsageError when `credentials` cannot be used.
        """
        self._incarnation, self._bucket_bytes, self._timeout_s = incarnation, bucket_bytes, timeout_s
        self._group_factory, self._transport = group_factory, transport
        self._groups = Groups(address, transport, timeout_s)
        self._endpoint: Endpoint[Snapshot | Sent | None] = Endpoint(address, credentials)
        self.address = self._endpoint.address
        self._relays = Relays(address, credentials is not None, self.address.removeprefix("tcp://"), timeout_s)
        self._members: dict[bytes, Member] = {}
        self._transfers: list[Transfer] = []
        self._current: Snapshot | None = None
        self._canary_version = -1  # newest version with a canary
        self._pinged = 0.0
        self._stopping = False
        self._silence_s = min(3.0, timeout_s / 4)  # pings are answered at once, even while weights flow
        self._stats_changed = threading.Condition()
        self._stats = PublishStats()

    # ---- called from other threads

    def offer(self, snapshot: Snapshot) -> None:
        """A sealed version to send; takes over the caller's reference."""
        self._endpoint.post(snapshot)

    def stop(self) -> None:
        """Let `run` return once nothing is on its way."""
        self._endpoint.post(None)

    def stats(self) -> PublishStats:
        with self._stats_changed:
            return self._stats

    def wait_settled(self, published: int, version: int, timeout_s: float) -> bool:
        """Wait until the `published`th offer, `version`, is active on every live node; False when time ran out."""

        def settled() -> bool:
            stats = self._stats
            through = stats.published >= published and (stats.nodes == 0 or stats.version_active >= version)
            return through or stats.crashed

        with self._stats_changed:
            return self._stats_changed.wait_for(settled, timeout_s)

    # ---- the thread

    def run(self) -> None:
        """Serve until `stop`; a publish under way is finished or cut after the timeout."""
        give_up = float("inf")
        try:
            while not (self._stopping and (not self._transfers or time.perf_counter() > give_up)):
                self._endpoint.wait(50 if self._transfers else 250)
                for identity, message in self._endpoint.received():
                    self._handle(identity, message)
                for item in self._endpoint.items():
                    self._take_in(item)
                now = time.perf_counter()
                if self._stopping and give_up == float("inf"):
                    give_up = now + self._timeout_s
                self._ping(now)
                self._settle(now)
                self._start_transfers()
                self._update_stats()
        except Exception:
            logger.exception("the weight plane stopped")
            self._change_stats(fatal="the publisher's control thread failed; see the log", crashed=True)
            raise
        finally:
            self._endpoint.close()
            self._groups.drop()
            self._relays.close()

    def _take_in(self, item: "Snapshot | Sent | None") -> None:
        if item is None:
            self._stopping = True
        elif isinstance(item, Snapshot):
            if self._current is not None:
                self._current.release()
            self._current = item
            if item.canary is not None:
                self._canary_version = item.version
            self._change_stats(published=self.stats().published + 1)
        else:
            self._sent(*item)

    def _sent(self, transfer: Transfer, group: Group | None, error: str) -> None:
        transfer.done = True
        if error:
            logger.warning("version %d to %d nodes: %s", transfer.snapshot.version, len(transfer.members), error)
            transfer.fail(time.perf_counter())
        elif group is not None and transfer in self._transfers:
            transfer.group = group
        elif group is not None:
            group.close()  # given up in the meantime

    def _handle(self, identity: bytes, message: messages.NodeMessage) -> None:
        if isinstance(message, messages.Join):
            self._joined(identity, message)
            return
        member = self._members.get(identity)
        if member is None:
            if not isinstance(message, messages.Leave | messages.Pong):  # late pongs follow an ejection
                self._endpoint.send(identity, messages.Eject("not a member; join again"))
            return
        member.last_heard = time.perf_counter()
        if member.transfer is not None:
            member.transfer.answered.add(identity)
        if isinstance(message, messages.Leave):
            self._forget(member, "it left", ejected=False)
        elif isinstance(message, messages.Staged):
            self._staged(member, message)
        elif isinstance(message, messages.Active):
            self._active(member, message)
        elif isinstance(message, messages.Rejected):
            self._rejected(member, message)
        elif isinstance(message, messages.Serving):
            self._serving(member, message)

    def _joined(self, identity: bytes, message: messages.Join) -> None:
        if identity in self._members:
            self._forget(self._members[identity], "it joined anew", ejected=False)
        logger.info("node %s (pid %d) joined the weight plane", message.node_id, message.pid)
        member = Member(identity, message.node_id, time.perf_counter(), message.transports)
        if message.incarnation == self._incarnation:
            member.version = message.version  # its buffer goes with the Welcome that it gets: no base
        self._members[identity] = member

    def _current_transfer(self, member: Member, version: int) -> Transfer | None:
        transfer = member.transfer
        return transfer if transfer is not None and transfer.snapshot.version == version else None

    def _staged(self, member: Member, message: messages.Staged) -> None:
        transfer = self._current_transfer(member, message.version)
        if transfer is None or message.epoch != transfer.epoch.epoch:
            return  # an earlier attempt at this version; its buffer is gone at the node
        if member.identity not in transfer.receiving:
            return
        transfer.receiving.discard(member.identity)
        transfer.flipping.add(member.identity)
        transfer.last_staged = time.perf_counter()
        transfer.snapshot.bytes_staged += transfer.payload.flat.numel()
        self._endpoint.send(member.identity, messages.Activate(self._incarnation, message.version))

    def _active(self, member: Member, message: messages.Active) -> None:
        transfer = self._current_transfer(member, message.version)
        if transfer is None:
            return
        member.runs(message.version)
        if message.checksum != transfer.snapshot.checksum:
            self._quarantine(member, f"node {member.node_id} holds other weights than were sent")
        transfer.flipping.discard(member.identity)
        member.transfer = None
        if message.canary_max_difference is not None:
            member.canary_version = message.version
            self._change_stats(canary_max_difference=message.canary_max_difference)
        if transfer.finished and not transfer.newcomers:
            now = time.perf_counter()
            snapshot = transfer.snapshot
            self._change_stats(
                publish_s=transfer.last_staged - snapshot.started,
                broadcast_s=transfer.last_staged - transfer.started,
                seconds_to_active=now - snapshot.started,
                publish_bytes=snapshot.bytes_staged,
            )

    def _rejected(self, member: Member, message: messages.Rejected) -> None:
        transfer = self._current_transfer(member, message.version)
        logger.warning("node %s rejected version %d: %s", member.node_id, message.version, message.reason)
        if message.fatal:
            self._quarantine(member, message.reason)
        elif transfer is not None and message.epoch == transfer.epoch.epoch:
            transfer.fail(time.perf_counter())
            transfer.answered.add(member.identity)

    def _quarantine(self, member: Member, reason: str) -> None:
        member.quarantined = reason
        self._leave_transfer(member)

    def _leave_transfer(self, member: Member) -> None:
        transfer, member.transfer = member.transfer, None
        if transfer is not None:
            transfer.receiving.discard(member.identity)
            transfer.flipping.discard(member.identity)

    def _forget(self, member: Member, why: str, ejected: bool = True) -> None:
        logger.info("node %s leaves the weight plane: %s", member.node_id, why)
        transfer = member.transfer
        if transfer is not None and not transfer.done:
            transfer.fail(time.perf_counter())
        self._leave_transfer(member)
        self._members.pop(member.identity, None)
        self._groups.left(member.identity)
        if ejected:
            self._change_stats(ejections=self.stats().ejections + 1)
            self._endpoint.send(member.identity, messages.Eject(why))

    def _ping(self, now: float) -> None:
        """Find the dead (closed connection) and the silent."""
        if now - self._pinged < (BUSY_PING_S if self._transfers else IDLE_PING_S):
            return
        self._pinged = now
        for member in list(self._members.values()):
            if not self._endpoint.send(member.identity, messages.Ping()):
                self._forget(member, "its connection closed")
            elif now - member.last_heard > max(self._timeout_s, 5 * IDLE_PING_S):
                self._forget(member, f"silent for {now - member.last_heard:.1f} s")
            elif member.transfer is not None and now - member.last_heard > self._silence_s:
                member.transfer.fail(now)

    def _settle(self, now: float) -> None:
        """End transfers that are through, and those in trouble once it is clear who is still there."""
        for transfer in list(self._transfers):
            if transfer.peer_until is not None and now > transfer.peer_until:
                self._fetch(transfer, None)
            if transfer.receiving and now > transfer.deadline:
                transfer.fail(now)
            if transfer.failed_at is not None and transfer.receiving:
                self._give_up_attempt(transfer, now)
            if transfer.flipping and now > transfer.deadline + self._timeout_s:
                for identity in list(transfer.flipping):
                    self._forget(self._members[identity], f"version {transfer.snapshot.version} was never active")
            if transfer.finished and (transfer.done or transfer.failed_at is not None):
                self._end(transfer)

    def _give_up_attempt(self, transfer: Transfer, now: float) -> None:
        """Release the members that answered for another attempt, and eject the silent ones, once all are told apart."""
        unheard = transfer.receiving - transfer.answered
        silent = {i for i in unheard if now - self._members[i].last_heard > self._silence_s}
        if unheard - silent:
            return  # the pings of this moment are still to be answered
        for identity in list(transfer.receiving):
            member = self._members[identity]
            if identity in silent:
                self._forget(member, f"silent while version {transfer.snapshot.version} was sent")
                continue
            hopeless = after_failure(member, transfer, self.stats().published)
            if hopeless:
                self._forget(member, hopeless)
            else:
                self._leave_transfer(member)
        transfer.abandon()

    def _end(self, transfer: Transfer) -> None:
        self._transfers.remove(transfer)
        self._relays.over(transfer)
        whole = transfer.failed_at is None and all(m in self._members for m in transfer.members)
        self._groups.give_back(transfer, usable=whole)
        transfer.snapshot.release()

    def _start_transfers(self) -> None:
        current = self._current
        if current is None or (self._stopping and not self._transfers):
            return
        idle = [m for m in self._members.values() if m.transfer is None and m.needs(current.version)]
        if not idle:
            return
        for member in idle:
            member.begins(current.version)
        ways = split(idle, self._members.values(), self._transport, self.stats().published)
        for member in ways.relayed:
            self._start_relayed(current, member)
        if ways.together and all(t.relayed for t in self._transfers):
            self._start_together(current, ways.together, ways.probation)

    def _welcome(self, member: Member, snapshot: Snapshot) -> None:
        if not member.welcomed:
            self._endpoint.send(member.identity, messages.Welcome(self._incarnation, snapshot.layout))
            member.welcomed = True

    def _start_together(self, snapshot: Snapshot, members: list[Member], probation: Member | None) -> None:
        identities = [m.identity for m in members]
        epoch, group = self._groups.take(identities)
        for rank, member in enumerate(members, start=1):
            self._welcome(member, snapshot)
            if group is None:
                self._endpoint.send(member.identity, msgspec.structs.replace(epoch, rank=rank))
        payload = snapshot.payload_for({m.base for m in members})
        transfer = new_transfer(snapshot, payload, identities, epoch, False, self._timeout_s)
        transfer.probation = probation.identity if probation is not None else None
        publish = announcement(transfer, self._incarnation, self._bucket_bytes, self._timeout_s)
        for member in members:
            member.receives(transfer)
            self._endpoint.send(member.identity, publish)
        self._transfers.append(transfer)
        send_in_thread(
            transfer, group, self._group_factory, self._bucket_bytes, lambda *result: self._endpoint.post(result)
        )

    def _start_relayed(self, snapshot: Snapshot, member: Member) -> None:
        self._welcome(member, snapshot)
        payload = snapshot.payload_for({member.base})
        epoch, newcomer = self._groups.relay_epoch(), not member.settled
        transfer = new_transfer(snapshot, payload, [member.identity], epoch, newcomer, self._timeout_s)
        transfer.relayed = transfer.done = True
        member.receives(transfer)
        self._transfers.append(transfer)
        whole = payload is snapshot.full and member.attempts == 0
        peer = self._relays.peer_for(member, self._members.values(), snapshot) if whole else None
        if peer is None or not self._endpoint.send(peer.identity, self._relays.ask(transfer, self._incarnation, peer)):
            self._fetch(transfer, None)

    def _serving(self, peer: Member, message: messages.Serving) -> None:
        found = self._relays.answered(peer, message)
        if found is not None:
            if found[1] is None:
                logger.info("node %s does not serve weights: %s", peer.node_id, message.reason)
            self._fetch(*found)

    def _fetch(self, transfer: Transfer, source: messages.Source | None) -> None:
        """Let the node of a relayed transfer begin, from `source` or else from here."""
        transfer.peer_until = None
        if not transfer.receiving:
            return
        try:
            source = source if source is not None else self._relays.own_source(transfer)
        except zmq.ZMQError as error:
            logger.warning("the learner cannot serve weights: %s", error)
            transfer.fail(time.perf_counter())
            return
        for identity in transfer.receiving:
            self._endpoint.send(identity, msgspec.structs.replace(transfer.epoch, source=source))
            publish = announcement(transfer, self._incarnation, self._bucket_bytes, self._timeout_s)
            self._endpoint.send(identity, publish)

    def _update_stats(self) -> None:
        live = [m for m in self._members.values() if not m.quarantined]
        bad = [m.quarantined for m in self._members.values() if m.quarantined]
        sent = min((m.version for m in live), default=self.stats().version_sent)
        # A quarantined node leaves within a second: what it said stands until some other node may generate.
        fatal = None if live else (bad[0] if bad else self.stats().fatal)
        owed = any(m.version >= self._canary_version > m.canary_version for m in live)
        active = min((m.version for m in live), default=-1)
        version_sent = max(sent, self.stats().version_sent)
        self._change_stats(
            nodes=len(live),
            version_sent=version_sent,
            version_active=active,
            fatal=fatal,
            canary_owed=owed,
            undelivered=undelivered(self._members, self._transfers, self._current),
        )

    def _change_stats(self, **changes: Any) -> None:
        with self._stats_changed:
            self._stats = replace(self._stats, **changes)
            self._stats_changed.notify_all()
