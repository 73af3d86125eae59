"""`python -m learner.main --config FILE [--broker ADDRESS] [key=value ...]`: one rank of the learner.

lead rank: tell the broker that this is the learner now -> find the newest checkpoint -> bind the weight plane
all ranks: load model and checkpoint -> trainer.run until run.steps or a drain
lead rank: say how it ended, to the broker and in RUN/learner.json
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.connect import Access, BrokerConnection, connect
from common.config.checks import check_config, resolve_paths
from common.config.loading import load_config
from common.config.schema import Config
from common.errors import SlipstreamError
from common.metrics import MetricsWriter
from common.process.broker_address import find_broker
from common.process.event_file import EventFile
from common.process.lifecycle import leave
from common.process.malloc_tuning import keep_freed_memory
from common.process.run_dir import RunDir
from learner.checkpoint.folder import MODEL_FOLDER, CheckpointFolder
from learner.loop.lead_rank import Lead
from learner.loop.learner_record import write_record
from learner.loop.resume import Resume, find_start
from learner.loop.status_reporter import Reporter
from learner.loop.step_metrics import Totals
from learner.loop.task_source import TaskSource
from learner.loop.task_stream import TaskStream
from learner.rank_process import RankProcess, guard, parse_arguments

logger = logging.getLogger(__name__)

BROKER_WAIT_S = 30.0


@dataclass
class LeadParts:
    """What the lead rank prepares before the model is loaded."""

    broker: BrokerConnection
    reporter: Reporter
    events: EventFile
    checkpoints: CheckpointFolder
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
    checkpoints = CheckpointFolder(run_dir.checkpoints, config.learner.checkpoint.keep)
    events = EventFile(run_dir.events, "learner")
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
    resume, state = find_start(config, run_dir, checkpoints, events, source.digest, reporter.take_over)
    incarnation = resume.incarnation
    reporter.set("starting", policy_version=resume.version)
    write_record(run_dir, incarnation, "running", resume.version)
    events.add("learner_started", incarnation=incarnation, step=resume.version, checkpoint=resume.checkpoint)
    tasks = TaskStream(source, state.tasks if state else None)
    return LeadParts(connect(access), reporter, events, checkpoints, tasks, resume)


def train(config: Config, run_dir: RunDir, process: RankProcess, parts: LeadParts | None) -> str:
    """Load everything and run the loop; returns 'done' or 'drained'. Collective."""
    publisher = None
    if parts is not None:
        from learner.publish.publisher import create_publisher

        parts.reporter.start()
        parts.reporter.set("starting", "loading the model")
        publisher = create_publisher(config, parts.resume.incarnation)
        parts.reporter.set_weights_address(publisher.start())
        parts.reporter.watch_publisher(lambda: publisher.stats().undelivered)

    from learner.loop.trainer import Start, Trainer
    from learner.megatron.backend import MegatronBackend  # after the checks: it takes seconds to import
    from learner.rank_monitor import RankMonitor

    backend = MegatronBackend.of(config)
    process.drain_on_signals()
    told = backend.broadcast_bytes(msgspec.json.encode(parts.resume) if parts else None)
    resume = msgspec.json.decode(told, type=Resume)
    if resume.checkpoint:
        logger.info("resuming from %s", resume.checkpoint)
        backend.load_checkpoint(Path(resume.checkpoint) / MODEL_FOLDER)
    totals = Totals(resume.tokens_trained, resume.tokens_wasted, resume.tokens_masked)
    start = Start(resume.version, resume.incarnation, totals, (resume.dataset_digest, resume.config_digest))
    lead = None
    if parts is not None and publisher is not None:
        metrics = MetricsWriter(run_dir.metrics, keep_before_step=resume.version)
        lead = Lead(
            config,
            parts.broker,
            publisher,
            parts.tasks,
            parts.checkpoints,
            metrics,
            parts.events,
            parts.reporter,
            process.stop_requested,
            backend.vocab_size,
            backend.routing_shape,
        )
        lead.attach(resume.version)
    trainer = Trainer(config, run_dir, backend, start, lead)

    def failed(reason: str) -> None:
        if lead is not None:
            write_record(run_dir, resume.incarnation, "failed", trainer.version)
            lead.close("failed", trainer.version, reason)

    def silent(ranks: str) -> None:
        if lead is not None:
            lead.reporter.set_silence(ranks)

    monitor = RankMonitor(backend.rank, backend.world_size, config.learner.timeout_s, silent, failed)
    try:
        with monitor:
            state = trainer.run()
    except BaseException as error:
        failed(str(error))
        raise
    if lead is not None:
        write_record(run_dir, resume.incarnation, state, trainer.version)
        lead.close(state, trainer.version)
    backend.close()
    return state


def run(arguments: Sequence[str]) -> int:
    """One rank from start to end; raises SlipstreamError (exit code 1) or UsageError (exit code 2)."""
    words = parse_arguments("learner.main", arguments)
    config = resolve_paths(load_config(words.config, words.overrides, Config))
    check_config(config, str(words.config), "learner")
    run_dir = RunDir(config.run.dir)
    process = RankProcess.start("learner", run_dir, config.learner.threads, config.telemetry.log_level)
    keep_freed_memory()
    parts = prepare_lead(config, run_dir, words.broker) if process.is_lead else None
    try:
        state = train(config, run_dir, process, parts)
    except SlipstreamError as error:
        if parts is not None:  # once more for errors from before the loop
            parts.reporter.set("failed", str(error))
            parts.reporter.stop()
        raise
    if parts is not None:
        parts.broker.close()
    logger.info("%s", {"done": "trained to run.steps", "drained": "stopped early; start again to go on"}[state])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one rank; errors are logged."""
    return guard(run, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    leave(main())
