"""Deadlines that are renewed far more often than they pass."""

import heapq
from collections.abc import Callable, Iterator

HEAP_SLACK = 1024


class Deadlines:
    """A min-heap with lazy renewal: a key's true deadline is looked up only when its recorded one comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._recorded: dict[str, float] = {}  # the one heap item of each key that counts

    def add(self, key: str, deadline: float) -> None:
        """Watch `key`, due at `deadline` (monotonic seconds); the true one may move later without telling."""
        recorded = self._recorded.get(key)
        if recorded is None or deadline < recorded:
            self._recorded[key] = deadline
            heapq.heappush(self._heap, (deadline, key))

    def discard(self, key: str) -> None:
        """Watch `key` no longer; what it leaves in the heap goes when there is more of that than of the living."""
        if self._recorded.pop(key, None) is not None and len(self._heap) > 2 * len(self._recorded) + HEAP_SLACK:
            self._heap = [(deadline, key) for key, deadline in self._recorded.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Earliest time at which something may pass; None when nothing is watched."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float, current: Callable[[str], float | None]) -> Iterator[str]:
        """Keys whose deadline is at or before `now`, each once and no longer watched.

        `current(key)` is the true deadline, None when it no longer matters.
        """
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if self._recorded.get(key) != deadline:
                continue
            del self._recorded[key]
            true = current(key)
            if true is None:
                continue
            if true > now:
                self.add(key, true)
            else:
                yield key
