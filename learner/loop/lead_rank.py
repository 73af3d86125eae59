"""The lead rank's side of the training loop: broker, tasks, publisher, status and what the run leaves on disk.

Other ranks have no Lead; they learn what to do from the commands that the trainer broadcasts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from broker.client.calls import LearnerBroker
from broker.client.connect import Access, connect
from broker.contract import BrokerStatus, StoredGroup
from common.config.schema import Config
from common.errors import HopelessError, SlipstreamError, StoreChanged
from common.metrics import StepMetrics
from common.process.broker_address import find_broker
from common.process.run_dir import RunDir
from common.rollouts import Group
from common.security.credentials import curve_credentials
from common.waits import WaitFor, WaitKind
from common.weights.source.publisher import WeightPublisher
from common.weights.source.snapshot import TensorSpecs
from common.weights.transports.groups import require
from common.weights.wire.messages import Canary
from learner.backend_protocol import Backend
from learner.batch.batch import BadGroup, TrainingBatch, expired_groups
from learner.batch.dynamic_sampling import carries_signal, most_replaced
from learner.checkpoint.folder import StreamState, TrainerState
from learner.loop.batch_source import Command, Drain, Fail, Save, Train, Wait
from learner.loop.evaluation import Evaluations
from learner.loop.rollout_source import RolloutSource
from learner.loop.run_files import RunFiles
from learner.loop.status_reporter import Reporter
from learner.loop.step_metrics import StallMeter, Step, step_metrics
from learner.loop.tasks import TaskSource, TaskStream, check_not_behind
from learner.loop.transcripts import Logprobs, items, transcript_thread
from learner.loop.watcher import Watcher

logger = logging.getLogger(__name__)

BROKER_WAIT_S = 30.0
TAKE_WAIT_S = 1.0  # bound on one turn of the loop without a batch, so that no rank waits longer in a broadcast
DEAD_STEPS = 3  # steps' worth of tasks that may die without one step in between, before the run stops
BAD_GROUP_ATTEMPTS = 3  # times one task may come back unusable before the run stops


class Lead(RolloutSource):
    """The source of batches of the lead rank."""

    def __init__(
        self,
        config: Config,
        broker: LearnerBroker,
        publisher: WeightPublisher,
        tasks: TaskStream,
        files: RunFiles,
        reporter: Reporter,
        stop_requested: Callable[[], str | None],
    ) -> None:
        """`stop_requested` returns why the job should drain, None while it should not."""
        super().__init__(config)
        self.broker, self.publisher, self.reporter = broker, publisher, reporter
        self.tasks, self.files = tasks, files
        self.stop_requested = stop_requested
        self.evaluations: Evaluations | None = None
        self._watch = Watcher(config, files, publisher, reporter.update)
        files.commit = self._commit
        files.recorded = self._watch.see
        reporter.undelivered = lambda: publisher.stats().undelivered
        self._status: BrokerStatus | None = None  # fetched for the last metrics line, until the next turn has used it
        self._regenerated = 0  # groups given back by the step that is being gathered
        self._missing = config.learner.groups_per_step  # groups that the step still waits for
        self._replaced = 0  # filtered groups of the step that others are taken for
        self._filtered_before: Counter[int | None] = Counter()  # groups that an earlier learner filtered, by step
        self._bad: Counter[int] = Counter()
        self._stalls = StallMeter()
        self._ejections = 0
        self._replays_below = 0
        self._dead_at_last_take = 0
        self._groups: list[Group] = []  # the newest Train command has them
        self._nodes: dict[int, str] = {}  # the node of each of them, by serial
        self._transcripts = transcript_thread(config)

    def start(self) -> None:
        self.reporter.start()
        self.reporter.update(weights_address=self.publisher.start())

    def attach(self, backend: Backend, version: int) -> None:
        """Say to the broker that this incarnation trains from `version` on; everything before is durable."""
        super().attach(backend, version)
        if self.config.telemetry.transcripts != "none":
            self._transcripts.start()  # now, because the imports of the model's libraries are over
        attached = self.broker.attach(self.reporter.snapshot())
        check_not_behind(version, attached.committed_step)
        self.broker.evaluate(None, [], [])  # an earlier learner may have left a round
        self._watch.begin(version)
        if not self.tasks.attach(attached):
            self.files.events.add("tasks_renumbered", step=version)
            logger.warning("the broker knows less than the checkpoint; tasks not yet consumed are offered again")
        if version > 0:
            self.broker.commit(version - 1)  # the last learner may have been killed just before it
        unfinished = [entry for page in self.broker.ledger_pages(unfinished=True) for entry in page]
        self.tasks.check_known(version, unfinished)
        if self.config.learner.dynamic_sampling:
            self._filtered_before = Counter(e.step for e in unfinished if e.filtered and e.state == "taken")
        status = self.broker.status()
        self._dead_at_last_take = status.groups_dead
        self._replays_below = version + status.steps_taken
        if self._replays_below > version:
            logger.info("steps %d to %d replay the groups they had", version, self._replays_below - 1)

    def next_command(self, step: int) -> Command:
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
        self.files.events.add("store_followed", step=step)
        self._status = None
        self._missing = self.config.learner.groups_per_step
        self._replaced = self._dead_at_last_take = self._replays_below = 0
        self._bad.clear()
        self._filtered_before.clear()
        return Save() if step < self.config.run.steps else Wait()

    def _commit(self, step: int) -> None:
        """Release the groups of a durable checkpoint. A store that does not know them has nothing to release."""
        try:
            self.broker.commit(step)
        except StoreChanged as error:
            logger.warning("step %d is not committed: %s", step, error)

    def _gather(self, step: int) -> Wait | Train:
        """Offer tasks, take groups, give back what cannot be trained on; Wait: not enough groups yet."""
        status, self._status = self._status or self.broker.status(), None
        self._check_deaths(status)
        if filtered := self._filtered_before.pop(step, 0):  # the last learner may have been killed before it offered
            self._replaced = min(filtered, most_replaced(self.config.learner.groups_per_step))
        self._offer(step, status)
        self._explain(step, status)
        in_order = self.config.staleness.expired == "wait"
        taken = self.broker.take(step, self.config.learner.groups_per_step, TAKE_WAIT_S, in_order)
        if taken is None:
            return Wait()
        self._dead_at_last_take = status.groups_dead
        usable, refused = self._usable(taken)
        filters = self.config.learner.dynamic_sampling
        flat = [group.serial for group in usable if filters and not carries_signal(group)]
        if self.config.staleness.expired == "regenerate":
            trained = [group for group in usable if group.serial not in flat]
            refused += expired_groups(trained, step, self.config.staleness.max)
        if refused:
            self.broker.regenerate(step, refused)
            self._regenerated += len(refused)
            self.files.events.add("groups_regenerated", step=step, groups=len(refused), first_serial=min(refused))
            return Wait()
        if not self._filter(step, flat, len(taken)):
            return Wait()
        if step < self._replays_below:
            self.files.events.add("replay", step=step, groups=len(taken))
        self.tasks.consume([group.serial for group in taken])
        self._missing, self._replaced = self.config.learner.groups_per_step, 0
        self._groups, self._nodes = usable, {stored.serial: stored.node_id for stored in taken}
        return Train(step, taken)

    def _filter(self, step: int, flat: list[int], taken: int) -> bool:
        """Tell the broker which groups the step trains nothing on; returns whether it has all that it may take."""
        size = self.config.learner.groups_per_step
        if flat:
            self.broker.filter(step, flat, most_replaced(size))
        self._replaced = min(len(flat), most_replaced(size))
        self._missing = size + self._replaced - taken
        if self._missing <= 0 and flat and len(flat) == taken:
            self.files.events.add("step_without_signal", step=step, groups=taken)
            logger.warning("step %d trains nothing: in each of %d groups all rewards are equal", step, taken)
        return self._missing <= 0

    def _check_deaths(self, status: BrokerStatus) -> None:
        """Raise HopelessError when tasks do nothing but die, as when every episode of the environment fails."""
        died = status.groups_dead - self._dead_at_last_take
        if died < DEAD_STEPS * self.config.learner.groups_per_step:
            return
        last = [entry for page in self.broker.ledger_pages() for entry in page if entry.state == "dead"][-1]
        raise HopelessError(
            f"{died} tasks died since the last step, each after {self.config.tasks.max_attempts} failed attempts; "
            f"the last was task {last.serial}: {last.reason}"
        )

    def _offer(self, step: int, status: BrokerStatus) -> None:
        """Keep the window full: B(k + 1) tasks that may be leased and, while the broker counts with us, B more.

        Never more than the rest of the run consumes, so every group that is generated becomes a step's. Filtered
        groups that the current step replaces are offered anew, one for one.
        """
        size = self.config.learner.groups_per_step
        ahead = self.config.staleness.max + (1 if self.tasks.renumbered else 2)
        wanted = size * min(ahead, self.config.run.steps - step)
        missing = wanted - (self.tasks.outstanding - status.groups_dead - self._replaced)
        if missing > 0:
            self.broker.offer(self.tasks.next(missing))

    def _usable(self, taken: list[StoredGroup]) -> tuple[list[Group], list[int]]:
        """(usable groups, serials of the others); raises HopelessError for a task that stays unusable."""
        usable: list[Group] = []
        refused: list[int] = []
        for stored in taken:
            try:
                usable.append(self.decode(stored))
            except BadGroup as error:
                logger.error("%s; it is generated again", error)
                self.files.events.add("bad_group", serial=error.serial, node=error.node_id, reason=error.reason)
                self._bad[error.serial] += 1
                if self._bad[error.serial] >= BAD_GROUP_ATTEMPTS:
                    raise HopelessError(f"unusable {BAD_GROUP_ATTEMPTS} times: {error}") from None
                refused.append(error.serial)
        return usable, refused

    def _explain(self, step: int, status: BrokerStatus) -> None:
        """Say what the loop waits for, and who unblocks it."""
        live = [node for node in status.nodes if node.alive and not node.report.pool]
        wait = WaitFor(
            WaitKind.GROUPS,
            version=step,
            count=max(0, min(status.groups_ready, self._missing)),
            of=max(0, self._missing),
            replaced=self._replaced,
            leased=status.groups_leased,
            nodes=len(live),
        )
        none_leased = not status.groups_leased and live and live[0].report.state != "generating"
        if none_leased or (live and all(node.report.state == "environments" for node in live)):
            first = live[0].report
            wait = msgspec.structs.replace(wait, peer=first.node_id, peer_state=first.state)
        state = "replaying" if step < self._replays_below else "waiting"
        self.reporter.set(state, wait, policy_version=step, groups_missing=self._missing)

    def line(self, step: Step) -> StepMetrics:
        """The step's metrics line, with broker, nodes and weight plane as of now."""
        self._status = status = self.broker.status()
        absent = set(self.config.telemetry.profile_nodes) - {n.report.node_id for n in status.nodes if n.alive}
        if absent and step.batch.step in self.config.telemetry.profile_steps:
            self.files.events.add("profile_nodes_absent", step=step.batch.step, nodes=", ".join(sorted(absent)))
        published = self.publisher.stats()
        if published.ejections > self._ejections:
            nodes, self._ejections = published.ejections - self._ejections, published.ejections
            self.files.events.add("ejection", step=step.batch.step, nodes=nodes)
        self.reporter.update(waste=step.totals.waste())
        self._watch.trained = step.batch, self._groups
        regenerated, self._regenerated = self._regenerated, 0
        return step_metrics(
            *(step, status, published),
            incarnation=self.files.incarnation,
            groups_regenerated=regenerated,
            generation_stall_s=self._stalls.advance(status),
            transcripts_dropped_total=self._transcripts.dropped + status.transcripts_dropped,
        )

    def stream_state(self) -> StreamState:
        return self.tasks.state()

    def report(self, state: str, wait: WaitFor, version: int) -> None:
        self.reporter.set(state, wait, policy_version=version)

    def report_silence(self, ranks: str) -> None:
        self.reporter.set_silence(ranks)

    def _decoded(self, groups: Sequence[StoredGroup]) -> list[Group]:
        return self._groups

    def _transcribe(self, batch: TrainingBatch, logprobs: Logprobs) -> None:
        for item in items(batch, self._groups, self._nodes, self._chosen, logprobs):
            self._transcripts.put(item)

    def _canary_owed(self) -> bytes:
        return b"+" if self.publisher.stats().canary_owed else b"-"

    def _lead(self) -> bytes:
        return msgspec.msgpack.encode(self.publisher.lead)

    def _become_source(self, number: int, parts: list[TensorSpecs], lead: bytes) -> None:
        assert number == 0, f"the lead rank has part {number} of the model"
        self.publisher.share(parts)
        logger.info("every version comes in %d parts, each from the rank that has it", len(parts))

    def _hand_over(self, version: int, canary: Canary | None) -> None:
        size = self.publisher.publish(version, self._tensors(), canary)
        self.files.events.add("publish", version=version, bytes=size)
        if self.evaluations is not None:
            self.evaluations.published(version, bool(self._watch.paused))

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
) -> tuple[Lead, TrainerState]:
    """Become the run's learner, then find where the run stands. The publisher and the reporter are not started.
    The publisher binds `address`; None: weights.address.

    Raises BrokerUnreachable, or BrokerError when the run has a living learner of this incarnation. Raises UsageError
    when the dataset is not the one that the checkpoint was trained on, or when `weights.transport` cannot work here.
    """
    require(config.weights.transport)
    source = TaskSource(Path(config.tasks.dataset), config.run.seed, config.rollout.group_size, config.tasks.shuffle)
    access = Access(
        address=broker_address or find_broker(config, run_dir, BROKER_WAIT_S),
        role="learner",
        max_message_bytes=config.broker.max_message_bytes,
        credentials=config.broker.credentials,
        deadline_s=min(BROKER_WAIT_S, config.learner.timeout_s / 2),  # the other ranks wait in a collective meanwhile
    )
    several, known = config.learner.machines > 1, -1
    if several:  # a learner on another machine may have left its record with the broker
        with connect(access) as client:
            known = before.incarnation if (before := client.status().learner) else -1
    reporter = Reporter(lambda: connect(access), None if several else run_dir.logs)
    state = files.start(source.digest, reporter.take_over, known)
    reporter.set("starting", WaitFor(WaitKind.MODEL), policy_version=state.policy_version)
    credentials = curve_credentials(config.broker.credentials)
    weights = msgspec.structs.replace(config.weights, address=address or config.weights.address)
    publisher = WeightPublisher(state.incarnation, config.model.dtype, weights, credentials=credentials)
    tasks = TaskStream(source, state.tasks)
    lead = Lead(config, connect(access), publisher, tasks, files, reporter, stop_requested)
    if config.evaluation.every:
        lead.evaluations = Evaluations(config, lead.broker, publisher, files)
    return lead, state
