"""Complete checkpoints of a run, with one small file in place of a model."""

from pathlib import Path

from common.process.run_dir import RunDir
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState


def write_checkpoint(run: RunDir, step: int) -> Path:
    """RUN/checkpoints/step-N as the learner leaves it."""
    folder = CheckpointFolder(run.checkpoints, keep=99)
    model = folder.begin(step)
    model.mkdir()
    (model / "weights").write_bytes(b"w" * 3)
    return folder.finish(TrainerState(policy_version=step, incarnation=0, tasks=StreamState()))
