"""Which logs observers ask for, and the answers that wait to be fetched: a few, in memory only."""

from collections.abc import Callable

MOST_LOGS = 16  # questions, and likewise answers; the oldest gives way

FRESH_S = 10.0  # a question that was not repeated by then is out of date, as is an answer that was not fetched

Whose = str | int  # a node id, or a rank of the learner


class LogEnds:
    """Observers repeat their question until they have the answer; an answer without a question is dropped."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.asked: dict[Whose, float] = {}  # when last, in this order
        self._texts: dict[Whose, tuple[float, str]] = {}  # when it came, and what

    def ask(self, whose: Whose) -> str | None:
        """The end of a role's log; None until the role has sent it."""
        came_at, text = self._texts.pop(whose, (float("-inf"), ""))
        if self._clock() - came_at < FRESH_S:
            return text
        self.asked.pop(whose, None)
        self.asked[whose] = self._clock()
        if len(self.asked) > MOST_LOGS:
            del self.asked[next(iter(self.asked))]
        return None

    def answer(self, whose: Whose, text: str | None) -> None:
        """A role has sent the end of its log, unless it is None."""
        if text is not None and self.asked.pop(whose, None) is not None:
            self._texts[whose] = self._clock(), text
        if len(self._texts) > MOST_LOGS:
            del self._texts[next(iter(self._texts))]

    def next_rank(self, rank: int, text: str | None) -> int:
        """Keep the answer of a rank; returns the rank of the learner whose log is asked for next, -1 for none."""
        self.answer(rank, text)
        fresh = self._clock() - FRESH_S
        return next((asked for asked, at in self.asked.items() if isinstance(asked, int) and at > fresh), -1)
