"""A delivery state that can be written down and built again.

`apply` does what a recorded move says; `capture` and `restore` do the same for all of it at once. Deadlines are the
one thing that is not restored: every lease and every node gets a fresh one, since nobody knows how long the broker
was away.
"""

from collections.abc import Callable, Sequence

import msgspec

from broker.contract import BrokerStatus, HeartbeatReply, NodeReport, RunInfo
from broker.delivery.event_log import EventLog
from broker.delivery.nodes import same_process
from broker.delivery.state import DeliveryState
from broker.journal import records
from broker.journal.journaled_tables import (
    JournaledFleet,
    JournaledLearner,
    JournaledOwners,
    JournaledTable,
    Kept,
    Recorder,
)
from broker.journal.store import Location, StoredPayload


class DurableState(DeliveryState):
    """See DeliveryState; moves go to `journal`."""

    def __init__(
        self,
        run: RunInfo,
        clock: Callable[[], float],
        new_token: Callable[[], str],
        events: EventLog,
        journal: Recorder,
        retain_steps: int,
        pid: int = 0,
        store_id: str = "",
    ) -> None:
        super().__init__(run, clock, new_token, events, pid, store_id=store_id)
        self.table = JournaledTable(journal, retain_steps)
        self.nodes = JournaledFleet(run.lease_s, journal)
        self.reporter = JournaledLearner(journal)
        self.tasks, self.fleet, self.learner = self.table, self.nodes, self.reporter
        self.owners = JournaledOwners(journal)
        self.recovery_s = 0.0
        self._unconfirmed: set[str] = set()  # recovered leases whose nodes have not been heard of yet
        self._journal = journal

    def status(self) -> BrokerStatus:
        """With what is known of the store."""
        store = self._journal.status()
        if store is not None:
            store = msgspec.structs.replace(store, recovery_s=self.recovery_s)
        return msgspec.structs.replace(super().status(), store=store)

    def heartbeat(self, report: NodeReport, tokens: Sequence[str]) -> HeartbeatReply:
        """See DeliveryState. The first one after a recovery tells which leases the node never heard of.

        They were given, and the answer was lost with the broker: they go back at once, and count no attempt.
        """
        node = self.fleet.nodes.get(report.node_id)
        if self._unconfirmed and node is not None and same_process(node.report, report):
            recovered = self._unconfirmed & node.tokens
            self._unconfirmed -= recovered
            if unheard := recovered.difference(tokens):
                self.release(report.node_id, sorted(unheard))
        reply = super().heartbeat(report, tokens)
        goes_on = self.reporter.job_ended  # the broker was started again for a job that had ended: for more steps
        return msgspec.structs.replace(reply, drain=False) if goes_on else reply

    # ---------------------------------------------------------------- writing down

    def marks(self) -> records.Marks:
        """The single values that were promised."""
        return records.Marks(self._first_step, self.committed_step)

    def statistics(self) -> records.Statistics:
        """The counters."""
        generated, wasted = self.nodes.past
        return records.Statistics(
            next_event=self.event_log.next_index,
            lease_expiries=self.lease_expiries,
            stale_results=self.stale_results,
            past_generated=generated,
            past_wasted=wasted,
            nodes={name: records.NodeCounts(n.handed_in, dict(n.counted)) for name, n in self.fleet.nodes.items()},
        )

    def capture(self) -> "Captured":
        """Everything as it is now, but for places in the store that are not known yet."""
        return Captured(self)

    @property
    def accepted(self) -> list[tuple[str, str]]:
        """(token, node) of accepted results, oldest first."""
        return list(self._accepted.items())

    # ---------------------------------------------------------------- building again

    def restore(self, snapshot: records.Snapshot, read: Callable[[Location], bytes]) -> None:
        """Fill an empty state, but for the history."""

        def stored(location: Location | None) -> StoredPayload | None:
            return None if location is None else StoredPayload(read, location)

        self.table.restore(snapshot, [stored(task.location) for task in snapshot.tasks])
        for step, groups in snapshot.kept.items():
            self.table.kept[step] = [
                Kept(g.task, g.node_id, g.meta, g.filtered, StoredPayload(read, g.location)) for g in groups
            ]
        self._accepted.update(snapshot.accepted)
        self.reporter.restore(snapshot.learner, snapshot.replaced_learners)
        self.reporter.job_ended = snapshot.job_ended
        for node in snapshot.nodes:
            self.nodes.join(node.report, self.clock()).has_leased = node.has_leased
        self.owners.keys.update(snapshot.owners)
        self.apply(snapshot.marks, None)
        self.apply(snapshot.statistics, None)

    def apply(self, move: records.AnyMove, stored: StoredPayload | None) -> None:
        """Do what was recorded. Raises KeyError, IndexError or ValueError when it does not fit the state."""
        table = self.table
        if isinstance(move, records.Offered):
            table.add(move.task)
        elif isinstance(move, records.Leased):
            self._apply_lease(move)
        elif isinstance(move, records.Accepted):
            self._apply_accepted(move, stored)
        elif isinstance(move, records.HandedBack):
            table.hand_back(table.leased[move.token])
        elif isinstance(move, records.Lost):
            table.lose(table.leased[move.token], move.reason, move.max_attempts, move.spared)
        elif isinstance(move, records.Taken):
            if table.ready[: len(move.serials)] != move.serials:
                raise ValueError(f"step {move.step} took {move.serials}, ready are {table.ready[: len(move.serials)]}")
            table.take_oldest(move.step, len(move.serials))
        elif isinstance(move, records.Filtered):
            table.filter(table.living[move.serial], move.most_replaced)
        elif isinstance(move, records.GivenUp):
            table.give_up(table.living[move.serial])
        elif isinstance(move, records.Committed):
            highest = max(table.steps, default=self.committed_step)
            table.commit(move.step)
            self.committed_step = max(self.committed_step, min(move.step, highest))
        elif isinstance(move, records.Marks):
            self._first_step, self.committed_step = move.first_step, move.committed_step
        else:
            self._apply_about_others(move)

    def ready_again(self) -> None:
        """After the last move: leases and nodes begin anew, now."""
        now = self.clock()
        self.learner.seen(now)
        for token, entry in self.table.leased.items():
            entry.leased_at, entry.deadline = now, now + min(self.run.lease_s, self.run.max_lease_s)
            self._lease_deadlines.add(token, entry.deadline)
            node = self.fleet.nodes.get(entry.node)
            if node is not None:
                node.tokens.add(token)
        self._unconfirmed = set(self.table.leased)
        self.lease_revision += 1

    def _apply_lease(self, move: records.Leased) -> None:
        entry = self.table.lease_oldest(move.node, move.token, 0.0, 0.0)
        if entry.serial != move.serial:
            raise ValueError(f"task {move.serial} was leased, the oldest pending one is {entry.serial}")
        if move.node in self.fleet.nodes:
            self.fleet.nodes[move.node].has_leased = True

    def _apply_accepted(self, move: records.Accepted, stored: StoredPayload | None) -> None:
        entry = self.table.leased[move.token]
        if stored is None or stored.location is None:
            raise ValueError(f"the group of task {entry.serial} has no payload")
        self._remember(move.token, entry.node)
        self.table.accept(entry, move.meta, stored, stored.location.length)

    def _apply_about_others(self, move: records.AnyMove) -> None:
        if isinstance(move, records.Reported):
            self.reporter.replay(move.report)
        elif isinstance(move, records.Joined):
            self.nodes.join(move.report, self.clock()).tokens.clear()
        elif isinstance(move, records.Left):
            self.nodes.leave(move.node_id)
        elif isinstance(move, records.Owned):
            self.owners.keys[move.node_id] = move.public
        elif isinstance(move, records.Statistics):
            self._apply_statistics(move)
        elif isinstance(move, records.Closed):
            self.reporter.job_ended = True

    def _apply_statistics(self, counts: records.Statistics) -> None:
        self.lease_expiries, self.stale_results = counts.lease_expiries, counts.stale_results
        self.nodes.past = (counts.past_generated, dict(counts.past_wasted))
        for name, counted in counts.nodes.items():
            if name in self.fleet.nodes:
                node = self.fleet.nodes[name]
                node.handed_in, node.counted = counted.handed_in, dict(counted.counted)
        self.event_log.next_index = max(self.event_log.next_index, counts.next_event)


class Captured:
    """A state as it was, on its way to a snapshot; made by the broker's loop, finished by the store's thread."""

    def __init__(self, state: DurableState) -> None:
        table = state.table
        self._tasks = table.saved()
        self._kept = {step: list(groups) for step, groups in table.kept.items()}
        passed, passed_gone, groups, size = table.describe()
        self.finished = [table.history.get(serial) for serial in table.finished]
        table.finished = []
        self._base = records.Snapshot(
            schema=records.SCHEMA,
            next_serial=table.next_serial,
            tasks=[],
            steps={step: list(serials) for step, serials in table.steps.items()},
            replaced=dict(table.replaced),
            passed=passed,
            filtered=table.filtered,
            accepted=state.accepted,
            kept={},
            learner=state.learner.report,
            replaced_learners=state.reporter.replaced,
            job_ended=state.reporter.job_ended,
            nodes=[records.SavedNode(n.report, n.has_leased) for n in state.fleet.nodes.values()],
            marks=state.marks(),
            statistics=state.statistics(),
            accepted_groups=groups,
            accepted_bytes=size,
            owners=dict(state.owners.keys),
            passed_gone=passed_gone,
        )

    def snapshot(self, history_bytes: int) -> records.Snapshot:
        """The record, once all that was recorded before has been written."""
        return msgspec.structs.replace(
            self._base,
            tasks=[
                task if stored is None else msgspec.structs.replace(task, location=stored.location)
                for task, stored in self._tasks
            ],
            kept={step: [_kept(group) for group in groups] for step, groups in self._kept.items()},
            history_bytes=history_bytes,
        )

    def locations(self) -> list[Location]:
        """Where the groups lie that may still be wanted."""
        stored = [s for _, s in self._tasks if s is not None] + [
            k.stored for groups in self._kept.values() for k in groups
        ]
        return [s.location for s in stored if s.location is not None]


def _kept(group: Kept) -> records.KeptGroup:
    location = group.stored.location
    assert location is not None
    return records.KeptGroup(group.task, group.node_id, group.meta, group.filtered, location)
