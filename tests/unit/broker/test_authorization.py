"""Every request type of the wire, sent with the key of every role to a broker that checks keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from broker import wire
from broker.contract import LearnerReport, MachineReport, ServiceReport, WeightRequest
from broker.delivery.node_rules import NodeRules
from broker.server.request_guard import PERMITTED, refusal
from broker.server.server import BrokerServer
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Task
from common.security.credentials import Identity, KeyFolder, load_credential
from launch.keys import make
from tests.rigs.brokers import META, ask, dealer, new_state, node_report, run_info, serving

REPORT = LearnerReport(1, 1, "training", 0, instance="a")
RESULT = EvaluationResult(0, [1.0], [3], ["stop"], [""], "n0", 1, 1)
AS_LEARNER: dict[str, Any] = {"incarnation": 1, "instance": "a"}
# The reference, written by hand: which roles may send which request.
LEARNER, NODE, OBSERVING = {"learner"}, {"node"}, {"learner", "observer"}
REQUESTS: list[tuple[wire.Request[Any], set[str]]] = [
    (wire.Attach(id=1, report=REPORT, **AS_LEARNER), LEARNER),
    (wire.Offer(id=2, tasks=[Task(0, b"{}", 0, 2)], **AS_LEARNER), LEARNER),
    (wire.Take(id=3, step=0, count=1, wait_s=0, **AS_LEARNER), LEARNER),
    (wire.Regenerate(id=4, step=0, serials=[], **AS_LEARNER), LEARNER),
    (wire.Filter(id=5, step=0, serials=[], most_replaced=0, **AS_LEARNER), LEARNER),
    (wire.Commit(id=6, step=0, **AS_LEARNER), LEARNER),
    (wire.Evaluate(id=23, order=EvaluationOrder(1, 1, 0.0), **AS_LEARNER), LEARNER),
    (wire.Report(id=7, report=REPORT, **AS_LEARNER), LEARNER),
    (wire.Gather(id=22, report=MachineReport("m", "h", "a", "a:1", {})), LEARNER),
    (wire.Stop(id=19), LEARNER),
    (wire.SetWeights(id=23, request=WeightRequest("r", {"a": 1.0})), LEARNER),
    (wire.Register(id=8, report=node_report("a")), NODE),
    (wire.AskLease(id=9, node_id="a", version=0, max_groups=1, wait_s=0), NODE),
    (wire.Cancel(id=10, target=9), NODE),
    (wire.Heartbeat(id=11, report=node_report("a"), tokens=[]), NODE),
    (wire.Complete(id=12, node_id="a", token="t", meta=META), NODE),
    (wire.CompleteEvaluation(id=24, node_id="a", token="t", result=RESULT), NODE),
    (wire.Fail(id=13, node_id="a", token="t", reason="because"), NODE),
    (wire.Release(id=14, node_id="a", tokens=[]), NODE),
    (wire.Leave(id=15, node_id="a"), NODE),
    (wire.ReportService(id=25, report=ServiceReport("a", "h", 1, "scorer", "serving")), NODE),
    (wire.AskStatus(id=16), {"learner", "node", "observer"}),
    (wire.AskLedger(id=17), OBSERVING),
    (wire.AskEvents(id=18, after=-1), OBSERVING),
    (wire.AskLog(id=20, role="broker"), OBSERVING),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerServer, KeyFolder]]:
    folder = KeyFolder(tmp_path_factory.mktemp("keys") / "k")
    make(folder, ["a"])
    state = new_state(run_info(lease_s=1e6))
    NodeRules(state).register(node_report("stays"))  # so that the broker does not end when it is told to stop
    with serving(state=state, credentials=str(folder.path)) as server:
        yield server, folder


def ask_as(server: BrokerServer, role: Any, credential: Path, request: wire.Request[Any]) -> Any:
    with dealer(server.address, load_credential(credential, role)) as socket:
        return ask(socket, request, *[b"group"] * request.payloads)


@pytest.mark.parametrize("role", ["learner", "node", "observer"])
@pytest.mark.parametrize(("request_", "roles"), REQUESTS, ids=[type(request).__name__ for request, _ in REQUESTS])
def test_a_role_may_send_its_own_requests_and_no_other(
    broker: tuple[BrokerServer, KeyFolder], role: str, request_: wire.Request[Any], roles: set[str]
) -> None:
    server, folder = broker
    credential = folder.nodes / "a.json" if role == "node" else folder.path / f"{role}.json"
    before = server_denials(broker)
    reply = ask_as(server, role, credential, request_)
    denied = isinstance(reply, wire.Refused) and type(request_).__name__ in reply.reason
    assert denied == (role not in roles), reply
    assert server_denials(broker) - before == denied


def server_denials(broker: tuple[BrokerServer, KeyFolder]) -> int:
    return ask_as(broker[0], "observer", broker[1].observer, wire.AskStatus(id=99)).denied_requests


def test_the_reference_names_every_request_and_those_of_a_node_name_the_node_that_they_speak_for() -> None:
    """Except for Cancel, which only reaches requests of its own connection, and for reading the status."""
    assert [type(request) for request, _ in REQUESTS] == list(get_args(wire.AnyRequest))
    assert PERMITTED["broker"] == PERMITTED["observer"] == (wire.ObserverRequest,), "another process only observes"
    node = [request for request, roles in REQUESTS if "node" in roles]
    assert [type(r) for r in node if getattr(r, "node", None) != "a"] == [wire.Cancel, wire.AskStatus]


@pytest.mark.parametrize(("node_id", "of"), [("a", "a"), ("a:41_3", "a"), ("a.b", "a.b"), ("a.b:a:x", "a.b")])
def test_a_node_id_belongs_to_the_credential_whose_name_it_begins_with(node_id: str, of: str) -> None:
    """The order does not count: a stranger that registers a node's id first cannot keep the node out."""
    for name in ("a", "a.b", "b"):
        sender = Identity("A" * 40, "node", name)
        lease = wire.AskLease(id=1, node_id=node_id, version=0, max_groups=1, wait_s=0)
        service = wire.ReportService(id=2, report=ServiceReport(node_id, "h", 1, "scorer", "serving"))
        for request in (wire.Register(id=0, report=node_report(node_id)), lease, service):
            why = refusal(sender, request)
            assert (why == "") == (name == of)
            assert why == "" or (repr(name) in why and repr(node_id) in why)
