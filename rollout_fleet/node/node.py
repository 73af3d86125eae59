"""The node loop: lease, roll out, hand in, until told to stop.

    broker --leases--> groups --episodes--> engine          heartbeat thread --renewals--> broker
       ^                  |                    ^                    |
       +---- complete ----+                    +-- weight feed <----+ learner's address

The loop waits for one of: free room in the engine (an episode ends), a task (the broker answers), a new policy version
(the feed says so), a reason to stop (signal, finished learner, failed proof, dead engine, lost broker).

The engine stays full: what counts are episodes that run or wait for a place, not groups, so a group of which one long
episode is left holds one place and no more. Tasks are leased a little ahead of need, and the samples of a group start
one after another, so that all but the first find the prompt in the engine's prefix cache.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from broker.contract import HeartbeatReply, Lease, NodeBroker, RunInfo
from broker.diagnosis.join_times import sentence
from common.errors import EXIT_DONE, EXIT_FAILED, BrokerError, BrokerUnreachable, SlipstreamError
from common.rollouts import encode_group
from rollout_fleet.episode.concurrency import AdaptiveLimit, pressure
from rollout_fleet.episode.group_runner import GroupProgress, GroupRunner, RolledOut
from rollout_fleet.episode.sampler_protocol import EngineCounters, WeightFeed
from rollout_fleet.node.broker_timeout import Patience
from rollout_fleet.node.group_progress import oldest_work
from rollout_fleet.node.node_status import Board, explain

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOKAHEAD_GROUPS = 2  # leased beyond what runs
LEASE_AT_ONCE = 4  # groups per request, so that nodes which ask at the same time share a window
LEASE_WAIT_S = 1.0
MEASURE_S = 0.2
RETRY_S = 0.5
ADAPT_S = 1.0  # between looks at the pressure on the KV cache


@dataclass(eq=False)
class Running:
    """A lease that this node works on."""

    lease: Lease
    progress: GroupProgress = field(default_factory=GroupProgress)
    task: "asyncio.Task[None] | None" = None
    handing_in: bool = False

    @property
    def unfinished(self) -> int:
        """Episodes that run or wait for a place."""
        return 0 if self.handing_in else self.lease.task.group_size - self.progress.finished


@dataclass(frozen=True)
class NodeParts:
    """What a node is made of; see rollout_fleet/main.py for the real ones."""

    broker: NodeBroker
    feed: WeightFeed
    runner: GroupRunner
    board: Board
    patience: Patience
    counters: Callable[[], EngineCounters]
    beat_now: Callable[[], None]
    adapt: AdaptiveLimit | None = None  # None: the runner's limit stays


class Node:
    """One node between registering and leaving; belongs to one event loop."""

    def __init__(self, parts: NodeParts, run: RunInfo, drain_s: float = 10.0) -> None:
        """`drain_s` bounds how long a signalled drain waits for groups that run."""
        self._parts, self._run_info = parts, run
        self._drain_s = drain_s
        self._adapt_at = 0.0
        self._running: dict[str, Running] = {}
        self._room = asyncio.Event()  # an episode ended, or the loop has to look
        parts.runner.on_episode_end = self._room.set
        self._interrupt = asyncio.Event()  # a waiting lease request is out of date
        self._learner: int | None = None  # incarnation of the attached learner
        self._leased_before = False
        self._group_size = 1  # of the newest task; a node that ran dry must not ask as if groups were single episodes
        self._drain_reason: str | None = None
        self._abandon = False
        self._fatal: SlipstreamError | None = None

    # ---------------------------------------------------------------- from outside, in the node's event loop

    def request_drain(self, reason: str, abandon: bool = False) -> None:
        """Stop leasing and come to an end; `abandon` gives running groups back at once."""
        if self._drain_reason is None:
            logger.info("draining: %s", reason)
            self._drain_reason = reason
        self._abandon |= abandon
        self._wake()

    def fail(self, error: SlipstreamError) -> None:
        """End with exit code 1 because of `error`."""
        self._fatal = self._fatal or error
        self._wake()

    def on_heartbeat(self, reply: HeartbeatReply) -> None:
        """React to the broker's answer."""
        learner = reply.learner_incarnation if reply.weights_address else None
        if learner != self._learner:
            self._learner = learner
            self._wake()
        self._parts.feed.follow(reply.weights_address, reply.learner_incarnation)
        for token in reply.lost:
            running = self._running.get(token)
            if running is not None and running.task is not None and not running.handing_in:
                logger.warning("lease of task %d is lost; its episodes are cancelled", running.lease.task.serial)
                running.progress.lost = True
                running.task.cancel()
        if reply.drain and self._drain_reason is None:
            self.request_drain("the learner is done", abandon=True)

    # ---------------------------------------------------------------- the loop

    async def run(self) -> int:
        """Work until drained (0) or quarantined (1).

        Raises:
            SlipstreamError: the engine died, or the broker stayed away too long.
        """
        watcher = asyncio.create_task(self._watch())
        try:
            while self._drain_reason is None and self._parts.feed.state.quarantined is None:
                await self._raise_fatal()
                await self._turn()
            reason = self._parts.feed.state.quarantined
            return await (self._quarantine(reason) if reason is not None else self._drain())
        finally:
            watcher.cancel()
            await self._end_groups()
            self._measure()

    async def _turn(self) -> None:
        """One round: lease what fits, or wait for what is missing."""
        self._room.clear()
        self._interrupt.clear()
        wanted = self._groups_wanted()
        if wanted <= 0 or not self._may_lease():
            await self._room.wait()
            return
        for lease in await self._lease(min(wanted, LEASE_AT_ONCE)):
            self._start(lease)

    def _may_lease(self) -> bool:
        weights = self._parts.feed.state
        return weights.version >= 0 and self._learner in (None, weights.incarnation)

    def _groups_wanted(self) -> int:
        size = self._group_size
        held = sum(r.unfinished for r in self._running.values())
        return (self._parts.runner.places.limit + LOOKAHEAD_GROUPS * size - held) // size

    async def _lease(self, count: int) -> list[Lease]:
        """Ask the broker; a new policy version or a drain withdraws the question."""
        parts = self._parts
        question = asyncio.ensure_future(
            parts.broker.lease(parts.board.node_id, parts.feed.state.version, count, LEASE_WAIT_S)
        )
        interrupted = asyncio.ensure_future(self._interrupt.wait())
        try:
            await asyncio.wait({question, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not question.done():
                return []
            leases = question.result()
        except BrokerUnreachable as error:
            await self._broker_silent(error)
            return []
        except BrokerError as error:
            await self._register_again(error)
            return []
        finally:
            interrupted.cancel()
            question.cancel()
        parts.patience.answered()
        return leases

    def _start(self, lease: Lease) -> None:
        self._leased_before = True
        self._group_size = lease.task.group_size
        self._parts.board.arrival.reached("leased")
        running = Running(lease)
        self._running[lease.token] = running
        running.task = asyncio.create_task(self._work(running), name=f"group {lease.task.serial}")
        self._measure()

    async def _work(self, running: Running) -> None:
        """One lease from start to hand-in; what it sampled in vain is counted (docs/waste.md)."""
        lease, parts = running.lease, self._parts
        try:
            done = await parts.runner.run(lease.task, running.progress)
            running.handing_in = True
            await self._hand_in(lease, done)
        except (asyncio.CancelledError, SlipstreamError) as error:
            progress = running.progress
            parts.board.cancelled(progress.sampled_tokens, 0.0 if progress.lost else progress.seconds())
            if isinstance(error, asyncio.CancelledError):
                raise
            self.fail(error)
        finally:
            self._running.pop(lease.token, None)
            self._room.set()

    async def _hand_in(self, lease: Lease, done: RolledOut) -> None:
        parts = self._parts
        if done.failure is not None:
            await self._give_up(lease, done, done.failure)
            return
        payload = encode_group(done.group)
        try:
            accepted = await self._call(
                lambda: parts.broker.complete(parts.board.node_id, lease.token, done.meta, payload)
            )
        except BrokerError as error:
            await self._give_up(lease, done, str(error))
            return
        if not accepted:  # the broker counts its tokens as wasted
            logger.warning("the group of task %d came too late and was refused", lease.task.serial)
        elif parts.board.arrival.reached("delivered"):
            times = parts.board.arrival.times
            logger.info("%s; the process started at Unix time %.3f", sentence(times), times.started_s)
            parts.beat_now()

    async def _give_up(self, lease: Lease, done: RolledOut, reason: str) -> None:
        """Tell the broker that a group failed, and what it took; it counts as an attempt."""
        logger.warning("task %d failed: %s", lease.task.serial, reason)
        node_id, spent = self._parts.board.node_id, done.meta
        await self._call(
            lambda: self._parts.broker.fail(
                node_id, lease.token, reason, spent.sampled_tokens, max(0.0, spent.generation_s)
            )
        )

    async def _call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until the broker answers or patience ends (BrokerLost)."""
        while True:
            try:
                answer = await request()
            except BrokerUnreachable as error:
                await self._broker_silent(error)
                continue
            self._parts.patience.answered()
            return answer

    async def _broker_silent(self, error: BrokerUnreachable) -> None:
        logger.warning("%s; trying again", error)
        self._parts.patience.failed(error)
        await asyncio.sleep(RETRY_S)

    async def _register_again(self, error: BrokerError) -> None:
        logger.warning("the broker refused a lease (%s); registering again", error)
        await asyncio.sleep(RETRY_S)
        await self._call(lambda: self._parts.broker.register(self._parts.board.report()))

    # ---------------------------------------------------------------- the end

    async def _drain(self) -> int:
        """Give back what has not started, let the rest finish within the bound, give back what is left."""
        self._parts.board.show("draining", f"running groups ({self._drain_reason})")
        self._parts.beat_now()
        await self._give_back([r for r in self._running.values() if not r.progress.started])
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._running and not self._abandon and self._fatal is None:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), left_s)
        await self._give_back(list(self._running.values()))
        return EXIT_DONE

    async def _quarantine(self, reason: str) -> int:
        """The engine may not generate any more: stop, give everything back, say why."""
        logger.error("quarantined: %s", reason)
        self._parts.board.show("quarantined", reason)
        await self._give_back(list(self._running.values()))
        self._parts.beat_now()
        await asyncio.sleep(RETRY_S)  # a heartbeat carries the reason before the node leaves
        return EXIT_FAILED

    async def _give_back(self, groups: list[Running]) -> None:
        """Cancel these and release their leases; groups that are being handed in end by themselves."""
        groups = [r for r in groups if not r.handing_in and r.task is not None]
        for running in groups:
            running.task.cancel()  # type: ignore[union-attr]
        await asyncio.gather(*(r.task for r in groups if r.task is not None), return_exceptions=True)
        if not groups:
            return
        tokens = [r.lease.token for r in groups]
        logger.info("releasing %d leases", len(tokens))
        try:
            await self._parts.broker.release(self._parts.board.node_id, tokens)
        except SlipstreamError as error:
            logger.warning("leases run out by themselves: %s", error)

    async def _end_groups(self) -> None:
        """Give back what runs; groups that are being handed in get the drain's time, then they are cancelled."""
        await self._give_back(list(self._running.values()))
        tasks = [r.task for r in self._running.values() if r.task is not None]
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=self._drain_s)
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------- watching

    async def _watch(self) -> None:
        """Keep the board current, and wake the loop when the weights change."""
        before = self._parts.feed.state
        while True:
            state = await self._parts.feed.wait_change(MEASURE_S)
            if state is not before:
                before = state
                self._wake()
            self._measure()

    def _measure(self) -> None:
        parts = self._parts
        self._adjust()
        running = list(self._running.values())
        parts.board.measure(parts.feed.state, parts.counters(), list(self._running), parts.runner.episodes_running)
        parts.board.work(oldest_work(running), parts.runner.places.limit)
        if self._drain_reason is None:
            episodes = parts.runner.episodes_running
            starting = sum(r.progress.starting for r in running)
            state = explain(parts.feed.state, self._learner, episodes, starting, self._leased_before, self._run_info)
            parts.board.show(*state)

    def _adjust(self) -> None:
        """Follow the pressure on the KV cache, now and then."""
        adapt, places, now = self._parts.adapt, self._parts.runner.places, time.monotonic()
        if adapt is None or now < self._adapt_at:
            return
        self._adapt_at = now + ADAPT_S
        limit = adapt.look(pressure(self._parts.counters(), now), places.taken)
        if limit != places.limit:
            places.resize(limit)
            self._room.set()

    async def _raise_fatal(self) -> None:
        if self._fatal is not None:
            state = self._parts.feed.state
            if state.quarantined is None:  # an engine that refuses may do so because its proof just failed
                state = await self._parts.feed.wait_change(RETRY_S)
            if state.quarantined is None:
                raise self._fatal

    def _wake(self) -> None:
        self._interrupt.set()
        self._room.set()
