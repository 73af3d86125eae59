"""An RL job on one rank of the learner: the broker's groups come in, versions of the weights go out."""

from dataclasses import dataclass
from pathlib import Path

from broker.connect import Access, BrokerConnection, connect
from common.config.schema import Config
from common.process.broker_address import find_broker
from common.process.run_dir import RunDir
from learner.backend_protocol import Backend
from learner.loop.batch_source import BatchSource
from learner.loop.resume import Resume, find_start
from learner.loop.run_files import RunFiles
from learner.loop.status_reporter import Reporter
from learner.loop.task_source import TaskSource
from learner.loop.task_stream import TaskStream
from learner.publish.publisher import WeightPublisher
from learner.rank_process import RankProcess

BROKER_WAIT_S = 30.0


@dataclass
class LeadParts:
    """The lead rank prepares these before the model is loaded."""

    broker: BrokerConnection
    reporter: Reporter
    files: RunFiles
    tasks: TaskStream
    resume: Resume


def prepare_lead(config: Config, run_dir: RunDir, broker_address: str | None) -> LeadParts:
    """Become the run's learner, then find where the run stands.

    Raises:
        BrokerUnreachable: no broker, within its deadline.
        BrokerError: the run has a living learner of this incarnation.
        UsageError: the dataset is not the one that the checkpoint was trained on.
    """
    run_dir.prepare(config)
    files = RunFiles(run_dir, config.learner.checkpoint.keep)
    source = TaskSource(Path(config.tasks.dataset), config.run.seed, config.rollout.group_size, config.tasks.shuffle)
    broker = config.broker
    access = Access(
        address=broker_address or find_broker(config, run_dir, BROKER_WAIT_S),
        role="learner",
        max_message_bytes=broker.max_message_bytes,
        credentials=broker.credentials,
        deadline_s=min(BROKER_WAIT_S, config.learner.timeout_s / 2),  # the other ranks wait in a collective meanwhile
    )
    reporter = Reporter(lambda: connect(access))
    resume, state = find_start(config, run_dir, files.checkpoints, files.events, source.digest, reporter.take_over)
    reporter.set("starting", policy_version=resume.version)
    files.begin(resume)
    tasks = TaskStream(source, state.tasks if state else None)
    return LeadParts(connect(access), reporter, files, tasks, resume)


class RolloutJob:
    """The part of an RL job that a warm start does not have, on every rank.

    `files` is the run folder, on the lead rank from `prepare` on. Only the lead rank calls `prepare`.
    """

    def __init__(self, config: Config, run_dir: RunDir, process: RankProcess, broker_address: str | None) -> None:
        self._config, self._run_dir, self._process, self._address = config, run_dir, process, broker_address
        self._parts: LeadParts | None = None
        self._publisher: WeightPublisher | None = None

    @property
    def files(self) -> RunFiles | None:
        return self._parts.files if self._parts else None

    def prepare(self) -> Resume:
        """Become the run's learner and open the weight plane."""
        from learner.publish.publisher import create_publisher

        self._parts = parts = prepare_lead(self._config, self._run_dir, self._address)
        parts.reporter.start()
        parts.reporter.set("starting", "loading the model")
        self._publisher = publisher = create_publisher(self._config, parts.resume.incarnation)
        parts.reporter.set_weights_address(publisher.start())
        parts.reporter.watch_publisher(lambda: publisher.stats().undelivered)
        return parts.resume

    def source(self, backend: Backend, resume: Resume) -> BatchSource:
        from learner.loop.lead_rank import Lead
        from learner.loop.rollout_source import RolloutSource

        lead = None
        if self._parts is not None and self._publisher is not None:
            parts = self._parts
            parts.files.open_metrics(resume.version)
            common = (parts.broker, self._publisher, parts.tasks, parts.files, parts.reporter)
            lead = Lead(self._config, *common, self._process.stop_requested)
            lead.attach(resume.version)
        return RolloutSource(self._config, backend, resume.incarnation, lead)

    def report_silence(self, ranks: str) -> None:
        if self._parts is not None:
            self._parts.reporter.set_silence(ranks)

    def close(self, state: str, version: int, reason: str = "") -> None:
        """Tell the broker how it ended (done, drained or failed) and release everything."""
        if self._parts is None:
            return
        self._parts.reporter.set(state, reason or f"{state} at version {version}", policy_version=version)
        self._parts.files.close(state, version, reason)
        if self._publisher is not None:
            self._publisher.close()
        self._parts.reporter.stop()
        self._parts.broker.close()
