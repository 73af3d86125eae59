"""The round of evaluation that is under way: held-out problems that nodes lease. They belong to no step.

Nothing here is recorded. A learner that finds fewer problems than it offered, after a restart of the broker, offers
the missing ones again.
"""

from bisect import insort
from collections.abc import Sequence
from itertools import islice

import msgspec

from broker.contract import Evaluated, EvaluationProgress
from broker.delivery.task_table import Entry
from common.errors import BrokerError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Task

MOST_RESULTS = 256  # in one answer
ANSWER_BYTES = 1 << 20  # likewise, unless one result has more; every broker.max_message_bytes lets it pass
TEXT_CHARS = 1000  # Longer stop reasons and errors are cut.


class EvaluationTable:
    """Problems of one round; a new order takes the place of the round before.

    A task's serial is its problem's number in the round. The rules of node_rules.py watch the leases' deadlines.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self.begin(None, False)

    def begin(self, order: EvaluationOrder | None, shared: bool) -> None:
        """Forget the round before; `shared`: nodes of the training fleet may lease, too."""
        self.order = order
        self.shared = shared
        self._problems: dict[int, Entry] = {}  # whose results the learner has not stored
        self.pending: list[int] = []
        self.leased: dict[str, Entry] = {}  # by token
        self._results: dict[int, EvaluationResult] = {}  # that the learner has not stored yet
        self.accepted: dict[str, str] = {}  # token -> node
        self._stored = 0

    @property
    def progress(self) -> EvaluationProgress | None:
        """None: no round is under way."""
        if self.order is None:
            return None
        finished = len(self._results) + self._stored
        return EvaluationProgress(self.order.version, len(self.pending), len(self.leased), finished, self.shared)

    def turn(self, tasks: Sequence[Task], stored: Sequence[int]) -> Evaluated:
        """Forget `stored` results, add those of `tasks` that are new; returns results that are not stored."""
        for number in stored:
            if self._results.pop(number, None) is not None:
                del self._problems[number]
                self._stored += 1
        for task in tasks:
            if task.serial not in self._problems:
                self._problems[task.serial] = Entry(task)
                insort(self.pending, task.serial)
        answer = Evaluated(len(self._problems))
        left = ANSWER_BYTES
        for result in islice(self._results.values(), MOST_RESULTS):
            left -= len(msgspec.msgpack.encode(result))
            if left < 0 and answer.results:
                break
            answer.results.append(result)
        return answer

    def admits(self, version: int, in_pool: bool) -> bool:
        now = self.order.version if self.order is not None and self.pending else None
        return version == now and (in_pool or self.shared)

    def lease(self, node_id: str, token: str) -> Entry:
        entry = self.leased[token] = self._problems[self.pending.pop(0)]
        entry.node = node_id
        entry.token = token
        return entry

    def complete(self, node_id: str, token: str, result: EvaluationResult) -> bool:
        """Take a result under a current token, once; a repetition is True, anything else False.

        Raises BrokerError when it has another number of episodes. Long texts are cut, so that an answer stays small.
        """
        entry = self.leased.get(token)
        if entry is not None and entry.node == node_id:
            n = entry.task.group_size
            texts = [[text[:TEXT_CHARS] for text in column] for column in (result.stop_reasons, result.errors)]
            if any(len(column) != n for column in (result.rewards, result.lengths, *texts)):
                raise BrokerError(f"the result of problem {entry.serial} does not have {n} episodes")
            del self.leased[token]
            own = {"problem": entry.serial, "stop_reasons": texts[0], "errors": texts[1], "node_id": node_id}
            self._results[entry.serial] = msgspec.structs.replace(result, **own)
            self.accepted[token] = node_id
        return self.accepted.get(token) == node_id

    def give_back(self, token: str) -> None:
        """Return a lease without counting it."""
        insort(self.pending, self.leased.pop(token).serial)

    def lose(self, token: str, reason: str) -> Entry:
        """Take a lease back. A problem that was lost as often as a task may fail counts as failed."""
        entry = self.leased.pop(token)
        entry.failures += 1
        serial = entry.serial
        n = entry.task.group_size
        if entry.failures < self._max_attempts:
            insort(self.pending, serial)
        else:
            self._results[serial] = EvaluationResult(serial, [0.0] * n, [0] * n, ["lost"] * n, [reason] * n)
        return entry

    def tokens_of(self, node_id: str) -> list[str]:
        return [token for token, entry in self.leased.items() if entry.node == node_id]
