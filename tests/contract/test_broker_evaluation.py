"""Evaluation: held-out problems beside the tasks of the steps, over every store."""

import msgspec
import pytest

from broker.delivery.evaluation import ANSWER_BYTES, TEXT_CHARS
from common.errors import BrokerError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Task
from tests.contract.backends import LEASE_S, Backend
from tests.rigs.brokers import node_report
from tests.rigs.refusals import refused

ORDER = EvaluationOrder(version=1, incarnation=3, temperature=0.0)


def problems(*numbers: int) -> list[Task]:
    return [Task(serial=n, problem=b'{"n": %d}' % n, seed=n, group_size=2) for n in numbers]


def result(problem: int, node_id: str = "e0") -> EvaluationResult:
    return EvaluationResult(problem, [1.0, 0.0], [5, 7], ["stop", "length"], ["", ""], node_id, 1, 1, 100.0, 2.0)


def join(backend: Backend, node_id: str = "e0", pid: int = 1, pool: str = "eval") -> None:
    backend.run(backend.node.register(node_report(node_id, pid, 1, pool=pool)))


def complete(backend: Backend, lease, node_id: str = "e0") -> bool:
    return backend.run(backend.node.complete_evaluation(node_id, lease.token, result(lease.task.serial, node_id)))


def begin(backend: Backend, count: int = 3, shared: bool = False) -> None:
    join(backend)
    assert backend.learner.evaluate(ORDER, problems(*range(count)), [], shared).known == count


def finished(backend: Backend) -> list[int]:
    return [found.problem for found in backend.learner.evaluate(ORDER, [], []).results]


def test_nodes_of_the_pool_lease_problems_of_their_version_and_no_tasks(backend: Backend) -> None:
    backend.learner.offer([Task(0, b"{}", 0, 4)])
    begin(backend)
    backend.join("n0", version=1)
    assert backend.lease(5, "e0", version=0) == backend.lease(5, "e0", version=2) == []
    leases = backend.lease(2, "e0", version=1)
    assert [(le.task, le.evaluation) for le in leases] == [(task, ORDER) for task in problems(0, 1)]
    [task] = backend.lease(5, "n0", version=1)
    assert (task.task.serial, task.evaluation) == (0, None), "the training fleet has its own work"
    assert backend.lease(5, "n0", version=1) == []
    first = [event.detail["node"] for event in backend.learner.events(-1) if event.kind == "first_lease"]
    assert first == ["n0"], "that of a task"


def test_a_shared_fleet_leases_problems_of_exactly_its_version_before_its_tasks(backend: Backend) -> None:
    backend.learner.offer([Task(0, b"{}", 0, 4)])
    begin(backend, 1, shared=True)
    backend.join("n0", version=1)
    assert [le.evaluation for le in backend.lease(5, "n0", version=0)] == [None]
    assert [le.evaluation for le in backend.lease(5, "n0", version=1)] == [ORDER]


def test_a_waiting_node_of_the_pool_is_served_by_an_offer(backend: Backend) -> None:
    backend.run(backend.node.register(node_report("n0", 1, 1, pool="eval")))
    offer = lambda: backend.learner.evaluate(ORDER, problems(0, 1), [])  # noqa: E731
    assert backend.lease_when(offer, version=1) == [0, 1]


def test_results_come_until_they_are_stored_and_count_in_no_figure_of_training(backend: Backend) -> None:
    begin(backend)
    leases = backend.lease(3, "e0", version=1)
    assert complete(backend, leases[0]) and complete(backend, leases[2])
    assert complete(backend, leases[0]), "a repetition"
    answer = backend.learner.evaluate(ORDER, [], [])
    assert answer.known == 3
    assert sorted(answer.results, key=lambda r: r.problem) == [result(0), result(2)]
    answer = backend.learner.evaluate(ORDER, problems(0, 1, 2)[1:2], [0])
    assert (answer.known, [found.problem for found in answer.results]) == (2, [2])
    status = backend.learner.status()
    assert msgspec.structs.asdict(status.evaluation) == {
        "version": 1, "pending": 0, "leased": 1, "finished": 2, "shared": False,
    }  # fmt: skip
    assert (status.groups_leased, status.groups_ready, status.tokens_generated_total) == (0, 0, 0)
    assert backend.learner.ledger() == []


def test_tokens_of_a_pool_node_are_counted_apart(backend: Backend) -> None:
    begin(backend)
    backend.beat(node_report("e0", 1, 1, pool="eval", evaluation_tokens=70))
    status = backend.learner.status()
    assert (status.evaluation_tokens_total, status.tokens_generated_total) == (70, 0)


def test_a_silent_a_restarted_and_a_leaving_node_lose_their_problems_to_others(backend: Backend) -> None:
    begin(backend)
    join(backend, "e1")
    [kept] = backend.lease(1, "e1", version=1)
    [silent] = backend.lease(1, "e0", version=1)
    for _ in range(2):
        backend.pass_time(0.7 * LEASE_S)
        assert backend.beat(node_report("e1", 1, 1, pool="eval"), kept.token).lost == []
    assert backend.beat(node_report("e0", 1, 1, pool="eval"), silent.token).lost == [silent.token]
    assert not complete(backend, silent), "another node may have it"
    assert [le.task.serial for le in backend.lease(1, "e0", version=1)] == [1]
    join(backend, "e0", pid=2)
    assert [le.task.serial for le in backend.lease(1, "e0", version=1)] == [2], "problem 1 was lost twice"
    backend.leave("e0")
    assert complete(backend, kept, "e1")
    assert [le.task.serial for le in backend.lease(9, "e1", version=1)] == [2]
    assert backend.learner.status().evaluation.finished == 2


def test_released_problems_go_back_and_one_that_is_lost_too_often_counts_as_failed(backend: Backend) -> None:
    begin(backend, 1)
    for _ in range(3):
        [lease] = backend.lease(1, "e0", version=1)
        backend.run(backend.node.release("e0", [lease.token]))
    for attempt in (1, 2):  # tasks.max_attempts
        [lease] = backend.lease(1, "e0", version=1)
        assert lease.attempt == attempt
        backend.run(backend.node.fail("e0", lease.token, "the engine died"))
    assert backend.lease(1, "e0", version=1) == []
    [failed] = backend.learner.evaluate(ORDER, [], []).results
    assert (failed.rewards, failed.errors) == ([0.0, 0.0], ["the engine died"] * 2)


def test_a_new_round_ends_the_old_one_and_none_ends_it_too(backend: Backend) -> None:
    begin(backend)
    [old] = backend.lease(1, "e0", version=1)
    again = msgspec.structs.replace(ORDER, incarnation=4)
    assert backend.learner.evaluate(again, [], []).known == 0
    assert not complete(backend, old), "of an earlier learner's version"
    assert backend.beat(node_report("e0", 1, 1, pool="eval"), old.token).lost == [old.token]
    backend.learner.evaluate(again, problems(0), [])
    backend.learner.evaluate(None, [], [])
    assert backend.lease(1, "e0", version=1) == []
    assert backend.learner.status().evaluation is None


def test_many_problems_are_offered_in_parts(backend: Backend) -> None:
    begin(backend, 1200)
    leases = backend.lease(3, "e0", version=1)
    for lease in leases:
        assert complete(backend, lease)
    assert sorted(finished(backend)) == [0, 1, 2]


def test_results_of_nodes_are_bounded_so_that_every_answer_reaches_the_learner(backend: Backend) -> None:
    join(backend)
    tasks = [msgspec.structs.replace(task, group_size=64) for task in problems(*range(8))]
    backend.learner.evaluate(ORDER, tasks, [])
    long = msgspec.structs.replace(
        result(0, "another"),
        rewards=[0.0] * 64,
        lengths=[0] * 64,
        stop_reasons=["x"] * 64,
        errors=["\U0001f600" * 1500] * 64,
    )
    for lease in backend.lease(8, "e0", version=1):
        assert backend.run(backend.node.complete_evaluation("e0", lease.token, long))
    found: list[EvaluationResult] = []
    while len(found) < 8:
        answer = backend.learner.evaluate(ORDER, [], [one.problem for one in found])
        assert answer.results and len(msgspec.msgpack.encode(answer.results)) <= ANSWER_BYTES + 9
        found += answer.results
    assert sorted(one.problem for one in found) == list(range(8))
    assert {(one.node_id, len(one.errors[0])) for one in found} == {("e0", TEXT_CHARS)}


@pytest.mark.parametrize("column", ["rewards", "lengths", "stop_reasons", "errors"])
def test_a_result_with_another_number_of_episodes_is_refused_and_can_be_failed(backend: Backend, column: str) -> None:
    begin(backend, 1)
    [lease] = backend.lease(1, "e0", version=1)
    odd = msgspec.structs.replace(result(0), **{column: getattr(result(0), column) * 2})
    with refused(BrokerError, "problem 0", "2 episodes"):
        backend.run(backend.node.complete_evaluation("e0", lease.token, odd))
    backend.run(backend.node.fail("e0", lease.token, "refused"))
    assert [le.attempt for le in backend.lease(1, "e0", version=1)] == [2]
