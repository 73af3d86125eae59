"""`python -m learner.sft.main --config FILE [key=value ...]`: one rank of a supervised warm start.

lead rank: find the newest checkpoint; all ranks: load model and checkpoint -> SftTrainer.run -> RUN/model when done.
Told to stop (SIGTERM, Ctrl-C) it writes a checkpoint and leaves; the same command goes on from there.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from common.config.checks import check_config, resolve_paths
from common.config.loading import load_config
from common.config.schema import SftConfig
from common.metrics import MetricsWriter
from common.process.event_file import EventFile
from common.process.lifecycle import leave
from common.process.run_dir import RunDir
from learner.checkpoint.folder import MODEL_FOLDER, CheckpointFolder
from learner.loop.learner_record import write_record
from learner.loop.resume import Resume, find_start
from learner.rank_process import RankProcess, guard, parse_arguments
from learner.sft.loop import SftLead, SftTrainer
from learner.sft.rows import SftDataset, load_tokenizer

logger = logging.getLogger(__name__)


@dataclass
class LeadParts:
    """What the lead rank prepares before the model is loaded."""

    lead: SftLead
    resume: Resume


def prepare_lead(config: SftConfig, run_dir: RunDir, dataset: SftDataset) -> LeadParts:
    """Find where the run stands; raises UsageError when the dataset is not that of the checkpoint."""
    checkpoints = CheckpointFolder(run_dir.checkpoints, config.learner.checkpoint.keep)
    events = EventFile(run_dir.events, "learner")
    resume, _ = find_start(config, run_dir, checkpoints, events, dataset.digest)
    metrics = MetricsWriter(run_dir.metrics, keep_before_step=resume.version)
    write_record(run_dir, resume.incarnation, "running", resume.version)
    events.add("learner_started", incarnation=resume.incarnation, step=resume.version, checkpoint=resume.checkpoint)
    return LeadParts(SftLead(metrics, events, checkpoints), resume)


def train(
    config: SftConfig, run_dir: RunDir, process: RankProcess, dataset: SftDataset, parts: LeadParts | None
) -> str:
    """Load everything, run the loop, write the model; returns 'done' or 'drained'. Collective."""
    from learner.loop.trainer import save_model
    from learner.megatron.backend import MegatronBackend  # after the checks: it takes seconds to import

    backend = MegatronBackend.of(config)
    process.drain_on_signals()
    told = backend.broadcast_bytes(msgspec.json.encode(parts.resume) if parts else None)
    resume = msgspec.json.decode(told, type=Resume)
    if resume.checkpoint:
        logger.info("resuming from %s", resume.checkpoint)
        backend.load_checkpoint(Path(resume.checkpoint) / MODEL_FOLDER)
    lead = parts.lead if parts else None
    trainer = SftTrainer(config, backend, dataset, resume, lead, process.stop_requested)
    try:
        state = trainer.run()
        if state == "done":
            save_model(backend, run_dir.model, process.is_lead)
    except BaseException as error:
        if lead is not None:
            write_record(run_dir, resume.incarnation, "failed", trainer.version)
            lead.close("failed", trainer.version, str(error))
        raise
    if lead is not None:
        write_record(run_dir, resume.incarnation, state, trainer.version)
        lead.close(state, trainer.version)
    backend.close()
    return state


def run(arguments: Sequence[str]) -> int:
    """Train and write RUN/model; raises SlipstreamError (exit code 1) or UsageError (exit code 2)."""
    words = parse_arguments("learner.sft.main", arguments)
    config = resolve_paths(load_config(words.config, words.overrides, SftConfig))
    check_config(config, str(words.config))
    run_dir = RunDir(config.run.dir)
    process = RankProcess.start("sft", run_dir, config.learner.threads, config.telemetry.log_level)
    if process.is_lead:
        run_dir.prepare(config)
    tokenizer = load_tokenizer(Path(config.model.path))
    dataset = SftDataset(Path(config.tasks.dataset), tokenizer, config.run.seed, config.tasks.shuffle)
    parts = prepare_lead(config, run_dir, dataset) if process.is_lead else None
    state = train(config, run_dir, process, dataset, parts)
    logger.info("%s", {"done": "trained to run.steps", "drained": "stopped early; start again to go on"}[state])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one rank; errors are logged."""
    return guard(run, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    leave(main())
