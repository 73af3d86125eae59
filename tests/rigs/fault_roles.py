"""The processes of a fault test: a broker, a node, a learner. Broker, clients, node loop, heartbeats and task stream
are the product's own. Sleeps replace the engine, and a hash of all trained groups replaces the model.

Usage: python -m tests.rigs.fault_roles broker|node|learner OPTIONS
OPTIONS are JSON: the broker's config, or the options in promise.py.
"""

import asyncio
import functools
import hashlib
import itertools
import logging
import os
import random
import secrets
import signal
import sys
import time
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

import msgspec

from broker.client.calls import LearnerBroker, NodeBroker
from broker.client.connect import Access, connect, connect_node
from broker.client.look_ahead import LookAhead
from broker.contract import LearnerReport
from broker.main import run_broker
from common.config.schema import Config
from common.errors import SlipstreamError, StoreChanged, UsageError
from common.process.run_dir import write_atomic
from common.rollouts import Sample, VersionRun, decode_group
from common.weights.receive.contract import WeightsState
from common.wire_types import Array
from learner.loop.tasks import TaskSource, TaskStream
from rollout_fleet.episode.driver import EpisodeDriver, Progress
from rollout_fleet.episode.sampler_protocol import EngineCounters
from rollout_fleet.node.heartbeat import BrokerTimeout, Heartbeat
from rollout_fleet.node.node import Node
from rollout_fleet.node.node_status import NodeStatusTracker
from rollout_fleet.node.running_groups import NodeParts
from tests.rigs.processes import WarmFork, fork_server, write_to
from tests.rigs.promise import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    MAX_STALENESS,
    RETRY_S,
    Checkpoint,
    LearnerOptions,
    NodeOptions,
    Trained,
)

logger = logging.getLogger("faults")


# -------------------------------------------------------------------- node


class FileWeights:
    """A weight feed that reads `INCARNATION VERSION` from the file that the learner calls its weights address."""

    def __init__(self) -> None:
        self.state = WeightsState()
        self._path = ""

    def follow(self, address: str, incarnation: int) -> None:
        self._path = address.removeprefix("file:")

    async def wait_change(self, timeout_s: float) -> WeightsState:
        before, end = self.state, time.monotonic() + timeout_s
        while self.state is before and time.monotonic() < end:
            await asyncio.sleep(0.02)
            if self._path and (path := Path(self._path)).exists():
                incarnation, version = map(int, path.read_text().split())
                if (self.state.incarnation, self.state.version) != (incarnation, version):
                    self.state = WeightsState(version=version, incarnation=incarnation)
        return self.state

    async def close(self) -> None:
        return None


class SleepingDriver(EpisodeDriver):
    """Episodes that take `think_s` on the average; their tokens name task, process and attempt."""

    def __init__(self, o: NodeOptions, feed: FileWeights) -> None:
        self._o, self._feed = o, feed
        self._random = random.Random(f"{o.seed} {o.name} {os.getpid()}")
        self._numbers = itertools.count()

    async def run(
        self, problem: dict[str, Any], seed: int, progress: Progress | None = None, group_seed: int | None = None
    ) -> Sample:
        version, number = self._feed.state.version, next(self._numbers)
        if self._o.hang_after is not None and number >= self._o.hang_after:
            logger.warning("this node hangs now")
            time.sleep(3600)
        await asyncio.sleep(self._o.think_s * self._random.uniform(0.2, 1.8))
        tokens = [problem["n"], os.getpid(), number, *([7] * self._o.padding_tokens)]
        failed = "this prompt always fails" if problem.get("poison") else None
        return Sample(
            tokens=Array.of(tokens, "int32"),
            loss_mask=Array.of([1] * len(tokens), "uint8"),
            behavior_logprobs=Array.of([-1.0] * len(tokens), "float32"),
            version_runs=[VersionRun(0, version)],
            reward=float(number % 2),
            stop_reason="environment_error" if failed else "stop",
            error=failed,
        )


class Repeating:
    """A node's connection that hands in every group three times: twice at once, and once more some time later."""

    def __init__(self, inner: NodeBroker, later_s: float) -> None:
        self._inner, self._later_s = inner, later_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def complete(self, *arguments: Any) -> bool:
        first, second = await asyncio.gather(self._inner.complete(*arguments), self._inner.complete(*arguments))
        assert first == second, "the same answer to the same result"
        task = asyncio.create_task(self._again(arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return first

    async def _again(self, arguments: tuple[Any, ...]) -> None:
        await asyncio.sleep(self._later_s)
        await self._inner.complete(*arguments)


async def node(o: NodeOptions) -> int:
    access = Access(address=o.address, role="node", deadline_s=10.0, retry_s=RETRY_S)
    status, feed = NodeStatusTracker(o.name), FileWeights()
    timeout = BrokerTimeout(60.0, o.address)
    async with connect_node(access) as client:
        run = await client.register(status.report())
        heartbeat = Heartbeat(lambda: connect_node(access), status, timeout, o.heartbeat_s, Path())
        parts = NodeParts(
            broker=Repeating(client, 2 * run.lease_s) if o.repeats else client,  # type: ignore[arg-type]
            feed=feed,
            drivers={"": SleepingDriver(o, feed)},
            concurrency=o.concurrency,
            status=status,
            timeout=timeout,
            counters=EngineCounters(),
            beat_now=heartbeat.beat_now,
        )
        loop = Node(parts, drain_s=0.5)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.request_drain, "SIGTERM", True)
        heartbeat.start(loop.on_heartbeat, loop.fail)
        try:
            return await loop.run()
        finally:
            await heartbeat.stop()
            await client.leave(o.name)


# -------------------------------------------------------------------- learner


class Learner:
    """The lead rank's way with the broker, without a model: a checkpoint every few steps, and commits then."""

    def __init__(self, o: LearnerOptions, broker: LearnerBroker) -> None:
        self._o, self._broker = o, broker
        self._run_dir = Path(o.run_dir)
        self._incarnation, self._instance = o.incarnation, secrets.token_hex(8)
        broker.report(self._report("starting", 0))  # from here on no other learner commits
        self._state = Checkpoint.load(self._run_dir)
        self._stream = TaskStream(
            TaskSource(self._run_dir / "tasks.jsonl", 0, GROUP_SIZE, shuffle=False), self._state.stream
        )
        self._ahead = LookAhead(broker, lambda stored, step: stored)
        self._trained = list(self._state.trained)
        self._weights, self._first = self._state.weights, self._state.first

    def run(self) -> None:
        step = self._state.step
        attached = self._broker.attach(self._report("starting", step))
        assert attached.committed_step < step, "the broker has committed only what a checkpoint holds"
        if not self._stream.attach(attached) and not self._o.store_may_change:
            raise SlipstreamError("the broker knows less than the checkpoint")
        if self._state.stream.store_id not in ("", attached.store_id):
            self._first = step
        if step > 0:
            self._broker.commit(step - 1)
        unfinished = [entry for page in self._broker.ledger_pages(unfinished=True) for entry in page]
        self._stream.check_known(step, unfinished)
        while not (self._run_dir / "drain").exists():
            self._publish(step)
            try:
                self._broker.report(self._report("training", step))
                self._train(step)
            except StoreChanged:
                self._follow(step)
                continue
            step += 1
            time.sleep(self._o.step_s)
            if step % self._o.every == 0:
                self._checkpoint(step)
        self._checkpoint(step)
        self._broker.report(self._report("done", step))

    def _follow(self, step: int) -> None:
        """As Lead does it."""
        if not self._o.store_may_change:
            raise SlipstreamError("the broker has forgotten what it said")
        self._stream.follow(self._broker.attach(self._report("waiting", step)))
        self._ahead.made = {}
        self._first = step
        self._checkpoint(step)

    def _train(self, step: int) -> None:
        groups = None
        while groups is None:
            dead = self._broker.status().groups_dead
            wanted = GROUPS_PER_STEP * (MAX_STALENESS + 2)
            missing = wanted - (self._stream.outstanding - dead)
            if missing > 0:
                self._broker.offer(self._stream.next(missing))
            groups = self._broker.take(step, GROUPS_PER_STEP, 1.0, self._o.in_order, held=self._ahead.end())
        ahead = sum(group.held for group in groups)
        groups = [self._ahead.get(group, step) for group in groups]
        self._ahead.begin(step + 1, GROUPS_PER_STEP)
        trained: list[list[Any]] = []
        positions = self._stream.state().outstanding
        self._stream.consume([group.serial for group in groups])
        for group in groups:
            samples = decode_group(group.payload).samples
            marks = ["-".join(map(str, s.tokens.numpy()[:3])) for s in samples]
            trained.append([group.serial, positions[group.serial], *marks])
            self._weights = hashlib.sha256(self._weights.encode() + group.payload).hexdigest()
        self._trained.append(trained)
        line = Trained(time.monotonic(), self._incarnation, step, trained, self._weights, ahead)
        with (self._run_dir / "learner.jsonl").open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _checkpoint(self, step: int) -> None:
        stream = self._stream.state()
        now = Checkpoint(step=step, weights=self._weights, trained=self._trained, stream=stream, first=self._first)
        write_atomic(self._run_dir / "checkpoint.json", msgspec.json.encode(now))
        if step > 0:
            try:
                self._broker.commit(step - 1)
            except StoreChanged:
                logger.warning("step %d is not committed, its store is gone", step - 1)

    def _publish(self, step: int) -> None:
        write_atomic(self._run_dir / "weights", f"{self._incarnation} {step}".encode())

    def _report(self, state: str, step: int) -> LearnerReport:
        address = f"file:{self._run_dir / 'weights'}"
        return LearnerReport(
            os.getpid(), self._incarnation, state, step, weights_address=address, step=step, instance=self._instance
        )


def learner(o: LearnerOptions) -> int:
    with connect(Access(address=o.address, role="learner", deadline_s=o.deadline_s, retry_s=RETRY_S)) as client:
        Learner(o, client).run()
    return 0


@functools.cache
def _server() -> ForkServer:
    return fork_server(__name__, {})


class Role(WarmFork):
    """A process of `forked`; the time for imports is not its own."""

    server = staticmethod(_server)


def forked(role: str, options: bytes, log: Path) -> None:
    """Do the same as `python -m tests.rigs.fault_roles ROLE OPTIONS`, with the output in a log."""
    write_to(log)
    sys.exit(main(role, options))


def main(role: str, options: bytes) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        if role == "broker":
            return run_broker(msgspec.json.decode(options, type=Config), options)
        if role == "node":
            return asyncio.run(node(msgspec.json.decode(options, type=NodeOptions)))
        return learner(msgspec.json.decode(options, type=LearnerOptions))
    except SlipstreamError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2].encode()))
