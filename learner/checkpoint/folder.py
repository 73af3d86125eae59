"""RUN/checkpoints/step-000020/: the backend's files in `model/`, the loop's state in `trainer.json`.

A checkpoint is written into a hidden folder and renamed when everything in it is on the disk, so a folder named step-*
is complete, whenever the process was killed. What else is found at start is left over from a kill and removed.
"""

import logging
import os
import re
import shutil
from pathlib import Path

import msgspec

from common.errors import SlipstreamError
from common.process.files import pretty_json, sync
from learner.loop.task_stream import StreamState

logger = logging.getLogger(__name__)

STATE_FILE = "trainer.json"
MODEL_FOLDER = "model"
_NAME = re.compile(r"step-(\d{6,})")
_SCRATCH = re.compile(r"\.step-\d{6,}(\.replaced)?\.tmp")


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop needs to go on, besides model and optimizer. Fields are only ever appended.

    Attributes:
        policy_version: optimizer steps done.
        incarnation: of the learner that wrote it.
        tasks: where the task stream stands.
        dataset_digest: of the task source.
        config_digest: of the resolved config.
        tokens_trained_total, tokens_wasted_total, tokens_masked_total: the learner's own counts since step 0.
    """

    policy_version: int
    incarnation: int
    tasks: StreamState
    dataset_digest: str = ""
    config_digest: str = ""
    tokens_trained_total: int = 0
    tokens_wasted_total: int = 0
    tokens_masked_total: int = 0


class CheckpointFolder:
    """RUN/checkpoints of one run; used by the lead rank, which tells the others the paths."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [(int(m[1]), p) for p in self._folder.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found)]

    def newest(self) -> tuple[Path, TrainerState] | None:
        """The newest complete checkpoint and its state; None when the run has none.

        Raises:
            SlipstreamError: its state file is missing or unreadable.
        """
        paths = self.complete()
        if not paths:
            return None
        state = paths[-1] / STATE_FILE
        try:
            return paths[-1], msgspec.json.decode(state.read_bytes(), type=TrainerState)
        except (OSError, msgspec.DecodeError) as error:
            raise SlipstreamError(
                f"checkpoint {paths[-1]} has no usable {STATE_FILE}: {error}; remove that folder to resume from an "
                "older one"
            ) from None

    def remove_incomplete(self) -> list[str]:
        """Remove what a killed learner left half written; returns the names."""
        if not self._folder.is_dir():
            return []
        left = [path for path in self._folder.iterdir() if _SCRATCH.fullmatch(path.name)]
        for path in left:
            shutil.rmtree(path)
        return sorted(path.name for path in left)

    def scratch(self, version: int) -> Path:
        """Where version `version` is written until it is complete; the backend writes into scratch / MODEL_FOLDER."""
        return self._folder / f".step-{version:06d}.tmp"

    def begin(self, version: int) -> Path:
        """Make an empty scratch folder for `version`; returns the (not yet existing) folder for the backend."""
        scratch = self.scratch(version)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch / MODEL_FOLDER

    def finish(self, state: TrainerState) -> Path:
        """Make the checkpoint that `begin` started complete, durably; returns its path.

        What the backend wrote is on the disk already: that is its part of the bargain.
        """
        scratch = self.scratch(state.policy_version)
        final = self._folder / f"step-{state.policy_version:06d}"
        with open(scratch / STATE_FILE, "wb") as file:
            file.write(pretty_json(state))
            file.flush()
            os.fsync(file.fileno())
        sync(scratch)
        if final.exists():  # of a learner that was replaced while it wrote: the broker has not committed it
            aside = self._folder / f".step-{state.policy_version:06d}.replaced.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(final, aside)
        os.rename(scratch, final)
        sync(self._folder)
        self._prune()
        return final

    def _prune(self) -> None:
        for path in self.complete()[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
