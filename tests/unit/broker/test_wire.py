"""The wire format: what decodes, what is refused and what the refusal names."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import wire
from broker.contract import (
    BrokerStatus,
    Evaluated,
    GroupWork,
    HeartbeatReply,
    LearnerReport,
    Lease,
    NodeReport,
    ServiceOrder,
    ServiceReport,
    ServiceStatus,
    StoredGroup,
)
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import Task
from tests.rigs.brokers import META
from tests.rigs.configs import status_of
from tests.rigs.refusals import refused
from tests.unit.broker.test_authorization import REQUESTS

ZERO = b"\xcb" + bytes(8)
HALF = b"\xcb\x3f\xe0" + bytes(6)
EXAMPLES = [request for request, _ in REQUESTS]


@pytest.mark.parametrize("request_", EXAMPLES, ids=lambda request: type(request).__name__)
def test_every_request_survives_the_round_trip(request_: wire.AnyRequest) -> None:
    payloads = request_.payloads
    assert wire.decode_request(wire.encode(request_), payloads) == request_
    with refused(wire.WireError, type(request_).__name__, f"{payloads + 1} payload") as error:
        wire.decode_request(wire.encode(request_), payloads + 1)
    assert error.value.request_id == request_.id


def test_answers_that_do_not_fit_the_request_are_refused() -> None:
    def answer(value: object) -> msgspec.Raw:
        reply = wire.decode_reply(wire.encode(wire.Answer(id=1, value=value)))
        assert isinstance(reply, wire.Answer)
        return reply.value

    offer, take = wire.Offer(tasks=[]), wire.Take(step=0, count=1, wait_s=0)
    with refused(wire.WireError, "Offer", "`int`", "`str`"):
        offer.read(answer("many"), ())
    with refused(wire.WireError, "Offer", "1 payload"):
        offer.read(answer(1), (b"group",))
    with refused(wire.WireError, "1 groups", "0 payload"):
        take.read(answer([StoredGroup(0, "n0", META)]), ())


def test_golden_bytes_of_a_lease_request_do_not_change() -> None:
    request = wire.AskLease(id=7, node_id="n0", run_id="r", version=3, max_groups=2, wait_s=0.5)
    golden = (
        b"\x88\xa4type\xa5lease\xa2id\x07\xa6schema\x02\xa7node_id\xa2n0\xa6run_id\xa1r\xa7version\x03\xaamax_groups"
        b"\x02\xa6wait_s\xcb?\xe0\x00\x00\x00\x00\x00\x00"
    )
    assert wire.encode(request) == golden
    assert wire.decode_request(golden, 0) == request
    former = b"\x87" + golden[1:].replace(b"\xa6run_id\xa1r", b"")  # nodes of earlier releases do not name the run
    assert wire.decode_request(former, 0) == msgspec.structs.replace(request, run_id="")


def test_fields_of_a_later_release_are_ignored_and_another_schema_is_refused_by_number() -> None:
    later = msgspec.msgpack.encode({"type": "status", "id": 3, "schema": 2, "verbose": True})
    assert wire.decode_request(later, 0) == wire.AskStatus(id=3)

    for body in ({"type": "status"}, {"type": "new thing"}, {"kind": "lease"}):
        header = msgspec.msgpack.encode({**body, "id": 9, "schema": 3})
        with refused(wire.WireError, "schema 3", wire.SCHEMA) as error:
            wire.decode_request(header, 0)
        assert error.value.request_id == 9


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ({"type": "lease", "id": 1}, ["`node_id`"]),
        ({"type": "take", "id": 1, "step": "one", "count": 1, "wait_s": 0}, ["`int`", "`str`", "`$.step`"]),
        ({"type": "steal", "id": 1}, ["'steal'"]),
    ],
)
def test_what_does_not_fit_the_schema_is_refused_with_the_reason(body: dict[str, object], facts: list[str]) -> None:
    with refused(wire.WireError, *facts) as error:
        wire.decode_request(msgspec.msgpack.encode(body), 0)
    assert error.value.request_id == 1


@given(st.binary(max_size=300), st.integers(0, 3))
def test_random_bytes_raise_nothing_but_wire_errors(data: bytes, payloads: int) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_request(data, payloads)
    with pytest.raises(wire.WireError):
        wire.decode_reply(data)


def without_position(golden: bytes) -> bytes:
    """The same message of an earlier release; it has one field less."""
    return bytes([golden[0] - 1]) + golden[1:].replace(b"\xa8position\xc0", b"")


def test_golden_bytes_of_evaluation_do_not_change() -> None:
    order = EvaluationOrder(3, 1, 0.5)
    offer = wire.Evaluate(id=7, order=order, stored=[2])
    golden = (
        b"\x8a\xa4type\xa8evaluate\xa2id\x07\xa6schema\x02\xabincarnation\xc0\xa8instance\xa0\xa8position\xc0\xa5order\x83"
        b"\xa7version\x03\xabincarnation\x01\xabtemperature" + HALF + b"\xa5tasks\x90\xa6stored\x91\x02\xa6shared\xc2"
    )
    assert (wire.encode(offer), wire.decode_request(golden, 0)) == (golden, offer)
    assert wire.decode_request(without_position(golden), 0) == offer
    result = EvaluationResult(2, [0.5], [5], ["stop"], [""], "e0", 3, 3, 0.5, 0.5)
    complete = wire.CompleteEvaluation(id=8, node_id="e0", token="t", result=result)
    golden = (
        b"\x87\xa4type\xb3complete_evaluation\xa2id\x08\xa6schema\x02\xa7node_id\xa2e0\xa6run_id\xa0\xa5token\xa1t\xa6result"
        b"\x8a\xa7problem\x02\xa7rewards\x91"
        + HALF
        + b"\xa7lengths\x91\x05\xacstop_reasons\x91\xa4stop\xa6errors\x91\xa0\xa7node_id\xa2e0"
        b"\xabversion_min\x03\xabversion_max\x03\xa9started_s" + HALF + b"\xa7seconds" + HALF
    )
    assert (wire.encode(complete), wire.decode_request(golden, 0)) == (golden, complete)


def test_a_lease_of_an_earlier_release_is_one_of_training() -> None:
    task = b"\x84\xa6serial\x00\xa7problem\xc4\x02{}\xa4seed\x01\xaagroup_size\x02"
    earlier = b"\x84\xa4task" + task + b"\xa5token\xa1t\xa7attempt\x01"
    lease = msgspec.msgpack.decode(earlier + b"\xa7lease_s\xcb@>\x00\x00\x00\x00\x00\x00", type=Lease)
    assert lease == Lease(Task(0, b"{}", 1, 2), "t", 1, 30.0, None)
    golden = msgspec.msgpack.encode(lease)
    assert golden.endswith(b"\xaaevaluation\xc0")


def test_golden_bytes_of_a_learners_report_do_not_change_and_one_without_alarms_is_read() -> None:
    sender = b"\xabincarnation\xc0\xa8instance\xa0\xa8position\xc0"
    head = b"\x89\xa4type\xa6report\xa2id\x07\xa6schema\x02" + sender + b"\xa6report"
    former = (
        b"\xa3pid\x05\xabincarnation\x01\xa5state\xa7waiting\xaepolicy_version\x03\xa4wait\x80\xa7since_s"
        + ZERO
        + b"\xafweights_address\xa0\xa4step\x00\xa8instance\xa0\xa5waste\x80\xaegroups_missing\x00\xaadeliveries\x90"
        b"\xb2deliveries_waiting\x00\xa4host\xa1h"
    )
    tail = b"\xa3log\xc0\xa8log_rank\xff"
    report = LearnerReport(5, 1, "waiting", 3, host="h", alarms=["loss"], paused="loss", run_id="r")
    request = wire.Report(id=7, report=report)
    new = b"\xa6alarms\x91\xa4loss\xa6paused\xa4loss\xa6run_id\xa1r\xaawaiting_on\xa0"
    golden = head + b"\xde\x00\x12" + former + new + tail
    assert (wire.encode(request), wire.decode_request(golden, 0)) == (golden, request)
    unset: dict[str, Any] = {"alarms": [], "paused": "", "run_id": ""}
    earlier = wire.Report(id=7, report=msgspec.structs.replace(report, **unset, former_wait="disk"))
    former = former.replace(b"\xa4wait\x80", b"\xaawaiting_on\xa4disk")  # a release whose waits were sentences
    assert wire.decode_request(without_position(head + b"\x8e" + former + tail), 0) == earlier
    assert earlier.report.waiting_on == "disk"


def test_golden_bytes_of_a_nodes_report_do_not_change_and_one_of_before_evaluation_is_read() -> None:
    head = b"\x87\xa4type\xa9heartbeat\xa2id\x07\xa6schema\x02\xa6report\xde\x00"
    first = (
        b"\xa7node_id\xa2e0\xa3pid\x01\xa4host\xa1h\xa5state\xaagenerating\xaepolicy_version\x03\xa4wait\x80\xa7since_s"
        + ZERO
        + b"\xb0tokens_generated\x00\xadtokens_wasted\x00\xactokens_per_s"
        + ZERO
        + b"\xb0episodes_running\x00\xb2generation_stall_s"
        + ZERO
        + b"\xa5flips\x00\xb5canary_max_difference"
        + ZERO
        + b"\xa5waste\x80\xa6groups\x91"
    )
    group = (
        b"\xa6serial\x04\xa7samples\x02\xa8finished\x00\xa5age_s"
        + ZERO
        + b"\xa6tokens\x00\xa5turns\x00\xaeepisode_tokens\x00\xa5state\xa6queued\xa7state_s"
        + ZERO
    )
    last = (
        b"\xabconcurrency\x00\xaekv_cache_usage"
        + ZERO
        + b"\xabpreemptions\x00\xafprefix_hit_rate"
        + ZERO
        + b"\xaesamples_failed\x80\xa6joined\x87"
    )
    for name in (b"\xa9started_s", b"\xaaregistered", b"\xa6engine", b"\xa6staged", b"\xa6active", b"\xa6leased"):
        last += name + ZERO
    last += b"\xa9delivered" + ZERO
    tail = b"\xa6tokens\x90\xa3log\xc0"
    work = GroupWork(4, 2, evaluates=3)
    report = NodeReport("e0", 1, "h", "generating", 3, groups=[work], pool="eval", evaluation_tokens=9, instance="i")
    report = msgspec.structs.replace(report, run_id="r")
    request = wire.Heartbeat(id=7, report=report, tokens=[])
    new = b"\xa4pool\xa4eval\xb1evaluation_tokens\x09\xa8instance\xa1i\xa6run_id\xa1r\xaawaiting_on\xa0"
    golden = head + b"\x1b" + first + b"\x8a" + group + b"\xa9evaluates\x03" + last + new + tail + b"\xa5spans\xc0"
    assert (wire.encode(request), wire.decode_request(golden, 0)) == (golden, request)
    former = head.replace(b"\x87", b"\x86", 1) + b"\x16" + first + b"\x89" + group + last + tail
    earlier: dict[str, Any] = {"groups": [GroupWork(4, 2)], "pool": "", "evaluation_tokens": 0}
    report = msgspec.structs.replace(report, **earlier, instance="", run_id="")
    assert wire.decode_request(former, 0) == msgspec.structs.replace(request, report=report)


def test_golden_bytes_of_answers_do_not_change_and_those_of_an_earlier_release_are_read() -> None:
    def read(request: wire.AnyRequest, golden: bytes) -> object:
        reply = wire.decode_reply(golden)
        assert isinstance(reply, wire.Answer)
        return request.read(reply.value, ())

    head, position = b"\x85\xa4type\xa6answer\xa2id\x07\xa6schema\x02\xa5value", b"\xa8position\xc0"
    heartbeat = wire.Heartbeat(id=7, report=NodeReport("e0", 1, "h", "generating", 3), tokens=[])
    former = b"\xa4lost\x90\xafweights_address\xa0\xb3learner_incarnation\x00\xa5drain\xc2\xa4stop\xc2\xa8log_rank\xff"
    golden = head + b"\x88" + former + b"\xa6time_s" + HALF + b"\xaaspan_bytes\x09" + position
    reply = HeartbeatReply(time_s=0.5, span_bytes=9)
    assert wire.encode(wire.Answer(id=7, value=reply)) == golden
    assert read(heartbeat, golden) == read(heartbeat, without_position(golden)) == reply
    assert read(heartbeat, head + b"\x86" + former + position) == HeartbeatReply()

    result = EvaluationResult(2, [0.5], [5], ["stop"], [""], "e0", 3, 3, 0.5, 0.5)
    golden = (
        head
        + b"\x82\xa5known\x01\xa7results\x91\x8a\xa7problem\x02\xa7rewards\x91"
        + HALF
        + b"\xa7lengths\x91\x05\xacstop_reasons\x91\xa4stop\xa6errors\x91\xa0\xa7node_id\xa2e0\xabversion_min\x03"
        b"\xabversion_max\x03\xa9started_s" + HALF + b"\xa7seconds" + HALF + position
    )
    assert wire.encode(wire.Answer(id=7, value=Evaluated(1, [result]))) == golden
    assert read(wire.Evaluate(id=7, order=None), golden) == Evaluated(1, [result])


def test_golden_bytes_of_a_scorers_report_and_its_order_do_not_change() -> None:
    report = ServiceReport("scorer-judge", "h", 5, "scorer", "serving", "http://h:1/v1", 0.5, "demo")
    request = wire.ReportService(id=7, report=report)
    golden = (
        b"\x85\xa4type\xaereport_service\xa2id\x07\xa6schema\x02\xa6report\x89\xa4name\xacscorer-judge\xa4host\xa1h"
        b"\xa3pid\x05\xa4kind\xa6scorer\xa5state\xa7serving\xa3url\xadhttp://h:1/v1\xa7since_s" + HALF
    )
    golden += b"\xa3run\xa4demo\xa7leaving\xc2\xa3log\xc0"
    assert (wire.encode(request), wire.decode_request(golden, 0)) == (golden, request)
    assert msgspec.msgpack.encode(ServiceOrder(stop=True)) == b"\x82\xa4stop\xc3\xa3log\xc2"


def test_a_status_of_an_earlier_release_has_no_services_and_an_earlier_reader_skips_them() -> None:
    judge = ServiceStatus("scorer-judge", "h", 5, "scorer", "serving")
    status = status_of(services=[judge])
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(status))
    assert list(fields)[-1] == "services", "appended"
    assert fields.pop("services") == [msgspec.to_builtins(judge)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=BrokerStatus).services == []
