"""The run folder that benchmarks and tests read: its files decode as those of a real job, and are the same again."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from broker.contract import BrokerEvent, BrokerStatus, LedgerEntry
from broker.diagnosis.stalls import explain
from common.config.loading import load_config
from common.json_lines import Event, lines_of
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from common.segments import segments
from common.spans import SpanBatch
from common.transcripts import Transcript
from tests.rigs.telemetry import Fixture


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("fixture") / "run"
    Fixture(folder, steps=100, nodes=7).write(0, transcripts=12)
    return RunDir(folder)


def test_config_and_metrics_are_those_of_a_run_with_restarts(run: RunDir) -> None:
    lines = read_tail(run.metrics, StepMetrics).lines
    assert load_config(run.config).run.steps == 100
    assert [line.step for line in lines] == list(range(100))
    assert {line.incarnation for line in lines} == {0, 1, 2, 3}
    assert all(line.time_s < after.time_s for line, after in pairwise(lines))
    assert lines[-1].reward_mean > lines[0].reward_mean + 0.3


def test_events_are_lines_of_the_broker_and_of_others(run: RunDir) -> None:
    of_broker = [e for e in lines_of(run.events.read_bytes(), BrokerEvent)]
    events = list(lines_of(run.events.read_bytes(), Event))
    kinds = {event.kind for event in events}
    assert len(of_broker) + sum(event.source != "" for event in events) == len(events)
    assert kinds >= {"join", "leave", "node_lost", "ejection", "publish", "learner_started", "role_crashed", "commit"}
    assert [e.index for e in of_broker] == sorted({e.index for e in of_broker})


def test_status_has_a_node_that_stops_the_learner(run: RunDir) -> None:
    status = msgspec.json.decode(run.status_json.read_bytes(), type=BrokerStatus)
    assert len(status.nodes) == 7
    assert [node.report.node_id for node in status.nodes if not node.alive] == ["node-0006"]
    assert {stall.kind for stall in explain(status)} >= {"groups", "broadcast", "flipping", "environment", "node_gone"}


def test_ledger_has_every_task_once(run: RunDir) -> None:
    entries = msgspec.json.decode(run.ledger_json.read_bytes(), type=list[LedgerEntry])
    assert [entry.serial for entry in entries] == list(range(len(entries)))
    assert {entry.state for entry in entries} == {"committed", "dead", "leased", "pending"}


def test_trace_has_every_process(run: RunDir) -> None:
    batches = [b for path in run.trace.iterdir() for b in lines_of(path.read_bytes(), SpanBatch)]
    assert {batch.who for batch in batches} == {"learner", *(f"node-{number:04d}" for number in range(7))}
    assert {s.kind for b in batches for s in b.spans} == {"state", "step", "publish", "flip", "episode"}


def test_transcripts_have_every_kind_of_turn_and_token(run: RunDir) -> None:
    (path,) = segments(run.transcripts, "steps")
    told = list(lines_of(path.read_bytes(), Transcript))
    turns = [turn for transcript in told for turn in transcript.turns]
    assert len(told) == 12
    assert {turn.author for turn in turns} == {"prompt", "policy", "environment"}
    assert all("".join(turn.pieces) == turn.text and len(turn.pieces) == len(turn.tokens) for turn in turns)
    assert any(len(turn.version_runs) > 1 for turn in turns) and any(0 in turn.trained for turn in turns)
    assert max(ratio for turn in turns for ratio in turn.ratios) > 1.1


def test_the_same_arguments_give_the_same_bytes_and_appending_continues_them(tmp_path: Path) -> None:
    whole, grown = Fixture(tmp_path / "a", 9), Fixture(tmp_path / "b", 9)
    whole.write(0, 36)
    grown.steps = 8
    grown.write(0, 36)
    grown.steps = 9
    grown.write(8, 4)
    for name in ("metrics.jsonl", "events.jsonl", "transcripts/steps-00000000.jsonl", "trace/fixture-00000000.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
