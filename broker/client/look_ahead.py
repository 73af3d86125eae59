"""The groups of the learner's next step, made ready in a thread while it trains on the ones before."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from broker.client.calls import LearnerBroker
from broker.contract import StoredGroup
from common.errors import SlipstreamError

LOOK_EVERY_S = 0.5
LOOKS = 32  # in which a whole step comes, so that other answers to the learner do not wait for all of it

T = TypeVar("T")


class LookAhead(Generic[T]):
    """The results of `make` for groups of the next step.

    The broker records no look, and the take decides as without one.
    A group goes by the token of its lease. The same task generated again, or in another store, has another one.
    """

    def __init__(self, broker: LearnerBroker, make: Callable[[StoredGroup, int], T]) -> None:
        """`make` turns a group into what a step needs of it; the thread calls it too."""
        self._broker = broker
        self._make = make
        self.made: dict[str, T] = {}  # by token, all for one step
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._fault: Exception | None = None

    def begin(self, step: int, most: int) -> None:
        """Make at most so many groups for `step`, as they become ready, until `end`."""
        self.made = {}
        self._ends.clear()
        self._thread = threading.Thread(target=self._look, args=(step, most), name="look-ahead", daemon=True)
        self._thread.start()

    def end(self) -> list[str]:
        """The tokens of groups that need not come, when what is under way is made. Raises the thread's fault."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        if self._fault is not None:
            raise self._fault
        return list(self.made)

    def get(self, stored: StoredGroup, step: int) -> T:
        """A group, made now unless that was done before."""
        made = self.made.get(stored.token) or self._make(stored, step)
        if stored.token:
            self.made[stored.token] = made
        return made

    def _look(self, step: int, most: int) -> None:
        try:
            while not self._ends.is_set() and (room := most - len(self.made)) > 0:
                groups = self._broker.look(step, min(room, -(-most // LOOKS)), list(self.made))
                for stored in groups:
                    self.get(stored, step)
                if not groups:
                    self._ends.wait(LOOK_EVERY_S)
        except SlipstreamError:
            pass  # the next take meets it too, and says so
        except Exception as error:
            self._fault = error
