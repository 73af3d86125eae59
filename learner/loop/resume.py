"""Where a learner process begins: at the newest complete checkpoint of its run, or at zero."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from broker.contract import LedgerEntry
from common.config.schema import Config, SftConfig
from common.errors import UsageError
from common.process.event_file import EventFile
from common.process.run_dir import RunDir
from learner.checkpoint.folder import CheckpointFolder, TrainerState
from learner.loop.learner_record import next_incarnation

logger = logging.getLogger(__name__)


class Resume(msgspec.Struct, frozen=True):
    """Where every rank starts; the lead decides and broadcasts it. `checkpoint` is '' for a new run."""

    checkpoint: str
    version: int
    incarnation: int
    tokens_trained: int
    tokens_wasted: int
    dataset_digest: str
    config_digest: str
    tokens_masked: int = 0


def find_start(
    config: Config | SftConfig,
    run_dir: RunDir,
    checkpoints: CheckpointFolder,
    events: EventFile,
    dataset_digest: str,
    take_over: Callable[[int, int], None] | None = None,
) -> tuple[Resume, TrainerState | None]:
    """Where the run stands, and the state of its newest checkpoint. Unfinished folders of a killed learner are removed.

    Args:
        config: belongs to the learner that starts.
        run_dir: belongs to the run.
        checkpoints: likewise.
        events: notes what was removed.
        dataset_digest: identifies the dataset as it is now.
        take_over: called with the incarnation and the version known so far. No other learner can commit after it has
            returned. Until then a living learner may complete a checkpoint, so the newest one is read again.

    Raises:
        UsageError: the dataset is not the one that the checkpoint was trained on.
    """
    path, state = checkpoints.newest() or (None, None)
    if state is not None and state.dataset_digest != dataset_digest:
        raise UsageError(f"tasks.dataset: {config.tasks.dataset} changed since {path} was written; restore it")
    incarnation = next_incarnation(run_dir, state.incarnation if state else None)
    if take_over is not None:
        take_over(incarnation, state.policy_version if state else 0)
        path, state = checkpoints.newest() or (None, None)
    for name in checkpoints.remove_incomplete():
        events.add("incomplete_checkpoint_removed", name=name)
    return _resume(config, path, state, incarnation, dataset_digest), state


def check_not_behind(version: int, committed_step: int) -> None:
    """Raise UsageError when the broker has committed steps that the checkpoint lacks.

    Args:
        version: the checkpoint's, which is the step that would be trained next; 0 without a checkpoint.
        committed_step: the broker's, -1 for none.
    """
    if committed_step < version:
        return
    first = f"its checkpoint is of step {version}" if version else "it has no checkpoint"
    raise UsageError(
        f"the learner would train step {version} next ({first}). The broker has committed steps up to "
        f"{committed_step}: the groups of steps {version} to {committed_step} are gone. Put a checkpoint of step "
        f"{committed_step + 1} back into RUN/checkpoints, or start anew in another run.dir"
    )


def check_not_forgotten(version: int, consumed: Callable[[int], bool], ledger: Sequence[LedgerEntry]) -> None:
    """Raise UsageError when the broker would hand out groups that the checkpoint was trained on.

    Args:
        version: the checkpoint's; the broker has been told that everything before it is committed.
        consumed: whether a step of the checkpoint has trained on the task of a serial.
        ledger: the broker's.
    """
    again = [entry for entry in ledger if entry.state not in ("committed", "dead") and consumed(entry.serial)]
    if not again:
        return
    raise UsageError(
        f"the checkpoint of step {version} was trained on {len(again)} groups that the broker does not know as taken "
        f"(the first is task {again[0].serial}, {again[0].state}). Its store lost the newest moves, as in a power cut "
        "with broker.durability: everysec, or was put back from a copy. They would be trained on twice. Move RUN/store "
        "away (with broker.store: redis the run's keys and RUN/redis.json, docs/redis.md) and start again: what the "
        "checkpoint has not consumed is then generated anew"
    )


def _resume(
    config: Config | SftConfig, path: Path | None, state: TrainerState | None, incarnation: int, dataset: str
) -> Resume:
    digest = hashlib.sha256(msgspec.json.encode(config)).hexdigest()[:16]
    if state is None:
        return Resume("", 0, incarnation, 0, 0, dataset, digest)
    if state.config_digest != digest:
        logger.warning("the config changed since %s was written", path)
    return Resume(
        str(path),
        state.policy_version,
        incarnation,
        state.tokens_trained_total,
        state.tokens_wasted_total,
        dataset,
        digest,
        state.tokens_masked_total,
    )
