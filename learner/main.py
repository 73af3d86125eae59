"""`python -m learner.main --config FILE [--broker ADDRESS] [key=value ...]`: one rank of the learner.

- lead rank: become the run's learner -> find the newest checkpoint -> bind the weight plane
- all ranks: load model and checkpoint -> trainer.run until run.steps or a drain
- lead rank: say how it ended, to the broker and in RUN/learner.json

The config says what is trained: an RL job, or a supervised warm start, which has neither broker nor weight plane.
Told to stop (SIGTERM, Ctrl-C) the learner writes a checkpoint and leaves; the same command continues from there.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.config.checks import check_config, resolve_paths
from common.config.loading import load_either
from common.config.schema import Config, SftConfig
from common.process.lifecycle import leave
from common.process.malloc_tuning import keep_freed_memory
from common.process.run_dir import RunDir
from learner.checkpoint.folder import MODEL_FOLDER
from learner.loop.resume import Resume
from learner.loop.rollout_job import RolloutJob
from learner.rank_process import RankProcess, guard, parse_arguments
from learner.sft.warm_start import WarmStart

logger = logging.getLogger(__name__)


def train(config: Config | SftConfig, run_dir: RunDir, process: RankProcess, job: RolloutJob | WarmStart) -> str:
    """Load everything and run the loop; returns 'done' or 'drained'. Collective."""
    resume = job.prepare() if process.is_lead else None
    from learner.loop.trainer import Trainer
    from learner.megatron.backend import MegatronBackend  # after the checks: it takes seconds to import
    from learner.rank_monitor import RankMonitor

    trainer: Trainer | None = None

    def failed(reason: str) -> None:
        job.close("failed", trainer.version if trainer else resume.version if resume else 0, reason)

    try:
        backend = MegatronBackend.of(config)
        process.drain_on_signals()
        told = backend.broadcast_bytes(msgspec.json.encode(resume) if resume else None)
        resume = msgspec.json.decode(told, type=Resume)
        if resume.checkpoint:
            logger.info("resuming from %s", resume.checkpoint)
            backend.load_checkpoint(Path(resume.checkpoint) / MODEL_FOLDER)
        trainer = Trainer(config, run_dir, backend, job.source(backend, resume), resume, job.files)
        timeout_s = config.learner.timeout_s
        with RankMonitor(backend.rank, backend.world_size, timeout_s, job.report_silence, failed):
            state = trainer.run()
    except BaseException as error:
        failed(str(error))
        raise
    job.close(state, trainer.version)
    backend.close()
    return state


def run(arguments: Sequence[str]) -> int:
    """One rank from start to end; raises SlipstreamError (exit code 1) or UsageError (exit code 2)."""
    words = parse_arguments("learner.main", arguments)
    config = resolve_paths(load_either(words.config, words.overrides))
    check_config(config, str(words.config), "learner")
    run_dir = RunDir(config.run.dir)
    role = "sft" if isinstance(config, SftConfig) else "learner"
    process = RankProcess.start(role, run_dir, config.learner.threads, config.telemetry.log_level)
    keep_freed_memory()
    if isinstance(config, SftConfig):
        job = WarmStart(config, run_dir, process)
    else:
        job = RolloutJob(config, run_dir, process, words.broker)
    state = train(config, run_dir, process, job)
    logger.info("%s", {"done": "trained to run.steps", "drained": "stopped early; start again to go on"}[state])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one rank; errors are logged."""
    return guard(run, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    leave(main())
