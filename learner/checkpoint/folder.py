"""RUN/checkpoints/step-000020/: the backend's files in `model/`, the loop's state in `trainer.json`.

A checkpoint is written into a hidden folder and gets its name when everything in it is on the disk. It loses that name
before its files are removed. So a folder named step-* is complete, whenever the process was killed. Hidden folders that
are found at start were left by a killed learner and are removed.
"""

import re
import secrets
import shutil
from pathlib import Path

import msgspec

from broker.contract import WeightChange
from common.config.schema import BaseConfig
from common.errors import SlipstreamError
from common.process.files import pretty_json, remove_folder, replace_folder, sync
from common.waste import Waste, learner_waste
from learner.checkpoint.best import BEST_FILE, Best

STATE_FILE = "trainer.json"
MODEL_FOLDER = "model"
_NAME = re.compile(r"step-(\d{6,})")
_HIDDEN = re.compile(r"\.step-\d{6,}(\.\w+)?\.tmp")


class StreamState(msgspec.Struct, kw_only=True):
    """The task stream in a checkpoint. Fields are only ever appended."""

    next_serial: int = 0  # the next task gets this number at the broker
    cursor: int = 0  # next position of the dataset that was never offered
    backlog: list[int] = []  # positions to offer before that
    outstanding: dict[int, int] = {}  # serial -> position of what was offered and not consumed
    renumbered: bool = False  # a broker lost its memory, serials are lower than positions
    store_id: str = ""  # the broker's store to which these serials belong; '' in checkpoints of earlier releases
    former_stores: list[str] = []  # those that it took the place of
    weight_changes: list[WeightChange] = []  # all of tasks.sources, the first one at position 0; empty in a job of one
    # (successes, samples) of each source since the curriculum's last change
    successes: dict[str, tuple[int, int]] = {}


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the loop, besides model and optimizer. Fields are only ever appended."""

    policy_version: int  # optimizer steps done
    incarnation: int  # the learner that wrote it
    tasks: StreamState  # position of the task stream
    dataset_digest: str = ""  # identifies the dataset
    config_digest: str = ""  # identifies the resolved config
    # the learner's own counts since step 0
    tokens_trained_total: int = 0
    tokens_wasted_total: int = 0
    tokens_masked_total: int = 0
    files: dict[str, int] = {}  # size in bytes of every file in `model/`, by its path there; empty in older checkpoints
    # as `schedule_ends`, by the first step that was trained so: run.steps may change; empty in older checkpoints
    schedule_ends: dict[int, tuple[int, int]] = {}
    # by config key, what identifies the models that training reads again; empty in older checkpoints
    models: dict[str, dict[str, str]] = {}

    @property
    def waste(self) -> dict[str, Waste]:
        """By reason, as in a LearnerReport."""
        return learner_waste(self.tokens_wasted_total, self.tokens_masked_total)


def schedule_ends(config: BaseConfig) -> tuple[int, int]:
    """Updates at which the learning-rate schedules of policy and critic end; without a critic its end is 0.

    Each counts its own updates, and the policy's schedule begins after the critic's warm-up.
    """
    learner = config.learner
    end, critic = config.run.steps * learner.updates, learner.value_model
    if critic is None:
        return learner.optimizer.decay_steps or end, 0
    alone = critic.warmup_steps * learner.updates
    return learner.optimizer.decay_steps or max(end - alone, 0), critic.optimizer.decay_steps or end


def read_checkpoint(path: Path) -> TrainerState:
    """The state of a checkpoint; raises SlipstreamError if a file is missing, has another size or is unreadable."""
    model = path / MODEL_FOLDER
    try:
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=TrainerState)
        if not model.is_dir():
            raise FileNotFoundError(f"the folder {MODEL_FOLDER}/ is missing")
        for name, size in state.files.items():
            if (found := (model / name).stat().st_size) != size:
                raise ValueError(f"{MODEL_FOLDER}/{name} has {found} bytes instead of {size}")
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise SlipstreamError(
            f"checkpoint {path} is not complete: {error}; remove that folder to use another checkpoint"
        ) from None
    return state


class CheckpointFolder:
    """RUN/checkpoints of one run. The lead rank uses it and tells the others the paths."""

    def __init__(self, folder: Path, keep: int, best: Best | None = None) -> None:
        """Besides the newest `keep` checkpoints stay those that `best` chooses."""
        self.folder = folder
        self._keep = keep
        self._token = secrets.token_hex(4)
        self.best = best

    def steps(self) -> dict[int, Path]:
        """Step to path of every checkpoint that has its name, oldest first."""
        if not self.folder.is_dir():
            return {}
        return dict(sorted((int(m[1]), p) for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))))

    def path(self, version: int) -> Path:
        """Where the checkpoint of `version` is when it is complete."""
        return self.folder / f"step-{version:06d}"

    def newest(self) -> tuple[Path, TrainerState] | None:
        """The newest checkpoint and its state; None when the run has none. Raises as `read_checkpoint`."""
        paths = list(self.steps().values())
        return (paths[-1], read_checkpoint(paths[-1])) if paths else None

    def remove_incomplete(self) -> list[str]:
        """Remove what a killed learner left half written or half removed; returns the names."""
        if not self.folder.is_dir():
            return []
        left = [path for path in self.folder.iterdir() if _HIDDEN.fullmatch(path.name)]
        for path in left:
            shutil.rmtree(path)
        return sorted(path.name for path in left)

    def scratch(self, version: int) -> Path:
        """Where version `version` is written until it is complete; the backend writes into scratch / MODEL_FOLDER.

        The name is this object's own. A learner that was replaced may still write the same version.
        """
        return self.folder / f".step-{version:06d}.{self._token}.tmp"

    def lacks_room(self) -> bool:
        """Whether the disk is too full for one more checkpoint like the newest; raises OSError."""
        newest = next(reversed(self.steps().values()), None)
        files = newest.rglob("*") if newest is not None else ()
        return shutil.disk_usage(self.folder).free <= sum(path.stat().st_size for path in files)

    def remove_scratch(self, version: int) -> None:
        """Remove what was written of version `version`, as far as that is possible.

        The next scratch folder has another name, because a rank of a save that failed elsewhere may still write here.
        """
        shutil.rmtree(self.scratch(version), ignore_errors=True)
        self._token = secrets.token_hex(4)

    def begin(self, version: int) -> Path:
        """Make an empty scratch folder for `version`; returns the (not yet existing) folder for the backend."""
        self.remove_scratch(version)
        scratch = self.scratch(version)
        scratch.mkdir(parents=True)
        return scratch / MODEL_FOLDER

    def finish(self, state: TrainerState) -> Path:
        """Make the checkpoint complete, whose files the backend has flushed to the disk; returns its path."""
        scratch = self.scratch(state.policy_version)
        final = self.path(state.policy_version)
        model = scratch / MODEL_FOLDER
        files = {str(path.relative_to(model)): path.stat().st_size for path in model.rglob("*") if path.is_file()}
        (scratch / STATE_FILE).write_bytes(pretty_json(msgspec.structs.replace(state, files=files)))
        sync(scratch / STATE_FILE)
        sync(scratch)
        # A learner that was replaced while it wrote may have completed this version; the broker has not committed it.
        replace_folder(scratch, final)
        sync(self.folder)
        return final

    def prune(self) -> None:
        """Remove all checkpoints but the newest and the best ones. Raises OSError.

        best.json is replaced before the checkpoint that it named is removed.
        """
        found = self.steps()
        chosen = self.best.choose(self.folder, found) if self.best else set[int]()
        if self.best is None:
            (self.folder / BEST_FILE).unlink(missing_ok=True)  # the run kept the best until now
        for version in list(found)[: -self._keep]:
            if version not in chosen:
                remove_folder(found[version])
