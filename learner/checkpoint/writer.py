"""Checkpoints of the training loop, written behind its steps: begin, write, finish, and only then commit.

    start:  state of the loop and of the backend, as they are now -> hidden folder
    poll:   is every rank's share on the disk? -> state file, rename, broker.commit: the lead's part

One at a time: a checkpoint that is due while the last one is still being written waits for it.
"""

from pathlib import Path
from typing import Protocol

from common.errors import SlipstreamError
from learner.backend_protocol import Backend
from learner.checkpoint.folder import CheckpointFolder, TrainerState


class CheckpointOwner(Protocol):
    """The lead rank's part."""

    checkpoints: CheckpointFolder

    def finish_checkpoint(self, state: TrainerState) -> None:
        """Make a written checkpoint complete and durable, and only then let the broker forget its groups."""
        ...


class Checkpointer:
    """One rank's view of the checkpoint that is being written. Every method is collective."""

    def __init__(self, backend: Backend, asynchronous: bool, owner: CheckpointOwner | None, version: int) -> None:
        """
        Args:
            backend: writes model and optimizer.
            asynchronous: False waits for the disk in `start`.
            owner: on the lead rank, None elsewhere.
            version: that of the checkpoint that the loop starts from; 0 needs none.
        """
        self._backend, self._asynchronous, self._owner = backend, asynchronous, owner
        self._started = version
        self._writing = False
        self._state: TrainerState | None = None  # belongs to the one being written; on the lead rank only

    def start(self, version: int, state: TrainerState | None) -> None:
        """Begin the checkpoint of `version`, unless there is one.

        Args:
            version: the loop's, and that of the backend's weights.
            state: the loop's, on the lead rank; None elsewhere.

        Raises:
            SlipstreamError: this checkpoint or the last one cannot be written.
        """
        if version == self._started:
            return
        self.poll(wait=True)
        self._backend.start_checkpoint(self._begin(version))
        self._started, self._writing, self._state = version, True, state
        if not self._asynchronous:
            self.poll(wait=True)

    def poll(self, wait: bool = False) -> None:
        """Finish the checkpoint that is being written, if every rank has written its share; with `wait` they have.

        Raises:
            SlipstreamError: it could not be written; the one before it stays the newest.
        """
        if not self._writing or not self._backend.checkpoint_done(wait):
            return
        self._writing = False
        if self._owner is not None and self._state is not None:
            try:
                self._owner.finish_checkpoint(self._state)
            except OSError as error:
                raise SlipstreamError(
                    f"checkpoint of version {self._started} could not be completed: {error}"
                ) from error

    def _begin(self, version: int) -> Path:
        """The backend's new folder, the same on every rank."""
        told = b""
        if self._owner is not None:
            try:
                told = b"+" + str(self._owner.checkpoints.begin(version)).encode()
            except OSError as error:
                told = b"-" + str(error).encode()
        told = self._backend.broadcast_bytes(told if self._owner is not None else None)
        if told[:1] == b"-":
            raise SlipstreamError(f"checkpoint of version {version} could not be begun: {told[1:].decode()}")
        return Path(told[1:].decode())
