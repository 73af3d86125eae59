"""The lead rank's side of the training loop: broker, tasks, publisher, status and what the run leaves on disk.

Other ranks have none; they learn what to do from the commands that the trainer broadcasts.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
from torch import Tensor

from broker.client.calls import LearnerBroker
from broker.client.connect import Access, connect
from broker.client.look_ahead import LookAhead
from broker.contract import BrokerStatus, StoredGroup
from common.config.schema import Config
from common.errors import HopelessError, SlipstreamError, StoreChanged
from common.metrics import StepMetrics
from common.process.run_dir import RunDir, find_broker
from common.rollouts import Group
from common.security.credentials import curve_credentials
from common.waits import WaitFor, WaitKind
from common.weights.source.publisher import WeightPublisher
from common.weights.transports.groups import require
from common.weights.wire.messages import Canary
from learner.backend_protocol import Backend
from learner.batch.batch import BadGroup, TrainingBatch, assemble, prepare
from learner.batch.packing import Document
from learner.batch.updates import Part, Update, ages_of, build_updates, numbers, plan_updates, trained_on
from learner.checkpoint.folder import StreamState, TrainerState
from learner.loop.batch_source import Command, Drain, Fail, Save, Train, Wait
from learner.loop.evaluation import Evaluations
from learner.loop.gathering import Gathering, Ready
from learner.loop.rollout_source import RolloutSource
from learner.loop.run_files import RunFiles
from learner.loop.share import Told, encode, of_layers
from learner.loop.status_reporter import StatusReporter
from learner.loop.step_metrics import GivenBack, StallMeter, Step, step_metrics
from learner.loop.tasks import TaskStream, check_not_behind, task_source
from learner.loop.transcripts import Chosen, Logprobs, choose, items, transcript_thread
from learner.loop.watcher import Watcher

logger = logging.getLogger(__name__)

BROKER_WAIT_S = 30.0


class LeadRank(RolloutSource):
    def __init__(
        self,
        config: Config,
        broker: LearnerBroker,
        publisher: WeightPublisher,
        tasks: TaskStream,
        files: RunFiles,
        reporter: StatusReporter,
        stop_requested: Callable[[], str | None],
        evaluations: Evaluations | None = None,
    ) -> None:
        """`stop_requested` returns why the job should drain, None while it should not."""
        super().__init__(config, lead_publisher=publisher)
        self.broker = broker
        self.publisher = publisher
        self.reporter = reporter
        self.tasks = tasks
        self.files = files
        self.stop_requested = stop_requested
        self.evaluations = evaluations
        self._watch = Watcher(config, files, publisher, reporter.update)
        files.commit = self._commit
        files.recorded = self._watch.see
        self._status: BrokerStatus | None = None  # fetched for the last metrics line, until the next turn has used it
        self._stalls = StallMeter()
        self._groups: list[Group] = []  # those of the newest step
        self._nodes: dict[int, str] = {}  # the node of each of them, by serial
        self._chosen: Chosen = {}
        self._parts: list[list[Part]] = []  # by rank
        self._transcripts = transcript_thread(config)

    def start(self) -> None:
        self.reporter.start(lambda: self.publisher.stats().undelivered)
        self.reporter.update(weights_address=self.publisher.start())

    def attach(self, backend: Backend, version: int) -> None:
        """Say to the broker that this incarnation trains from `version` on; everything before is durable."""
        super().attach(backend, version)
        if self.config.telemetry.transcripts != "none":
            self._transcripts.start()  # now, because the imports of the model's libraries are over
        attached = self.broker.attach(self.reporter.snapshot())
        check_not_behind(version, attached.committed_step, self.files.checkpoints.folder)
        self.broker.evaluate(None, [], [])  # an earlier learner may have left a round
        self._watch.begin(version)
        if not self.tasks.attach(attached):
            self.files.note("tasks_renumbered", step=version)
            logger.warning("the broker knows less than the checkpoint; tasks not yet consumed are offered again")
        if version > 0:
            self.broker.commit(version - 1)  # the last learner may have been killed just before it
        unfinished = [entry for page in self.broker.ledger_pages(unfinished=True) for entry in page]
        self.tasks.check_known(version, unfinished)
        jobs = self.config.sources

        def make(stored: StoredGroup, step: int) -> Ready:
            try:
                return Ready(group := self.decode(stored), prepare(group, step, jobs, backend.routing_shape))
            except BadGroup as error:
                self.files.quarantine(stored.serial, stored.payload)
                return Ready(error)

        self._gathering = Gathering(self.config, self.broker, self.tasks, self.files, LookAhead(self.broker, make))
        self._gathering.resume(version, unfinished, self.broker.status())

    def next_command(self, step: int) -> Command:
        for node in self.publisher.lost_nodes():
            self.files.note("ejection", step=step, node=node.node_id, reason=node.reason)
        self._watch.turn()
        if self._watch.stopped:
            return Drain(self._watch.stopped)
        if reason := self.stop_requested() or self.reporter.stop_requested:
            logger.info("draining: %s", reason)
            return Drain()
        stats = self.publisher.stats()
        if stats.fatal and step < self.config.run.steps:
            return Fail(f"no node may generate with version {step}: {stats.fatal}", hopeless=not stats.crashed)
        try:
            try:
                return self._turn(step)
            except StoreChanged as error:
                return self._follow(step, str(error))
        except SlipstreamError as error:
            return Fail(str(error), hopeless=isinstance(error, HopelessError))

    def _turn(self, step: int) -> Command:
        """Evaluate, and gather groups unless the run is trained."""
        if step >= self.config.run.steps:

            def tell(text: str) -> None:
                self.reporter.set("evaluating", WaitFor(WaitKind.EVALUATION, cause=text), policy_version=step)

            return Wait() if self.evaluations is not None and self.evaluations.last_turn(tell) else Drain()
        if self.evaluations is not None:
            self.evaluations.turn()
        return self._gather(step)

    def _follow(self, step: int, why: str) -> Wait | Save:
        """Attach to the store that took the place of the one this learner knew. Raises as TaskStream.follow."""
        logger.warning("%s; attaching to the broker again", why)
        self.reporter.set("waiting", WaitFor(WaitKind.OTHER_STORE), policy_version=step)
        self.tasks.follow(self.broker.attach(self.reporter.snapshot()))
        self.files.note("store_followed", step=step)
        self._status = None
        self._gathering.forget()
        return Save() if step < self.config.run.steps else Wait()

    def _commit(self, step: int) -> None:
        """Release the groups of a durable checkpoint. A store that does not know them has nothing to release."""
        try:
            self.broker.commit(step)
        except StoreChanged as error:
            logger.warning("step %d is not committed: %s", step, error)

    def _gather(self, step: int) -> Wait | Train:
        """Take the step's groups; Wait: not enough yet. Says meanwhile what the loop waits for, and who unblocks it."""
        status = self._status or self.broker.status()
        self._status = None
        gathering = self._gathering
        gathering.prepare(step, status)
        state = "replaying" if gathering.is_replayed(step) else "waiting"
        wait = gathering.wait(step, status)
        self.reporter.set(state, wait, policy_version=step, groups_missing=gathering.missing)
        if (found := gathering.take(step, status)) is None:
            return Wait()
        stored, self._groups = found
        self._nodes = {group.serial: group.node_id for group in stored}
        return Train(step, list(self._nodes))

    def batch(self, step: int) -> tuple[TrainingBatch, list[Update]]:
        self._step = step
        try:
            batch = assemble(self._groups, step, self.config, self.backend.routing_shape, self._gathering.prepared)
            documents = batch.documents
            parts = plan_updates(self.backend, documents, self.config, step)
        except Exception as error:  # the other ranks wait for their documents; an estimator may raise anything
            self._deliver(Told(refused=str(error)), [], [[] for _ in range(self.backend.data_parallel_size)])
            raise
        self._chosen = choose(self._groups, self.config.telemetry.transcripts, self.config.run.seed)
        self._recorder.watch(documents, self._chosen)
        if documents:  # real text: the canary covers what the policy sees
            self._canary_tokens = documents[0].tokens[: max(2, self.config.weights.canary_tokens)].tolist()
        told = Told(batch.statistics, self._recorder.wanted, self._canary_tokens)
        self._deliver(told, documents, parts)
        layers = self.backend.routing_layers
        own = parts[self.backend.data_parallel_rank]
        self._parts = parts
        return batch, build_updates({n: of_layers(documents[n], layers) for n in numbers(own)}, own, self.config)

    def _deliver(self, told: Told, documents: list[Document], parts: list[list[Part]]) -> None:
        """Send every rank its parts."""

        def share(number: int) -> np.ndarray:
            cell = self._cells[number]
            own = parts[cell.replica]
            return encode(told, {n: of_layers(documents[n], cell.layers) for n in numbers(own)}, own)

        if self._cells:
            self.backend.deliver(share, [cell.ranks for cell in self._cells])

    def line(self, step: Step) -> StepMetrics:
        """The step's metrics line, with broker, nodes and weight plane as of now."""
        self._status = status = self.broker.status()
        absent = set(self.config.telemetry.profile_nodes) - {n.report.node_id for n in status.nodes if n.alive}
        if absent and step.batch.step in self.config.telemetry.profile_steps:
            self.files.note("profile_nodes_absent", step=step.batch.step, nodes=", ".join(sorted(absent)))
        published = self.publisher.stats()
        self.reporter.update(waste=step.totals.waste())
        if step.batch.statistics.tokens_unused:
            documents = self._trained_on(step.batch)
            figures = replace(step.batch.statistics, **ages_of(documents, self._groups, self.config))
            step = replace(step, batch=replace(step.batch, documents=documents, statistics=figures))
        self._watch.trained = step.batch, self._groups
        played = step.batch.statistics.sources
        self.tasks.observe(step.batch.step, {name: (own.successes, own.samples) for name, own in played.items()})
        given_back, self._gathering.given_back = self._gathering.given_back, GivenBack()
        return step_metrics(
            step,
            status,
            published,
            incarnation=self.files.incarnation,
            given_back=given_back,
            shares=self.tasks.shares,
            generation_stall_s=self._stalls.advance(status),
            transcripts_dropped_total=self._transcripts.dropped + status.transcripts_dropped,
        )

    def stream_state(self) -> StreamState:
        return self.tasks.state()

    def report(self, state: str, wait: WaitFor, version: int) -> None:
        self.reporter.set(state, wait, policy_version=version)

    def report_silence(self, ranks: str) -> None:
        self.reporter.set_silence(ranks)

    def _transcribe(self, batch: TrainingBatch, logprobs: Logprobs) -> None:
        if not self._chosen:
            return
        batch = replace(batch, documents=self._trained_on(batch))
        for item in items(batch, self._groups, self._nodes, self._chosen, logprobs):
            self._transcripts.put(item)

    def _trained_on(self, batch: TrainingBatch) -> list[Document]:
        """The documents of a step that is done, with the tokens that its updates had in their loss."""
        made = [own[: batch.updates] for own in self._parts]
        return trained_on(batch.documents, made, self.config)

    def _hand_over(self, version: int, canary: Canary | None) -> None:
        size = self.publisher.publish(version, self._tensors(), canary, self._adapters())
        self.files.note("publish", version=version, bytes=size)
        if self.evaluations is not None:
            self.evaluations.published(version, bool(self._watch.paused))

    def _freeze(self, named: Iterator[tuple[str, Tensor]]) -> None:
        lora = self.config.learner.lora
        assert lora is not None, "checked with the config"
        self.publisher.freeze(named, lora.factor / lora.rank)

    def close(self, state: str, version: int, reason: str) -> None:
        """Tell the broker how the job ended and release everything but the files."""
        wait = WaitFor(WaitKind.RESTART, cause=reason or f"{state} at version {version}")
        self.reporter.set(state, wait, policy_version=version)
        self._watch.close()
        self.publisher.close()
        self._transcripts.close()
        self.reporter.stop()
        self.broker.close()


def prepare_lead(
    config: Config,
    run_dir: RunDir,
    files: RunFiles,
    broker_address: str | None,
    stop_requested: Callable[[], str | None],
    address: str | None = None,
) -> tuple[LeadRank, TrainerState]:
    """Become the run's learner, then find where the run stands. The publisher and the reporter are not started.
    The publisher binds `address`; None: weights.address.

    Raises as `StatusReporter.take_over` and `RunDir.run_id`. Raises UsageError when the dataset is not the one that the
    checkpoint was trained on, or when `weights.transport` cannot work here.
    """
    require(config.weights.transport)
    source = task_source(config)
    access = Access(
        address=broker_address or find_broker(config, run_dir, BROKER_WAIT_S),
        role="learner",
        max_message_bytes=config.broker.max_message_bytes,
        credentials=config.broker.credentials,
        deadline_s=min(BROKER_WAIT_S, config.learner.timeout_s / 2),  # the other ranks wait in a collective meanwhile
    )
    several = config.learner.machines > 1
    known, run_id = -1, run_dir.run_id
    # A learner on another machine may have left its record with the broker; a RUN of its own has no id.
    if several or (config.learner.checkpoint.dir and not run_id):
        with connect(access) as client:
            status = client.status()
        known = status.learner.incarnation if status.learner and several else -1
        run_id = run_id or status.run.run_id
    reporter = StatusReporter(lambda: connect(access), None if several else run_dir.logs, run_dir.run_id)
    state = files.start(source.digest, reporter.take_over, known, run_id)
    reporter.resume(state)
    reporter.set("starting", WaitFor(WaitKind.MODEL))
    credentials = curve_credentials(config.broker.credentials)
    weights = msgspec.structs.replace(config.weights, address=address or config.weights.address)
    publisher = WeightPublisher(state.incarnation, config.model.dtype, weights, credentials=credentials)
    tasks = TaskStream(source, state.tasks)
    broker = connect(access)
    evaluations = Evaluations(config, broker, publisher, files) if config.evaluation.every else None
    lead = LeadRank(config, broker, publisher, tasks, files, reporter, stop_requested, evaluations)
    return lead, state
