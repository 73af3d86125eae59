"""Transcripts that come with failed groups: checked, named by the broker, written, or dropped and counted."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker import wire
from broker.client.connection import AsyncBrokerClient
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.delivery.state import DeliveryState
from broker.journal.run_folder import failed_transcripts
from common.config.schema import TelemetryConfig
from common.transcripts import FAILED_BYTES, Transcript, Turn
from tests.contract.backends import tasks
from tests.rigs.brokers import job, new_state, node_report, run_info
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, read_jsonl, until
from tests.unit.broker.conftest import Running


@pytest.fixture
def state() -> DeliveryState:
    made = new_state(run_info(groups_per_step=4))
    LearnerRules(made).offer(tasks(0, 1))
    NodeRules(made).register(node_report("n0"))
    return made


def transcript(text: str = "no", **changes: Any) -> bytes:
    turn = Turn(author="policy", text=text, tokens=[1], pieces=[text])
    facts = {"serial": 99, "sample": 3, "node_id": "someone", "time_s": 0.0, "why": ["best"], "step": 5}
    return msgspec.json.encode(Transcript(turns=[turn], **{**facts, **changes}))


def fail(state: DeliveryState, data: bytes) -> None:
    lease = NodeRules(state).lease("n0", 0, 1)[0]
    NodeRules(state).fail("n0", lease.token, "every sample failed", 10, 1.0, data)


def kept(path: Path) -> list[dict[str, Any]]:
    return [line for file in sorted((path / "transcripts").glob("failed-*.jsonl")) for line in read_jsonl(file)]


def test_it_is_written_under_the_task_and_node_that_failed_whatever_it_claims(state, tmp_path) -> None:
    state.transcripts = files = failed_transcripts(tmp_path, TelemetryConfig())
    fail(state, transcript(error="no calculator").replace(b'"serial":99', b'"serial":\n99'))
    NodeRules(state).fail("n0", "an old token", "late", 0, 0.0, transcript())
    files.close()
    (line,) = kept(tmp_path)
    assert (line["serial"], line["sample"], line["node_id"]) == (0, 3, "n0")
    assert (line["why"], line["step"], line["error"]) == (["failed"], None, "no calculator")
    assert line["time_s"] > 1e9
    assert state.status().transcripts_dropped == 0


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b"\xff" * 10, b'{"serial": "one"}', b"[" * 10_000, transcript("\x01" * 50_000)],
    ids=["torn", "a list", "bytes", "another type", "deep", "long when it is written again"],
)
def test_what_is_no_transcript_is_dropped_and_counted_and_the_group_fails_all_the_same(state, tmp_path, data) -> None:
    state.transcripts = files = failed_transcripts(tmp_path, TelemetryConfig())
    fail(state, data)
    files.close()
    assert kept(tmp_path) == []
    assert state.status().transcripts_dropped == 1
    assert state.ledger()[0].reason == "every sample failed"


def test_off_keeps_none_and_the_folder_is_bounded(state, tmp_path) -> None:
    assert failed_transcripts(tmp_path, TelemetryConfig(transcripts="none")) is None
    fail(state, transcript())
    assert state.status().transcripts_dropped == 0
    assert not (tmp_path / "transcripts").exists()

    files = failed_transcripts(tmp_path, TelemetryConfig(transcripts_mib=1))
    for serial in range(200):
        files.put((serial, "n0", transcript("a" * 1500)))
    files.close()
    assert files.dropped == 0
    assert sum(path.stat().st_size for path in (tmp_path / "transcripts").iterdir()) <= 1 << 18
    assert kept(tmp_path)[-1]["serial"] == 199


def test_the_message_carries_it_and_a_longer_one_is_refused() -> None:
    request = wire.Fail(id=7, node_id="n0", token="t", reason="why", tokens=3, seconds=0.5, transcript=b"{}")
    golden = (
        b"\x8a\xa4type\xa4fail\xa2id\x07\xa6schema\x02\xa7node_id\xa2n0\xa6run_id\xa0\xa5token\xa1t\xa6reason\xa3why"
        b"\xa6tokens\x03\xa7seconds\xcb?\xe0\x00\x00\x00\x00\x00\x00\xaatranscript\xc4\x02{}"
    )
    assert wire.encode(request) == golden
    assert wire.decode_request(golden, 0) == request
    former = golden.replace(b"\x8a\xa4type", b"\x88\xa4type").replace(b"\xaatranscript\xc4\x02{}", b"")
    former = former.replace(b"\xa6run_id\xa0", b"")
    assert wire.decode_request(former, 0) == msgspec.structs.replace(request, transcript=b"")
    long = msgspec.structs.replace(request, transcript=b"a" * (FAILED_BYTES + 1))
    with refused(wire.WireError, FAILED_BYTES):
        wire.decode_request(wire.encode(long), 0)


def test_a_broker_process_writes_what_nodes_send_and_counts_what_it_cannot(tmp_path: Path, running: Running) -> None:
    async def work(address: str) -> None:
        node = AsyncBrokerClient(address, deadline_s=LIMIT_S)
        await node.register(node_report("n0"))
        for data in (transcript("from n0"), b"{"):
            (lease,) = await node.lease("n0", 0, 1, 0.0)
            await node.fail("n0", lease.token, "why", 1, 1.0, data)
        await node.close()

    with running(job(tmp_path)) as broker, broker.client() as learner:
        learner.offer(tasks(0, 1))
        asyncio.run(work(broker.address))
        until(lambda: learner.status().transcripts_dropped == 1)
    (line,) = kept(tmp_path)
    assert line["turns"][0]["text"] == "from n0"
