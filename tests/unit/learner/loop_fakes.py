"""A one-rank world for the training loop: a real torch model, the real in-memory broker, a fleet without threads."""

import asyncio
import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from broker.contract import LearnerReport, Lease, NodeReport, RunInfo, StoredGroup
from common.config.schema import Config
from common.errors import SlipstreamError
from common.evaluation import EvaluationResult
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.rollouts import Group, GroupMeta, Sample, VersionRun, encode_group
from common.run_reader import read_tail
from common.weights.source.nodes import LostNode, PublishStats
from common.weights.wire.messages import Canary
from common.wire_types import Array
from learner.backend_protocol import LossFunction, Microbatch, StepResult
from learner.checkpoint.folder import MODEL_FOLDER, CheckpointFolder
from learner.loop.lead_rank import LeadRank
from learner.loop.run_files import RunFiles
from learner.loop.status_reporter import StatusReporter
from learner.loop.tasks import TaskStream, task_source
from learner.loop.trainer import Trainer
from learner.loss.ratios import within
from tests.rigs.brokers import MemoryBroker, MemoryLearner
from tests.rigs.waiting import read_jsonl

VOCAB = 12
BROKERS: list["FedBroker"] = []  # the test's; a learner's threads end with them


class BigramBackend:
    """A table of next-token logits with plain gradient descent; one rank."""

    rank = data_parallel_rank = 0
    world_size = data_parallel_size = 1
    vocab_size = VOCAB
    hidden_size = 64
    document_multiple = 1
    routing_shape = None
    routing_layers: tuple[int, ...] = ()
    critic = None

    def __init__(self) -> None:
        self.table = torch.zeros(VOCAB, VOCAB, requires_grad=True)
        self.fail_at: int | None = None  # the step that never comes back, as after kill -9
        self.steps = 0  # optimizer updates
        self.rate = 0.5
        self.polls_to_write = 0  # times that checkpoint_done says no
        self.disk_full = False
        self.writing: tuple[Path, np.ndarray, int, int] | None = None

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def train_step(
        self,
        microbatches: list[Microbatch],
        loss: LossFunction,
        temperature: float = 1.0,
        entropy: bool = False,
        accept: Callable[[StepResult], bool] | None = None,
    ) -> StepResult:
        if self.steps == self.fail_at:
            raise Killed
        self.table.grad = None
        total, divisor, sums, maxima = 0.0, 0.0, {}, {}
        tokens = int(sum(batch.loss_mask.sum() for batch in microbatches))
        for batch in microbatches:
            logprobs = torch.log_softmax(self.table[batch.tokens] / temperature, -1)
            chosen = logprobs.gather(1, batch.targets[:, None])[:, 0]
            mask = batch.loss_mask > 0
            out = loss(within(mask, chosen), within(mask, -(logprobs.exp() * logprobs).sum(-1)), batch)
            out.loss_sum.backward()
            total += out.loss_sum.item()
            divisor += tokens if out.denominator is None else out.denominator.item()
            for name, value in out.sums.items():
                sums[name] = sums.get(name, 0.0) + value.double()
            for name, value in out.maxima.items():
                maxima[name] = max(maxima.get(name, 0.0), value.item())
        sums = {name: value.tolist() for name, value in sums.items()}
        result = StepResult(total / max(divisor, 1e-9), tokens, 0.0, 0.0, sums, maxima)
        if accept is not None and not accept(result):
            return result
        self.steps += 1
        with torch.no_grad():
            self.table.grad /= max(divisor, 1e-9)
            self.table -= self.rate * self.table.grad
        return dataclasses.replace(result, grad_norm=self.table.grad.norm().item(), lr=self.rate)

    def logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        with torch.no_grad():
            rows = [torch.log_softmax(self.table[b.tokens] / temperature, -1) for b in microbatches]
        chosen = [row.gather(1, b.targets[:, None])[:, 0] for row, b in zip(rows, microbatches, strict=True)]
        return [within(b.loss_mask > 0, row) for row, b in zip(chosen, microbatches, strict=True)]

    def reference_logprobs(self, microbatches: list[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        """Those of the table before training: every token equally likely."""
        return [-math.log(VOCAB) * b.loss_mask for b in microbatches]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table.detach()

    def save_hf(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        np.save(path / "table.npy", self.table.detach().numpy())

    def start_checkpoint(self, path: Path) -> None:
        assert self.writing is None
        self.writing = path, self.table.detach().numpy().copy(), self.steps, self.polls_to_write

    def checkpoint_done(self, wait: bool) -> bool:
        path, table, steps, polls = self.writing
        if polls and not wait:
            self.writing = path, table, steps, polls - 1
            return False
        self.writing = None
        if self.disk_full:
            raise SlipstreamError(
                f"checkpoint {path} could not be written: rank 0: OSError: [Errno 28] No space left on device"
            )
        path.mkdir()
        np.save(path / "table.npy", table)
        (path / "steps").write_text(str(steps))
        return True

    def load_checkpoint(self, path: Path) -> None:
        self.table = torch.from_numpy(np.load(path / "table.npy")).requires_grad_()
        self.steps = int((path / "steps").read_text())

    def largest(self, values: Tensor) -> Tensor:
        return values

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def deliver(self, make: Callable[[int], np.ndarray] | None, groups: Sequence[Sequence[int]]) -> np.ndarray:
        return np.zeros(0, np.uint8)


class Killed(BaseException):
    """The process was killed: nothing after this line runs."""


@dataclass
class RecordingPublisher:
    """Keeps every published version; `fatal` is what stats() then says."""

    versions: list[int] = field(default_factory=list)
    tables: dict[int, Tensor] = field(default_factory=dict)
    canaries: dict[int, Canary] = field(default_factory=dict)
    fatal: str | None = None
    canary_owed: bool = False
    lost: list[LostNode] = field(default_factory=list)
    closed: bool = False
    evaluated: tuple[int, ...] = ()
    calls: list[tuple[str, int]] = field(default_factory=list)  # each with the newest version then
    holds: set[str] = field(default_factory=set)  # reasons; nodes see none of the versions after them
    seen: int = -1  # the newest version that nodes may have

    def start(self) -> str:
        return "memory"

    def hold(self, reason: str) -> None:
        self.holds.add(reason)
        self.calls.append(("hold", self.versions[-1] if self.versions else -1))

    def release(self, reason: str) -> None:
        self.holds.discard(reason)
        self.calls.append(("release", self.versions[-1] if self.versions else -1))
        self._let_out()

    def _let_out(self) -> None:
        if not self.holds and self.versions:
            self.seen = self.versions[-1]

    def publish(
        self, version: int, named: Iterable[tuple[str, Tensor]], canary: Canary | None, adapters: object = None
    ) -> int:
        self.tables[version] = dict(named)["table"].clone()
        self.versions.append(version)
        self._let_out()
        if canary is not None:
            self.canaries[version] = canary
        return self.tables[version].nbytes

    def evaluate(self, *versions: int) -> None:
        self.evaluated = versions

    def lost_nodes(self) -> Iterator[LostNode]:
        while self.lost:
            yield self.lost.pop(0)

    def stats(self) -> PublishStats:
        return PublishStats(published=len(self.versions), fatal=self.fatal, canary_owed=self.canary_owed)

    def close(self) -> None:
        self.closed = True


class Fleet:
    """One node that works only inside the learner's `take`: leases what it may, completes what `ready` lets through.

    Its groups depend on serial and version alone. `lag`: versions that it stays behind the newest published one.
    """

    def __init__(self, broker: MemoryBroker, publisher: RecordingPublisher, group_size: int, lag: int = 0) -> None:
        self.node = broker.node()
        self.publisher, self.group_size, self.lag = publisher, group_size, lag
        self.held: list[tuple[Lease, int]] = []
        self.hold_back: Callable[[int, int], bool] = lambda serial, turn: False
        self.spoil: Callable[[Group], bytes] = encode_group
        self.turn = 0
        self.registered = False
        self.evaluates = True  # else its held-out problems wait

    @property
    def version(self) -> int:
        return max(0, self.publisher.seen - self.lag) if self.publisher.seen >= 0 else -1

    def work(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        report = NodeReport("fake", 1, "here", "generating", self.version)
        if not self.registered:
            await self.node.register(report)
            self.registered = True
        await self.node.heartbeat(report, [lease.token for lease, _ in self.held])
        self.held += [(lease, self.version) for lease in await self.node.lease("fake", self.version, 64, 0.0)]
        self.turn += 1
        for lease, version in list(self.held):
            if lease.evaluation is not None and not self.evaluates:
                continue
            if lease.evaluation is not None:
                self.held.remove((lease, version))
                assert await self.node.complete_evaluation("fake", lease.token, evaluated(lease, version, "fake"))
                continue
            if not self.hold_back(lease.task.serial, self.turn):
                self.held.remove((lease, version))
                group = make_group(lease.task.serial, version, self.group_size)
                group = msgspec.structs.replace(group, source=lease.task.source)
                sampled = sum(int(s.loss_mask.numpy().sum()) for s in group.samples)
                meta = GroupMeta(version, version, float(np.mean([s.reward for s in group.samples])), sampled)
                await self.node.complete("fake", lease.token, meta, self.spoil(group))


def evaluated(lease: Lease, version: int, node_id: str) -> EvaluationResult:
    """Rewards 0 and 1 in turn; the problem took two seconds."""
    number, size = lease.task.serial, lease.task.group_size
    rewards = [float((number + sample) % 2) for sample in range(size)]
    texts = ["stop"] * size, [""] * size
    return EvaluationResult(number, rewards, [4] * size, *texts, node_id, version, version, 100.0 + number, 2.0)


def make_group(serial: int, version: int, group_size: int) -> Group:
    """Random samples that depend on the serial; every sampled token carries `version`."""
    draw = np.random.default_rng(serial)
    samples = []
    for _ in range(group_size):
        tokens = draw.integers(0, VOCAB, 2 + int(draw.integers(2, 6)))
        mask = np.r_[0, 0, np.ones(len(tokens) - 2)].astype(np.uint8)
        samples.append(
            Sample(
                tokens=Array.of(tokens, "int32"),
                loss_mask=Array.of(mask, "uint8"),
                behavior_logprobs=Array.of(mask * -2.0, "float32"),
                version_runs=[VersionRun(2, version)],
                reward=float(draw.integers(0, 2)),
                stop_reason="stop",
            )
        )
    return Group(serial, samples)


class FedBroker(MemoryLearner):
    """The learner's client; the fleet works whenever the learner waits. Notes what it is told, in order."""

    def __init__(self, broker: MemoryBroker, fleet: Fleet, checkpoints: CheckpointFolder) -> None:
        super().__init__(broker.state)
        self._fleet, self._checkpoints = fleet, checkpoints
        self.commits: list[tuple[int, list[str]]] = []  # (step, checkpoints on the disk at that moment)

    def take(
        self, step: int, count: int, wait_s: float, in_order: bool = False, held: Sequence[str] = ()
    ) -> list[StoredGroup] | None:
        self._fleet.work()
        return super().take(step, count, 0.0, in_order, held)

    def commit(self, step: int) -> None:
        self.commits.append((step, [path.name for path in self._checkpoints.steps().values()]))
        super().commit(step)


class NoSink:
    def report(self, report: LearnerReport, log: str | None = None, log_rank: int = -1) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class World:
    """Everything of one learner process; `restart` gives the next one on the same run folder and broker."""

    config: Config
    memory: MemoryBroker
    publisher: RecordingPublisher
    fleet: Fleet
    broker: FedBroker
    backend: BigramBackend
    trainer: Trainer
    lead: LeadRank
    stop: list[str]

    def run(self) -> str:
        state = self.trainer.run()
        self.lead.files.close(state, self.trainer.version)
        return state

    def run_killed(self) -> None:
        """Run until the process is killed."""
        with contextlib.suppress(Killed):
            self.run()
            raise AssertionError("nothing killed it")

    def restart(self, memory: MemoryBroker | None = None) -> "World":
        return world(self.config, memory or self.memory)

    def with_new_broker(self) -> "World":
        return world(self.config)

    def unbroken(self) -> np.ndarray:
        """The table after this run without a stop; the folder is removed, so that the run can be made again."""
        self.run()
        table = self.final_table()
        shutil.rmtree(self.config.run.dir)
        return table

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run.dir)

    def lines(self) -> list[StepMetrics]:
        return read_tail(self.run_dir.metrics, StepMetrics).lines

    def final_table(self) -> np.ndarray:
        return np.load(self.run_dir.model / "table.npy")

    def event_kinds(self) -> list[str]:
        return [event["kind"] for event in read_jsonl(self.run_dir.events)]


def world(config: Config, memory: MemoryBroker | None = None, lag: int = 0) -> World:
    """A learner as main.py would build it, with fakes where other processes would be."""
    run_dir = RunDir(config.run.dir)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    files = RunFiles(config, run_dir)
    size, k = config.learner.groups_per_step, config.staleness.max
    memory = memory or MemoryBroker(RunInfo("test", config.run.dir, size, k, config.tasks.max_attempts, 60.0, 1 << 30))
    publisher, backend, stop = RecordingPublisher(), BigramBackend(), []
    fleet = Fleet(memory, publisher, config.rollout.group_size, lag)
    broker = FedBroker(memory, fleet, files.checkpoints)
    source = task_source(config)
    reporter = StatusReporter(NoSink, Path())
    state = files.start(source.digest, reporter.take_over)
    if state.policy_version:
        backend.load_checkpoint(files.checkpoints.path(state.policy_version) / MODEL_FOLDER)
    tasks = TaskStream(source, state.tasks)
    BROKERS.append(broker)
    lead = LeadRank(config, broker, publisher, tasks, files, reporter, lambda: stop[0] if stop else None)
    trainer = Trainer(config, run_dir, backend, lead, state, files)
    return World(config, memory, publisher, fleet, broker, backend, trainer, lead, stop)


MakeWorld = Callable[..., World]  # sections of the config, and `lag`
