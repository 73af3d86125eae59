"""Checkpoints of the training loop, written behind its steps: begin, write, finish, and only then commit.

    start:  state of the loop and of the backend, as they are now -> hidden folder
    poll:   is every rank's share on the disk? -> state file, rename, broker.commit: the lead's part

One at a time: a checkpoint that is due while the last one is still being written waits for it.
"""

from pathlib import Path

from common.errors import SlipstreamError
from learner.backend_protocol import Backend
from learner.checkpoint.folder import TrainerState
from learner.loop.run_files import RunFiles


class Checkpointer:
    """One rank's view of the checkpoint that is being written. Every method is collective."""

    def __init__(self, backend: Backend, files: RunFiles | None, version: int) -> None:
        """`files` are given on the lead rank; the loop starts at `version`."""
        self._backend = backend
        self._files = files
        self._started = version
        self._writing = False
        self._state: TrainerState | None = None  # belongs to the one being written; on the lead rank only

    def start(self, version: int, state: TrainerState | None, wait: bool) -> None:
        """Begin the checkpoint of `version`, unless there is one; with `wait` it is complete on return.

        `state` is the loop's, on the lead rank. Raises SlipstreamError when this checkpoint or the last one
        cannot be written.
        """
        if version != self._started:
            self.poll(wait=True)
            self._backend.start_checkpoint(self._begin(version))
            self._started = version
            self._writing = True
            self._state = state
        if wait:
            self.poll(wait=True)

    def poll(self, wait: bool = False) -> None:
        """Finish the checkpoint that is being written, if every rank has written its share; with `wait` they have.

        Raises SlipstreamError when it could not be written; the one before it stays the newest.
        """
        if not self._writing or not self._backend.checkpoint_done(wait):
            return
        self._writing = False
        if self._files is not None and self._state is not None:
            try:
                self._files.finish_checkpoint(self._state)
            except OSError as error:
                raise SlipstreamError(
                    f"checkpoint of version {self._started} could not be completed: {error}"
                ) from error

    def _begin(self, version: int) -> Path:
        """The backend's new folder, the same on every rank."""
        told = b""
        if self._files is not None:
            try:
                told = b"+" + str(self._files.checkpoints.begin(version)).encode()
            except OSError as error:
                told = b"-" + str(error).encode()
        told = self._backend.broadcast_bytes(told if self._files is not None else None)
        if told[:1] == b"-":
            raise SlipstreamError(f"checkpoint of version {version} could not be begun: {told[1:].decode()}")
        return Path(told[1:].decode())
