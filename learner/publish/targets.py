"""Which version is meant for which nodes.

The training fleet gets the newest version, or an older one while newer ones have to wait. The nodes of the pool get
the version that is being evaluated. Later evaluated versions are kept until their turn comes.
"""

from collections.abc import Iterable

from learner.publish.snapshot import Snapshot


class Targets:
    """Used by the control thread."""

    def __init__(self) -> None:
        self.current: Snapshot | None = None  # the fleet's
        self._waiting: Snapshot | None = None  # the newest version that has to wait
        self._holds: dict[str, int] = {}  # by reason: the newest version that may go out
        self.wanted: tuple[int, ...] = ()  # versions to evaluate, in this order
        self._kept: dict[int, Snapshot] = {}  # those of them that have come

    @property
    def evaluated(self) -> Snapshot | None:
        """The pool's version; None: its nodes keep what they have."""
        return self._kept.get(self.wanted[0]) if self.wanted else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why newer versions wait, () when none has to."""
        return tuple(self._holds)

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """The versions that nodes get, now or later."""
        found = (self.current, self._waiting, *self._kept.values())
        return {snapshot.version: snapshot for snapshot in found if snapshot is not None}

    def hold(self, reason: str, version: int) -> None:
        """Keep versions newer than `version` back, until `release` with the same reason."""
        self._holds.setdefault(reason, version)

    def release(self, reason: str) -> None:
        """Drop a reason. Without any other the newest version goes out; those before it are skipped."""
        self._holds.pop(reason, None)
        if self._waiting is not None:
            self.add([self._waiting])

    def evaluate(self, versions: tuple[int, ...]) -> None:
        """Keep these versions; the pool gets the first one. A version may come later."""
        self._kept = {version: s for version, s in self.snapshots.items() if version in versions}
        self.wanted = versions

    def add(self, snapshots: Iterable[Snapshot]) -> None:
        """New versions, in order."""
        newest = min(self._holds.values(), default=None)
        for snapshot in snapshots:
            if newest is None or snapshot.version <= newest:
                self.current, self._waiting = snapshot, None
            else:
                self._waiting = snapshot
            if snapshot.version in self.wanted:
                self._kept[snapshot.version] = snapshot
