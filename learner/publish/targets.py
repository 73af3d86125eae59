"""Which version is meant for the nodes: the newest one, or an older one while newer ones have to wait."""

from collections.abc import Iterable

from learner.publish.snapshot import Snapshot


class Targets:
    """Used by the control thread."""

    def __init__(self) -> None:
        self.current: Snapshot | None = None
        self._waiting: Snapshot | None = None  # the newest version that has to wait
        self._holds: dict[str, int] = {}  # by reason: the newest version that may go out

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why newer versions wait, () when none has to."""
        return tuple(self._holds)

    @property
    def versions(self) -> set[int]:
        """The versions that nodes get, now or later."""
        return {snapshot.version for snapshot in (self.current, self._waiting) if snapshot is not None}

    def hold(self, reason: str, version: int) -> None:
        """Keep versions newer than `version` back, until `release` with the same reason."""
        self._holds.setdefault(reason, version)

    def release(self, reason: str) -> None:
        """Drop a reason. Without any other the newest version goes out; those before it are skipped."""
        self._holds.pop(reason, None)
        if self._waiting is not None:
            self.add([self._waiting])

    def add(self, snapshots: Iterable[Snapshot]) -> None:
        """New versions, in order."""
        newest = min(self._holds.values(), default=None)
        for snapshot in snapshots:
            if newest is None or snapshot.version <= newest:
                self.current, self._waiting = snapshot, None
            else:
                self._waiting = snapshot
