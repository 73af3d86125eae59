"""The node loop: lease, roll out, hand in, until told to stop.

    broker --leases--> groups --episodes--> engine          heartbeat thread --renewals--> broker
       ^                  |                    ^                    |
       +---- complete ----+                    +-- weight feed <----+ learner's address

The loop waits for the end of an episode, for a task, for a new policy version or for a reason to stop.

The loop counts episodes that run or wait for a slot, not groups: a group with one long episode left takes one slot. So
the engine stays full. Tasks are leased a little ahead of need. The samples of a group start one after another, so that
all but the first find the prompt in the engine's prefix cache.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from broker.contract import HeartbeatReply, Lease
from common.errors import EXIT_DONE, EXIT_FAILED, BrokerError, BrokerUnreachable, SlipstreamError
from common.waits import WaitFor, WaitKind
from rollout_fleet.episode.concurrency import AdaptiveLimit
from rollout_fleet.node.heartbeat import RETRY_S
from rollout_fleet.node.node_status import explain
from rollout_fleet.node.running_groups import NodeParts, RunningGroups

logger = logging.getLogger(__name__)

LOOKAHEAD_GROUPS = 2  # leased beyond what runs
LEASE_AT_ONCE = 4  # groups per request, so that nodes which ask at the same time share a window
LEASE_WAIT_S = 30.0  # a waiting node costs the broker little; a new version or a drain withdraws the question
MEASURE_S = 0.2
ADAPT_S = 1.0  # between looks at the pressure on the KV cache
REPORTED = 8  # groups in a heartbeat, the oldest ones


class Node:
    """One node between registering and leaving; belongs to one event loop."""

    def __init__(
        self, parts: NodeParts, make_limit: Callable[[], AdaptiveLimit | None] = lambda: None, drain_s: float = 10.0
    ) -> None:
        """It may be made before the engine is up; until `run` it only takes note of a drain or a failure.

        `make_limit` makes the limit that follows the engine's load, once the engine is up; None: the limit is fixed.
        `drain_s` bounds how long a signalled drain waits for groups that run.
        """
        self._parts = parts
        self._drain_s = drain_s
        self._make_limit = make_limit
        self._limit: AdaptiveLimit | None = None
        self._adapt_at = 0.0
        self._room = asyncio.Event()  # an episode ended, or the loop has to look
        self._interrupt = asyncio.Event()  # a waiting lease request is out of date
        self.groups = RunningGroups(parts, self._room.set, self.fail)
        self._working = False
        self._paused = False  # as the loop last saw its driver
        self._learner: int | None = None  # incarnation of the attached learner
        self._leased_before = False
        self._group_size = 1  # the newest task's, so that an idle node does not ask as if groups were single episodes
        self._drain_reason: str | None = None
        self._abandon = False
        self._fatal: SlipstreamError | None = None
        self.stopping = asyncio.Event()  # a drain was asked for, or something failed

    def request_drain(self, reason: str, abandon: bool = False) -> None:
        """Stop leasing and come to an end; `abandon` gives running groups back at once."""
        if self._drain_reason is None:
            logger.info("draining: %s", reason)
            self._drain_reason = reason
        self._abandon |= abandon
        self.stopping.set()
        self._wake()

    def fail(self, error: SlipstreamError) -> None:
        """End with exit code 1 because of `error`."""
        self._fatal = self._fatal or error
        self.stopping.set()
        self._wake()

    def on_heartbeat(self, reply: HeartbeatReply) -> None:
        if reply.stop:
            self.request_drain("slipstream stop")
        if not self._working:
            return
        learner = reply.learner_incarnation if reply.weights_address else None
        if learner != self._learner:
            self._learner = learner
            self._wake()
        self._parts.feed.follow(reply.weights_address, reply.learner_incarnation)
        for token in reply.lost:
            self.groups.lost(token)
        if reply.drain and self._drain_reason is None:
            self.request_drain("the learner is done", abandon=True)

    async def run(self) -> int:
        """Work until drained (0) or excluded (1); raises SlipstreamError when engine or broker are lost."""
        self._working = True
        if not self.stopping.is_set():  # otherwise there may be no engine that the limit could follow
            self._limit = self._make_limit()
        if self._limit is not None:
            self.groups.slots.resize(self._limit.limit)
        self._parts.beat_now()  # the answer has the learner's address
        watcher = asyncio.create_task(self._watch())
        try:
            while self._drain_reason is None and self._parts.feed.state.excluded is None:
                if self._fatal is None:
                    await self._turn()
                elif (await self._parts.feed.wait_change(RETRY_S)).excluded is None:
                    raise self._fatal  # no proof failed, which may also let an engine refuse
            reason = self._parts.feed.state.excluded
            return await (self._exclude(reason) if reason is not None else self._drain())
        finally:
            watcher.cancel()
            await self.groups.end(self._drain_s)
            self._measure()

    async def _turn(self) -> None:
        """Lease as many tasks as fit, or wait for the event that is missing."""
        self._room.clear()
        self._interrupt.clear()
        size = self._group_size
        weights = self._parts.feed.state
        wanted = (self.groups.slots.limit + LOOKAHEAD_GROUPS * size - self.groups.unfinished) // size
        self._paused = bool(self._parts.paused)
        unready = weights.version < 0 or self._learner not in (None, weights.incarnation)
        if wanted <= 0 or unready or self._paused:
            await self._room.wait()
            return
        for lease in await self._lease(min(wanted, LEASE_AT_ONCE)):
            self._leased_before = True
            self._group_size = lease.task.group_size
            self._parts.status.joining.reached("leased")
            self.groups.start(lease)
            self._measure()

    async def _lease(self, count: int) -> list[Lease]:
        """Ask the broker; a new policy version or a drain withdraws the question."""
        parts = self._parts
        asked = parts.broker.lease(parts.status.node_id, parts.feed.state.version, count, LEASE_WAIT_S)
        question = asyncio.ensure_future(asked)
        interrupted = asyncio.ensure_future(self._interrupt.wait())
        try:
            await asyncio.wait({question, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not question.done():
                return []
            leases = question.result()
        except BrokerUnreachable as error:
            await parts.timeout.retry_later(error)
            return []
        except BrokerError as error:
            logger.warning("the broker refused a lease (%s); registering again", error)
            await asyncio.sleep(RETRY_S)
            await parts.timeout.repeat(lambda: parts.broker.register(parts.status.report()))
            return []
        finally:
            interrupted.cancel()
            question.cancel()
        parts.timeout.answered()
        return leases

    async def _drain(self) -> int:
        """Give back the tasks not started, let the others finish within the bound, then give back the rest."""
        self._parts.status.show("draining", WaitFor(WaitKind.RUNNING_GROUPS, cause=self._drain_reason or ""))
        self._parts.beat_now()
        await self.groups.give_back(unstarted_only=True)
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self.groups and not self._abandon and self._fatal is None:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), left_s)
        await self.groups.give_back()
        return EXIT_DONE

    async def _exclude(self, reason: str) -> int:
        """The engine may not generate any more: stop, give everything back, say why."""
        logger.error("excluded: %s", reason)
        self._parts.status.show("excluded", WaitFor(WaitKind.REPAIR, cause=reason))
        await self.groups.give_back()
        self._parts.beat_now()
        await asyncio.sleep(RETRY_S)  # a heartbeat carries the reason before the node leaves
        return EXIT_FAILED

    async def _watch(self) -> None:
        """Keep the status current, and wake the loop when the policy changes."""
        before = self._parts.feed.state
        try:
            while True:
                state = await self._parts.feed.wait_change(MEASURE_S)
                other = (state.version, state.incarnation) != (before.version, before.incarnation)
                if other or state.excluded or bool(self._parts.paused) is not self._paused:
                    self._wake()
                before = state
                self._measure()
        except Exception as error:  # heartbeats would go on with figures that stand still, and leases would run out
            logger.exception("the node's status cannot be measured")
            self.fail(SlipstreamError(f"the node's status cannot be measured: {error!r}"))

    def _measure(self) -> None:
        groups = self.groups
        status = self._parts.status
        weights = self._parts.feed.state
        now = time.monotonic()
        self._adjust(now)
        oldest = [group.report(now) for group in sorted(groups, key=lambda group: group.leased_at)[:REPORTED]]
        status.measure(weights, self._parts.counters, groups.tokens, groups.evaluation_tokens)
        status.work(groups.episodes_running, oldest, groups.slots.limit)
        if self._drain_reason is None:
            state, wait = explain(
                weights,
                learner=self._learner,
                episodes=groups.episodes_running,
                starting=sum(group.starting for group in groups),
                leased=self._leased_before,
                pool=status.pool,
                paused=self._parts.paused,
            )
            status.show(state, wait)
        status.turned()

    def _adjust(self, now: float) -> None:
        """Follow the pressure on the KV cache, now and then."""
        slots = self.groups.slots
        if self._limit is None or now < self._adapt_at:
            return
        self._adapt_at = now + ADAPT_S
        limit = self._limit.look(self._parts.counters, now, slots.taken)
        if limit != slots.limit:
            slots.resize(limit)
            self._room.set()

    def _wake(self) -> None:
        self._interrupt.set()
        self._room.set()
