"""A queue of deadlines, for deadlines that are renewed far more often than they pass."""

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

HEAP_SLACK = 1024

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A min-heap with lazy renewal: a key's true deadline is looked up only when its recorded one comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, K]] = []
        self._recorded: dict[K, float] = {}  # deadline of the valid heap item of each key

    def add(self, key: K, deadline: float) -> None:
        """Watch `key`, due at `deadline` (monotonic seconds). The true deadline may move later without a call."""
        recorded = self._recorded.get(key)
        if recorded is None or deadline < recorded:
            self._recorded[key] = deadline
            heapq.heappush(self._heap, (deadline, key))

    def discard(self, key: K) -> None:
        """Stop watching `key`. The heap is rebuilt when most of its items are stale."""
        if self._recorded.pop(key, None) is not None and len(self._heap) > 2 * len(self._recorded) + HEAP_SLACK:
            self._heap = [(deadline, key) for key, deadline in self._recorded.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Earliest time at which a deadline may pass; None when no key is watched."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float, current: Callable[[K], float | None]) -> Iterator[K]:
        """Yield each key whose deadline is at or before `now`, and stop watching it.

        `current(key)` returns the true deadline, or None when the key no longer matters.
        """
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if self._recorded.get(key) == deadline:
                del self._recorded[key]
                true = current(key)
                if true is not None and true > now:
                    self.add(key, true)
                elif true is not None:
                    yield key
