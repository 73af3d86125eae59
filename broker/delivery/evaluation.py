"""The round of evaluation that is under way: held-out problems that nodes lease. They belong to no step.

Nothing here is recorded. A learner that finds fewer problems than it offered, after a restart of the broker, offers
the missing ones again.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from broker.contract import Evaluated, EvaluationProgress, Lease, RunInfo
from broker.delivery.deadlines import Deadlines
from common.errors import BrokerError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Task

MOST_RESULTS = 256  # in one answer
ANSWER_BYTES = 1 << 20  # likewise, unless one result has more; every broker.max_message_bytes lets it pass
TEXT_CHARS = 1000  # Longer stop reasons and errors are cut.


@dataclass(slots=True)
class Problem:
    """A held-out problem; its task's serial is its number in the round."""

    task: Task
    lost: int = 0  # leases
    node: str = ""
    leased_at: float = 0.0
    deadline: float = 0.0


class EvaluationTable:
    """Problems of one round; a new order takes the place of the round before."""

    def __init__(self, run: RunInfo, clock: Callable[[], float], new_token: Callable[[], str]) -> None:
        self._run, self._clock, self._new_token = run, clock, new_token
        self.begin(None, False)

    def begin(self, order: EvaluationOrder | None, shared: bool) -> None:
        """Forget the round before; `shared`: nodes of the training fleet may lease, too."""
        self.order, self._shared = order, shared
        self._problems: dict[int, Problem] = {}  # whose results the learner has not stored
        self._pending: list[int] = []
        self.leased: dict[str, Problem] = {}  # by token
        self._results: dict[int, EvaluationResult] = {}  # that the learner has not stored yet
        self._accepted: dict[str, str] = {}  # token -> node
        self._stored = 0
        self.deadlines: Deadlines[str] = Deadlines()

    @property
    def progress(self) -> EvaluationProgress | None:
        """None: no round is under way."""
        if self.order is None:
            return None
        finished = len(self._results) + self._stored
        return EvaluationProgress(self.order.version, len(self._pending), len(self.leased), finished, self._shared)

    def turn(self, tasks: Sequence[Task], stored: Sequence[int]) -> Evaluated:
        """Forget `stored` results, add those of `tasks` that are new; returns results that are not stored."""
        for number in stored:
            if self._results.pop(number, None) is not None:
                del self._problems[number]
                self._stored += 1
        for task in tasks:
            if task.serial not in self._problems:
                self._problems[task.serial] = Problem(task)
                insort(self._pending, task.serial)
        answer, left = Evaluated(len(self._problems)), ANSWER_BYTES
        for result in islice(self._results.values(), MOST_RESULTS):
            left -= len(msgspec.msgpack.encode(result))
            if left < 0 and answer.results:
                break
            answer.results.append(result)
        return answer

    def admits(self, version: int, in_pool: bool) -> bool:
        """Whether a node with this version may lease a problem now."""
        now = self.order.version if self.order is not None and self._pending else None
        return version == now and (in_pool or self._shared)

    def lease(self, node_id: str, version: int, in_pool: bool, most: int) -> list[Lease]:
        """Lease up to `most` problems, the first ones."""
        leases: list[Lease] = []
        while len(leases) < most and self.admits(version, in_pool):
            problem, token, now = self._problems[self._pending.pop(0)], self._new_token(), self._clock()
            problem.node, problem.leased_at, problem.deadline = node_id, now, now + self._run.lease_s
            self.leased[token] = problem
            self.deadlines.add(token, problem.deadline)
            leases.append(Lease(problem.task, token, problem.lost + 1, self._run.lease_s, self.order))
        return leases

    def renew(self, node_id: str, token: str) -> bool:
        """A heartbeat names this token; returns whether it is, or was, the node's."""
        if problem := self.leased_by(node_id, token):
            problem.deadline = min(self._clock() + self._run.lease_s, problem.leased_at + self._run.max_lease_s)
        return problem is not None or self._accepted.get(token) == node_id

    def complete(self, node_id: str, token: str, result: EvaluationResult) -> bool:
        """Take a result under a current token, once; a repetition is True, anything else False.

        Raises BrokerError when it has another number of episodes. Long texts are cut, so that an answer stays small.
        """
        if (problem := self.leased_by(node_id, token)) is not None:
            serial, n = problem.task.serial, problem.task.group_size
            texts = [[text[:TEXT_CHARS] for text in column] for column in (result.stop_reasons, result.errors)]
            if any(len(column) != n for column in (result.rewards, result.lengths, *texts)):
                raise BrokerError(f"the result of problem {serial} does not have {n} episodes")
            self._end(token)
            own = {"problem": serial, "stop_reasons": texts[0], "errors": texts[1], "node_id": node_id}
            self._results[serial] = msgspec.structs.replace(result, **own)
            self._accepted[token] = node_id
        return self._accepted.get(token) == node_id

    def give_back(self, node_id: str, token: str) -> bool:
        """Return a lease without counting it; False when it is not the node's."""
        if (problem := self.leased_by(node_id, token)) is not None:
            insort(self._pending, self._end(token).task.serial)
        return problem is not None

    def lose(self, token: str, reason: str) -> Problem:
        """Take a lease back. A problem that was lost as often as a task may fail counts as failed."""
        problem = self._end(token)
        problem.lost += 1
        serial, n = problem.task.serial, problem.task.group_size
        if problem.lost < self._run.max_attempts:
            insort(self._pending, serial)
        else:
            self._results[serial] = EvaluationResult(serial, [0.0] * n, [0] * n, ["lost"] * n, [reason] * n)
        return problem

    def tokens_of(self, node_id: str) -> list[str]:
        """The leases of a node."""
        return [token for token, problem in self.leased.items() if problem.node == node_id]

    def passed(self) -> list[str]:
        """The leases past their deadline, once. `_end` discards the deadlines of others."""
        return list(self.deadlines.passed(self._clock(), lambda token: self.leased[token].deadline))

    def leased_by(self, node_id: str, token: str) -> Problem | None:
        """The problem, if the node has this lease."""
        problem = self.leased.get(token)
        return problem if problem is not None and problem.node == node_id else None

    def _end(self, token: str) -> Problem:
        self.deadlines.discard(token)
        return self.leased.pop(token)
