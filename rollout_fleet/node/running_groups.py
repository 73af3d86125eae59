"""The leases that a node works on, each from its start until the broker has its group or has the lease back.

Lease --> RunningGroup: one episode per sample --> CompletedGroup --> complete, or fail if every sample failed
              |
              +-- lost, drained, or meant for other weights --> release
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from broker.client.calls import NodeBroker
from broker.contract import GroupWork, Lease
from common.errors import BrokerError, SlipstreamError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Group, GroupMeta, Sample, Task, encode_group
from common.span_buffer import SPANS
from rollout_fleet.episode.concurrency import Slots
from rollout_fleet.episode.driver import EpisodeDriver, Progress, whole
from rollout_fleet.episode.sampler_protocol import EngineCounters
from rollout_fleet.node.heartbeat import RETRY_S, BrokerTimeout
from rollout_fleet.node.node_status import NodeStatusTracker

if TYPE_CHECKING:  # importing it takes torch
    from common.weights.receive.weight_client import WeightClient

logger = logging.getLogger(__name__)

NO_SAMPLES = GroupMeta(version_min=-1, version_max=-1, reward_mean=0.0, sampled_tokens=0)


@dataclass(frozen=True)
class NodeParts:
    """The parts of a node; rollout_fleet/main.py builds the real ones."""

    broker: NodeBroker
    feed: "WeightClient"
    drivers: Mapping[str, EpisodeDriver]  # one for each source; '' names the only one
    concurrency: int  # episodes at once, to begin with
    status: NodeStatusTracker
    timeout: BrokerTimeout
    counters: EngineCounters
    beat_now: Callable[[], None]
    transcribe: Callable[[Group], bytes] | None = None  # a failed group's transcript; None: none are kept

    @property
    def paused(self) -> str:
        """Why no episode should begin now; '' when all is well."""
        return next(filter(None, (driver.paused for driver in self.drivers.values())), "")


@dataclass(frozen=True)
class CompletedGroup:
    """A group whose episodes have all ended; `failure` is set when every one of its samples failed."""

    group: Group
    meta: GroupMeta
    failure: str | None = None

    @classmethod
    def of(cls, task: Task, samples: list[Sample], generation_s: float) -> "CompletedGroup":
        """The group of `samples`, with the figures for the broker and the ledger."""
        good = [s for s in samples if s.error is None]
        # each run starts at a sampled token
        versions = [run.version for sample in samples for path in sample.paths for run in path.version_runs]
        meta = GroupMeta(
            version_min=min(versions, default=-1),
            version_max=max(versions, default=-1),
            reward_mean=sum(s.reward for s in good) / len(good) if good else 0.0,
            sampled_tokens=sum(s.sampled_all for s in samples),
            failed_samples=len(samples) - len(good),
            generation_s=generation_s,
        )
        failure = None if good else f"every sample failed, the first with {samples[0].stop_reason}: {samples[0].error}"
        return cls(Group(task.serial, samples, source=task.source), meta, failure)

    def evaluation_result(self, node_id: str) -> EvaluationResult:
        """The samples of a held-out problem, without their tokens."""
        samples = self.group.samples
        return EvaluationResult(
            problem=self.group.serial,
            rewards=[0.0 if s.error is not None else s.reward for s in samples],
            lengths=[s.sampled_all for s in samples],
            stop_reasons=[s.stop_reason for s in samples],
            errors=[s.error or "" for s in samples],
            node_id=node_id,
            version_min=self.meta.version_min,
            version_max=self.meta.version_max,
            started_s=time.time() - self.meta.generation_s,
            seconds=self.meta.generation_s,
        )


@dataclass(eq=False)
class RunningGroup:
    """A lease and its episodes. Its figures are also right when it is cancelled half-way."""

    lease: Lease
    leased_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # when its first episode began, monotonic seconds
    lost: bool = False  # the lease was lost, so the broker has counted its seconds
    handing_in: bool = False
    episodes: list[Progress] = field(default_factory=list)  # one per sample; empty before the group runs

    @property
    def sampled_tokens(self) -> int:
        """By calls of the model that ended."""
        return sum(episode.sampled_tokens for episode in self.episodes)

    @property
    def finished(self) -> int:
        return sum(episode.state == "done" for episode in self.episodes)

    @property
    def starting(self) -> int:
        """Episodes whose environment has not given its first observation."""
        return sum(episode.state == "environment" and not episode.turns for episode in self.episodes)

    @property
    def facts(self) -> dict[str, int]:
        """Arguments of its spans. A held-out problem has no serial, so no step is linked to it."""
        number = self.lease.task.serial
        order = self.lease.evaluation
        return {"serial": number} if order is None else {"problem": number, "version": order.version}

    def seconds(self) -> float:
        """Since its first episode began; 0 before."""
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def report(self, now: float) -> GroupWork:
        """For a heartbeat at `now` (monotonic seconds); about its oldest episode, those that wait for a slot last."""
        left = [e for e in self.episodes if e.state != "done"]
        running = [e for e in left if e.state != "queued"]
        after = "queued" if not self.episodes else "done" if self.handing_in else "scorer"  # where no episode is left
        last = Progress(state=after, since=max((e.since for e in self.episodes), default=now))
        oldest = min(running or left, key=lambda e: e.since, default=last)
        return GroupWork(
            serial=self.lease.task.serial,
            samples=self.lease.task.group_size,
            finished=self.finished,
            age_s=max(0.0, now - self.leased_at),
            tokens=self.sampled_tokens,
            turns=oldest.turns,
            episode_tokens=oldest.sampled_tokens,
            state=oldest.state,
            state_s=max(0.0, now - oldest.since),
            evaluates=self.lease.evaluation.version if self.lease.evaluation else -1,
        )


class RunningGroups:
    """Rolls out leased tasks and hands them in. Belongs to one event loop.

    Episodes start in the order in which their groups came, as many at a time as there are `slots`.
    """

    def __init__(self, parts: NodeParts, on_end: Callable[[], None], fail: Callable[[SlipstreamError], None]) -> None:
        """`on_end` is called when an episode or a group ends, `fail` when the engine or the broker failed."""
        self._parts = parts
        self._on_end = on_end
        self._fail = fail
        self._node_id = parts.status.node_id
        self._work_of: dict[RunningGroup, asyncio.Task[None]] = {}
        self._evaluated_tokens = 0  # sampled for held-out problems that ended
        self.slots = Slots(parts.concurrency)
        self.episodes_running = 0

    def __iter__(self) -> Iterator[RunningGroup]:
        return iter(self._work_of)

    def __len__(self) -> int:
        return len(self._work_of)

    @property
    def tokens(self) -> list[str]:
        return [group.lease.token for group in self]

    @property
    def evaluation_tokens(self) -> int:
        """Sampled for held-out problems so far."""
        return self._evaluated_tokens + sum(group.sampled_tokens for group in self if group.lease.evaluation)

    @property
    def unfinished(self) -> int:
        """Episodes that run or wait for a slot."""
        return sum(group.lease.task.group_size - group.finished for group in self if not group.handing_in)

    def start(self, lease: Lease) -> None:
        group = RunningGroup(lease)
        self._work_of[group] = work = asyncio.create_task(self._work(group), name=f"group {lease.task.serial}")
        work.add_done_callback(lambda _: self._ended(group))  # one that is cancelled before it begins runs nothing

    def _ended(self, group: RunningGroup) -> None:
        del self._work_of[group]
        self._evaluated_tokens += group.sampled_tokens if group.lease.evaluation else 0
        self._on_end()

    def lost(self, token: str) -> None:
        """The broker gave this task to another node."""
        for group in self:
            if group.lease.token == token and not group.handing_in:
                logger.warning("lease of task %d is lost; its episodes are cancelled", group.lease.task.serial)
                group.lost = True
                self._work_of[group].cancel()

    async def give_back(self, unstarted_only: bool = False) -> None:
        """Cancel groups and release their leases. Groups that are being handed in end by themselves."""
        cancelled = {
            group.lease.token: work
            for group, work in self._work_of.items()
            if not group.handing_in and (group.started_at is None or not unstarted_only)
        }
        for work in cancelled.values():
            work.cancel()
        await asyncio.gather(*cancelled.values(), return_exceptions=True)
        if not cancelled:
            return
        logger.info("releasing %d leases", len(cancelled))
        try:
            await self._parts.broker.release(self._node_id, list(cancelled))
        except SlipstreamError as error:
            logger.warning("leases run out by themselves: %s", error)

    async def end(self, limit_s: float) -> None:
        """Give back what runs. Groups that are being handed in get `limit_s`, then they are cancelled."""
        await self.give_back()
        works = list(self._work_of.values())
        if works:
            _, left = await asyncio.wait(works, timeout=limit_s)
            for work in left:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _work(self, group: RunningGroup) -> None:
        """One lease from start to hand-in; wasted tokens are counted (docs/waste.md)."""
        lease = group.lease
        accepted = False
        try:
            done = await self.roll_out(group) if self._fits(lease.evaluation) else None
            group.handing_in = True
            if done is None or not self._fits(lease.evaluation):
                await self._parts.timeout.repeat(lambda: self._parts.broker.release(self._node_id, [lease.token]))
                await asyncio.sleep(RETRY_S)  # the broker may not know the version yet, and would lease it again
            else:
                accepted = await self._hand_in(lease, done)
        except (asyncio.CancelledError, SlipstreamError) as error:
            if lease.evaluation is None:
                self._parts.status.cancelled(group.sampled_tokens, 0.0 if group.lost else group.seconds())
            if isinstance(error, asyncio.CancelledError):
                raise
            self._fail(error)
        except Exception as error:  # a fault of the program's; its lease would be renewed for ever
            logger.exception("the group of task %d", lease.task.serial)
            reason = whole(f"{type(error).__name__}: {error}")
            group.handing_in = True
            with suppress(SlipstreamError):  # an attempt counts, else the task would end one node after the other
                await self._failed(lease, reason, group.sampled_tokens, group.seconds())
            self._fail(SlipstreamError(f"the group of task {lease.task.serial}: {reason}"))
        finally:
            facts = {**group.facts, "attempt": lease.attempt, "accepted": int(accepted)}
            SPANS.add(f"group {lease.task.serial}", "lease", group.leased_at, track=f"groups/{lease.token}", **facts)

    def _fits(self, order: EvaluationOrder | None) -> bool:
        """Whether the engine's weights are those of the evaluation round; always outside a round."""
        weights = self._parts.feed.state
        return order is None or (weights.version, weights.incarnation) == (order.version, order.incarnation)

    async def roll_out(self, group: RunningGroup) -> CompletedGroup:
        """All samples of the group's task, whose figures are kept current.

        Raises SlipstreamError when the engine failed.
        """
        task = group.lease.task
        order = group.lease.evaluation
        try:
            problem = msgspec.json.decode(task.problem, type=dict[str, Any])
        except msgspec.DecodeError as error:
            reason = f"task {task.serial}: the problem is not a JSON object: {error}"
            return CompletedGroup(Group(task.serial, []), NO_SAMPLES, reason)
        driver = self._parts.drivers.get(task.source)
        if driver is None:
            reason = f"task {task.serial} is of the source {task.source!r}, which this node's config lacks"
            return CompletedGroup(Group(task.serial, []), NO_SAMPLES, reason)
        driver = driver if order is None else driver.at(order.temperature)
        group.episodes = [Progress(track=f"episodes/{task.serial}.{i}") for i in range(task.group_size)]
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [episodes.create_task(self._play(driver, group, problem, i)) for i in range(task.group_size)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        samples = [t.result() for t in tasks]
        if order is None:  # it trains
            samples = await driver.compared(samples, problem)
            for sample in samples:
                if sample.error is not None:
                    self._parts.status.sample_failed(sample.stop_reason)
        return CompletedGroup.of(task, samples, group.seconds())

    async def _play(self, driver: EpisodeDriver, group: RunningGroup, problem: dict[str, Any], index: int) -> Sample:
        task = group.lease.task
        episode = group.episodes[index]
        async with self.slots:
            began = time.monotonic()
            if group.started_at is None:
                group.started_at = began
            self.episodes_running += 1
            try:
                return await driver.run(problem, task.seed + index, episode, task.seed)
            finally:
                episode.at("done")
                name = f"episode {task.serial}.{index}"
                facts = {**group.facts, "sample": index, "turns": episode.turns, "tokens": episode.sampled_tokens}
                SPANS.add(name, "episode", began, episode.since, episode.track, **facts)
                self.episodes_running -= 1
                self._on_end()

    async def _hand_in(self, lease: Lease, done: CompletedGroup) -> bool:
        """Whether the broker accepted the group, or the result of a held-out problem."""
        parts = self._parts
        serial = lease.task.serial
        if lease.evaluation is None and done.failure is not None:
            return await self._give_up(lease, done, done.failure)
        try:
            if lease.evaluation is None:
                payload = encode_group(done.group)
                complete = partial(parts.broker.complete, self._node_id, lease.token, done.meta, payload)
            else:
                result = done.evaluation_result(self._node_id)
                complete = partial(parts.broker.complete_evaluation, self._node_id, lease.token, result)
            accepted = await parts.timeout.repeat(complete)
        except BrokerError as error:
            return await self._give_up(lease, done, str(error))
        if not accepted:  # the broker counts a group's tokens as wasted
            what = "group of task" if lease.evaluation is None else "samples of held-out problem"
            logger.warning("the %s %d came too late, refused", what, serial)
        elif lease.evaluation is None and parts.status.joining.reached("delivered"):
            times = parts.status.joining.times
            logger.info("%s; the process started at Unix time %.3f", times.sentence, times.started_s)
            parts.beat_now()
        return accepted

    async def _give_up(self, lease: Lease, done: CompletedGroup, reason: str) -> bool:
        """Tell the broker that a group failed, and its cost; it counts as an attempt."""
        logger.warning("task %d failed: %s", lease.task.serial, reason)
        parts = self._parts
        transcript = b""
        if parts.transcribe is not None and done.failure is not None:
            transcript = await asyncio.to_thread(parts.transcribe, done.group)
        await self._failed(lease, reason, done.meta.sampled_tokens, max(0.0, done.meta.generation_s), transcript)
        return False

    async def _failed(self, lease: Lease, reason: str, tokens: int, seconds: float, transcript: bytes = b"") -> None:
        fail = partial(self._parts.broker.fail, self._node_id, lease.token, reason, tokens, seconds, transcript)
        await self._parts.timeout.repeat(fail)
