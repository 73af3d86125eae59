"""The leases that a node works on, each from its start until the broker has its group or has the lease back."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.contract import Lease
from broker.diagnosis.join_times import sentence
from broker.messaging.client_methods import NodeBroker
from common.errors import BrokerError, SlipstreamError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Group, encode_group
from common.span_buffer import SPANS
from rollout_fleet.episode.group_runner import GroupProgress, GroupRunner, RolledOut
from rollout_fleet.episode.sampler_protocol import EngineCounters
from rollout_fleet.node.broker_timeout import RETRY_S, BrokerTimeout
from rollout_fleet.node.node_status import OwnStatus

if TYPE_CHECKING:  # `plan` imports this room without torch
    from common.weights.receive.node_client import WeightClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeParts:
    """The parts of a node; rollout_fleet/main.py builds the real ones."""

    broker: NodeBroker
    feed: "WeightClient"
    runner: GroupRunner
    status: OwnStatus
    timeout: BrokerTimeout
    counters: Callable[[], EngineCounters]
    beat_now: Callable[[], None]
    transcribe: Callable[[Group], bytes] | None = None  # a failed group's transcript; None: none are kept


@dataclass(eq=False)
class _Running:
    lease: Lease
    progress: GroupProgress
    task: "asyncio.Task[None]"
    handing_in: bool = False


class RunningGroups:
    """Rolls out leased tasks and hands them in. Belongs to one event loop."""

    def __init__(self, parts: NodeParts, on_end: Callable[[], None], fail: Callable[[SlipstreamError], None]) -> None:
        """`on_end` is called when a group ends for any reason, `fail` when the engine or the broker failed."""
        self._parts, self._on_end, self._fail, self._node_id = parts, on_end, fail, parts.status.node_id
        self._running: dict[str, _Running] = {}
        self._evaluated_tokens = 0  # sampled for held-out problems that ended

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def tokens(self) -> list[str]:
        return list(self._running)

    @property
    def progress(self) -> list[GroupProgress]:
        return [running.progress for running in self._running.values()]

    @property
    def evaluation_tokens(self) -> int:
        """Sampled for held-out problems so far."""
        return self._evaluated_tokens + sum(p.sampled_tokens for p in self.progress if p.evaluation)

    @property
    def unfinished(self) -> int:
        """Episodes that run or wait for a slot."""
        groups = [r for r in self._running.values() if not r.handing_in]
        return sum(r.lease.task.group_size - r.progress.finished for r in groups)

    def start(self, lease: Lease) -> None:
        progress = GroupProgress(lease.task, evaluation=lease.evaluation)
        task = asyncio.create_task(self._work(lease, progress), name=f"group {lease.task.serial}")
        self._running[lease.token] = _Running(lease, progress, task)

    def lost(self, token: str) -> None:
        """The broker gave this task to another node."""
        running = self._running.get(token)
        if running is not None and not running.handing_in:
            logger.warning("lease of task %d is lost; its episodes are cancelled", running.lease.task.serial)
            running.progress.lost = True
            running.task.cancel()

    async def give_back(self, unstarted_only: bool = False) -> None:
        """Cancel groups and release their leases. Groups that are being handed in end by themselves."""
        groups = [r for r in self._running.values() if not r.handing_in]
        groups = [r for r in groups if r.progress.started_at is None or not unstarted_only]
        for running in groups:
            running.task.cancel()
        await asyncio.gather(*(r.task for r in groups), return_exceptions=True)
        if not groups:
            return
        logger.info("releasing %d leases", len(groups))
        try:
            await self._parts.broker.release(self._node_id, [r.lease.token for r in groups])
        except SlipstreamError as error:
            logger.warning("leases run out by themselves: %s", error)

    async def end(self, limit_s: float) -> None:
        """Give back what runs. Groups that are being handed in get `limit_s`, then they are cancelled."""
        await self.give_back()
        tasks = [r.task for r in self._running.values()]
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=limit_s)
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, lease: Lease, progress: GroupProgress) -> None:
        """One lease from start to hand-in; wasted tokens are counted (docs/waste.md)."""
        accepted = False
        try:
            done = await self._parts.runner.run(progress) if self._fits(lease.evaluation) else None
            self._running[lease.token].handing_in = True
            if done is None or not self._fits(lease.evaluation):
                await self._parts.timeout.repeat(lambda: self._parts.broker.release(self._node_id, [lease.token]))
                await asyncio.sleep(RETRY_S)  # the broker may not know the version yet, and would lease it again
            else:
                hand_in = self._hand_in if lease.evaluation is None else self._hand_in_evaluation
                accepted = await hand_in(lease, done)
        except (asyncio.CancelledError, SlipstreamError) as error:
            if lease.evaluation is None:
                self._parts.status.cancelled(progress.sampled_tokens, 0.0 if progress.lost else progress.seconds())
            if isinstance(error, asyncio.CancelledError):
                raise
            self._fail(error)
        finally:
            self._running.pop(lease.token, None)
            facts = {**progress.facts, "attempt": lease.attempt, "accepted": int(accepted)}
            SPANS.add(f"group {lease.task.serial}", "lease", progress.leased_at, track=f"groups/{lease.token}", **facts)
            self._evaluated_tokens += progress.sampled_tokens if lease.evaluation else 0
            self._on_end()

    async def _hand_in(self, lease: Lease, done: RolledOut) -> bool:
        """Whether the broker accepted the group."""
        parts = self._parts
        if done.failure is not None:
            return await self._give_up(lease, done, done.failure)
        work = self._node_id, lease.token, done.meta, encode_group(done.group)
        try:
            accepted = await parts.timeout.repeat(lambda: parts.broker.complete(*work))
        except BrokerError as error:
            return await self._give_up(lease, done, str(error))
        if not accepted:  # the broker counts its tokens as wasted
            logger.warning("the group of task %d came too late and was refused", lease.task.serial)
        elif parts.status.joining.reached("delivered"):
            times = parts.status.joining.times
            logger.info("%s; the process started at Unix time %.3f", sentence(times), times.started_s)
            parts.beat_now()
        return accepted

    def _fits(self, order: EvaluationOrder | None) -> bool:
        """Whether the engine's weights are the ones that a round is about; always without a round."""
        weights = self._parts.feed.state
        return order is None or (weights.version, weights.incarnation) == (order.version, order.incarnation)

    async def _hand_in_evaluation(self, lease: Lease, done: RolledOut) -> bool:
        """Whether the broker accepted the samples of a held-out problem."""
        broker, work = self._parts.broker, (self._node_id, lease.token, result_of(done, self._node_id))
        try:
            accepted = await self._parts.timeout.repeat(lambda: broker.complete_evaluation(*work))
        except BrokerError as error:
            return await self._give_up(lease, done, str(error))
        if not accepted:
            logger.warning("the samples of held-out problem %d came too late and were refused", lease.task.serial)
        return accepted

    async def _give_up(self, lease: Lease, done: RolledOut, reason: str) -> bool:
        """Tell the broker that a group failed, and its cost; it counts as an attempt."""
        logger.warning("task %d failed: %s", lease.task.serial, reason)
        parts, transcript = self._parts, b""
        if parts.transcribe is not None and done.failure is not None:
            transcript = await asyncio.to_thread(parts.transcribe, done.group)
        cost = done.meta.sampled_tokens, max(0.0, done.meta.generation_s)
        await parts.timeout.repeat(lambda: parts.broker.fail(self._node_id, lease.token, reason, *cost, transcript))
        return False


def result_of(done: RolledOut, node_id: str) -> EvaluationResult:
    """The samples of a held-out problem, without their tokens."""
    samples, meta = done.group.samples, done.meta
    return EvaluationResult(
        problem=done.group.serial,
        rewards=[0.0 if s.error is not None else s.reward for s in samples],
        lengths=[int(s.loss_mask.numpy().sum()) for s in samples],
        stop_reasons=[s.stop_reason for s in samples],
        errors=[s.error or "" for s in samples],
        node_id=node_id,
        version_min=meta.version_min,
        version_max=meta.version_max,
        started_s=time.time() - meta.generation_s,
        seconds=meta.generation_s,
    )
