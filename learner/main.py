"""`python -m learner.main --config FILE [--broker ADDRESS] [--address HOST] [key=value ...]`: one rank of the learner.

- lead rank: become the run's learner -> find the newest checkpoint -> bind the weight plane
- all ranks: load model and checkpoint -> trainer.run until run.steps or a drain
- lead rank: say how it ended, to the broker and in RUN/learner.json

The config says what is trained: an RL job, or a supervised warm start, which has neither broker nor weight plane.
Told to stop (SIGTERM, Ctrl-C) the learner writes a checkpoint and leaves; the same command continues from there.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec

from broker.client.connect import connect_observer
from common.config.checks import downloaded, resolve_paths
from common.config.loading import load_either
from common.config.loss import plugins
from common.config.schema import BaseConfig, SftConfig
from common.errors import EXIT_DONE, UsageError
from common.process.health import serving_health
from common.process.lifecycle import keep_freed_memory, leave, leaving_after, raise_open_files
from common.process.lock_file import AlreadyLocked, take_lock
from common.process.run_dir import RunDir
from common.span_buffer import SPANS, SpanFile
from learner.checkpoint.folder import MODEL_FOLDER, CheckpointFolder, TrainerState
from learner.loop.batch_source import BatchSource
from learner.loop.run_files import RunFiles
from learner.rank_process import RankProcess, guard

logger = logging.getLogger(__name__)

CLOSE_S = 300.0  # more than the lead rank needs to say how it ended, for which the others may wait


def prepare(
    config: BaseConfig, named: BaseConfig, process: RankProcess, broker: str | None, address: str | None
) -> tuple[BatchSource, TrainerState | None, RunFiles | None]:
    """The source of batches, and on the lead rank the start state and its files; before the model is loaded."""
    from learner.loop.lead_rank import prepare_lead  # after the checks: these take seconds to import
    from learner.loop.rollout_source import RolloutSource
    from learner.sft.warm_start import SftSource

    run_dir = RunDir.of(named)
    files = None
    if process.is_lead:
        run_dir.prepare(named)
        files = RunFiles(named, run_dir, config)
    if isinstance(config, SftConfig):
        rows = SftSource(config, process.stop_requested)
        if files is None:
            return rows, None, None
        return rows, files.start(rows.dataset.digest, run_id=sft_run_id(config, run_dir, broker)), files
    assert config.rl is not None
    if files is None:
        return RolloutSource(config.rl, address), None, None
    return *prepare_lead(config.rl, run_dir, files, broker, process.stop_requested, address), files


def sft_run_id(config: BaseConfig, run_dir: RunDir, broker: str | None) -> str:
    """The id of a warm start: its broker's, where several machines have one but not the run folder in common.

    Raises as `RunDir.identify`; BrokerUnreachable when the broker does not answer.
    """
    if not broker:
        return run_dir.identify()
    with connect_observer(broker, config.learner.timeout_s / 2, config.broker.credentials, "learner") as client:
        return client.status().run.run_id


def train(
    config: BaseConfig, named: BaseConfig, process: RankProcess, broker: str | None, address: str | None = None
) -> str:
    """Load everything and run the loop; returns 'done' or 'drained'. Collective.

    `config` has local paths; `named` is the same with the hub's names, which the run folder keeps.
    """
    run_dir = RunDir.of(named)
    trace_mib = config.telemetry.trace_mib
    trace: SpanFile | None = None
    if process.is_lead and trace_mib:
        SPANS.open("starting", reference=config.rl is None)
    source, start, files = prepare(config, named, process, broker, address)
    if files is not None and trace_mib:
        trace = SpanFile(run_dir.trace, "learner", trace_mib, "learner")
    logger.info("model.path is %s", config.model.path)
    from learner.loop.trainer import Trainer
    from learner.rank_monitor import RankMonitor

    trainer: Trainer | None = None

    def close(state: str, reason: str = "") -> None:
        if files is None:
            return
        version = trainer.version if trainer else start.policy_version if start else 0
        try:
            files.close(state, version, reason)
        finally:
            source.close(state, version, reason)
            if trace is not None:
                trace.close()

    failed = partial(close, "failed")
    try:
        source.start()
        from learner.megatron.backend import MegatronBackend
        from learner.megatron.optimizer import learning_rate

        backend = MegatronBackend.of(config, resumes=start is not None and start.policy_version > 0)
        process.drain_on_signals()
        told = backend.broadcast_bytes(msgspec.json.encode(start) if start else None)
        start = msgspec.json.decode(told, type=TrainerState)
        if start.policy_version:
            checkpoint = CheckpointFolder(run_dir.checkpoints, keep=1).path(start.policy_version)
            logger.info("resuming from %s", checkpoint)
            backend.load_checkpoint(checkpoint / MODEL_FOLDER)
            if files is not None:
                files.warn_of_schedule(start.policy_version, learning_rate)
        trainer = Trainer(config, run_dir, backend, source, start, files)
        timeout_s = config.learner.timeout_s
        port = config.telemetry.health_port * (os.environ.get("LOCAL_RANK", "0") == "0")  # one rank of each machine
        monitor = RankMonitor(backend.rank, backend.world_size, timeout_s, source.report_silence, failed)
        with monitor, serving_health(port, trainer.signs, config.broker.credentials):
            state = trainer.run()
    except BaseException as error:
        failed(" ".join([str(error), *getattr(error, "__notes__", [])]))
        raise
    close(state)
    with leaving_after(CLOSE_S, EXIT_DONE, "the process groups do not close"):
        backend.close()
    return state


@contextmanager
def only_warm_start(run_dir: RunDir) -> Iterator[None]:
    """Keep a second warm start out of the run folder and of its checkpoints, which a copy of the run may share.

    Raises UsageError when there is one, on any machine.
    """
    places = {"run.dir": run_dir.path}
    if not run_dir.checkpoints.is_relative_to(run_dir.path):
        places["learner.checkpoint.dir"] = run_dir.checkpoints
    with ExitStack() as stack:
        for key, folder in places.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(take_lock(folder / run_dir.sft_lock.name))
            except AlreadyLocked as error:
                who = f"a warm start runs in {folder} (pid {error.holder}, maybe of another machine)"
                raise UsageError(f"{key}: {who}; stop it first, or choose another {key}") from None
            except OSError as error:
                logger.warning("%s cannot be locked, so nothing keeps a second warm start out: %s", folder, error)
        yield


def run(arguments: Sequence[str]) -> int:
    """One rank from start to end; raises SlipstreamError (exit code 1) or UsageError (exit code 2)."""
    parser = argparse.ArgumentParser(prog="python -m learner.main")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--broker", metavar="ADDRESS", help="instead of the one in the config or in RUN/broker.json")
    parser.add_argument("--address", metavar="HOST", help="where the weight plane binds, instead of weights.address")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    words = parser.parse_args(arguments)
    named = resolve_paths(load_either(words.config, words.overrides))
    config = downloaded(named, "learner")
    config.validate(str(words.config), "learner")
    process = RankProcess(config.role, RunDir.of(named), config.learner.threads, config.telemetry.log_level)
    if config.rl is not None and plugins(config.rl):
        from learner.loss.plugin_check import check  # after the process has its threads: it imports torch

        check(config.rl, str(words.config))
    raise_open_files()
    keep_freed_memory()
    # The broker of an RL job, or of several machines, lets one learner in. A lost machine may hold its lock for long.
    alone = process.is_lead and config.rl is None and config.learner.machines == 1
    with only_warm_start(RunDir.of(named)) if alone else nullcontext():
        state = train(config, named, process, words.broker, words.address)
    logger.info("%s", {"done": "trained to run.steps", "drained": "stopped early; start again to continue"}[state])
    return 0


if __name__ == "__main__":
    leave(guard(run, sys.argv[1:]))
