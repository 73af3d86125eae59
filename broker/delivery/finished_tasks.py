"""Committed and dead tasks for the ledger, in columns that take about 30 bytes a task."""

from array import array
from collections.abc import Iterator

from broker.contract import LedgerEntry

_ABSENT, _COMMITTED, _DEAD, _FILTERED = 0, 1, 2, 3
_NAMES = {_COMMITTED: "committed", _DEAD: "dead", _FILTERED: "committed"}
_NONE = -(1 << 31)
GROWTH = 1024  # the columns grow by so many entries


class History:
    """Ledger entries of finished tasks, by serial. Adding is O(1); node lists are stored once each."""

    def __init__(self) -> None:
        self._state = bytearray()
        self._attempts = array("i")
        self._step = array("i")
        self._version_min = array("i")
        self._version_max = array("i")
        self._reward = array("d")
        self._nodes = array("i")
        self._node_lists: list[list[str]] = []
        self._node_list_ids: dict[tuple[str, ...], int] = {}
        self._reasons: dict[int, str] = {}
        self.committed = 0
        self.dead = 0

    def __contains__(self, serial: int) -> bool:
        return 0 <= serial < len(self._state) and self._state[serial] != _ABSENT

    def add(self, entry: LedgerEntry) -> None:
        """Store the entry of a committed or dead task."""
        self._grow(entry.serial + 1)
        i = entry.serial
        committed = entry.state == "committed"
        self._state[i] = (_FILTERED if entry.filtered else _COMMITTED) if committed else _DEAD
        self.committed += committed
        self.dead += not committed
        self._attempts[i] = entry.attempts
        self._step[i] = _NONE if entry.step is None else entry.step
        self._version_min[i] = _NONE if entry.version_min is None else entry.version_min
        self._version_max[i] = _NONE if entry.version_max is None else entry.version_max
        self._reward[i] = float("nan") if entry.reward_mean is None else entry.reward_mean
        self._nodes[i] = self._node_list_id(tuple(entry.nodes))
        if entry.reason:
            self._reasons[i] = entry.reason

    def get(self, serial: int) -> LedgerEntry:
        """The entry of a finished task. Raises KeyError when there is none."""
        if serial not in self:
            raise KeyError(serial)
        reward = self._reward[serial]
        return LedgerEntry(
            serial=serial,
            state=_NAMES[self._state[serial]],
            attempts=self._attempts[serial],
            nodes=list(self._node_lists[self._nodes[serial]]),
            step=_optional(self._step[serial]),
            version_min=_optional(self._version_min[serial]),
            version_max=_optional(self._version_max[serial]),
            reward_mean=None if reward != reward else reward,
            reason=self._reasons.get(serial, ""),
            filtered=self._state[serial] == _FILTERED,
        )

    def serials(self) -> Iterator[int]:
        """Serials of all finished tasks, ascending."""
        return (i for i, state in enumerate(self._state) if state != _ABSENT)

    def _grow(self, size: int) -> None:
        if size <= len(self._state):
            return
        short = max(size - len(self._state), GROWTH)
        self._state.extend(bytes(short))
        for column in (self._attempts, self._step, self._version_min, self._version_max, self._nodes):
            column.extend([0] * short)
        self._reward.extend([0.0] * short)

    def _node_list_id(self, nodes: tuple[str, ...]) -> int:
        known = self._node_list_ids.get(nodes)
        if known is None:
            known = self._node_list_ids[nodes] = len(self._node_lists)
            self._node_lists.append(list(nodes))
        return known


def _optional(value: int) -> int | None:
    return None if value == _NONE else value
