"""Whether the machines of a learner share the folder of checkpoints: each leaves a file and looks for the others'."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from broker.contract import Member
from common.errors import UsageError

WAIT_S = 30.0  # network file systems show a new file after seconds
POLL_S = 0.5


class SharedFolder:
    """The file of this machine in `folder`; the context removes it."""

    def __init__(self, folder: Path, machine: str) -> None:
        self._folder, self._own = folder, folder / f".machine-{machine}"

    def __enter__(self) -> "SharedFolder":
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own.touch()
        except OSError as error:
            raise UsageError(f"learner.checkpoint.dir: {self._folder} cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._own.unlink()

    def check(self, members: Sequence[Member], pause: Callable[[float], bool]) -> None:
        """Raise UsageError when the file of a member does not appear; `pause` sleeps and returns whether to give up."""
        absent = list(members)
        for _ in range(int(WAIT_S / POLL_S)):
            with contextlib.suppress(OSError):  # a network file system may not answer for a while
                absent = [member for member in absent if not (self._folder / f".machine-{member.machine}").exists()]
            if not absent or pause(POLL_S):
                return
        hosts = ", ".join(member.host for member in absent)
        theirs = f"the folder that {hosts} {'has' if len(absent) == 1 else 'have'} under that name"
        where = f"{self._folder} on this machine is not {theirs}"
        raise UsageError(f"learner.checkpoint.dir: {where}; set it to one that all machines share")
