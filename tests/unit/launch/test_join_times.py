"""How long the newest node took to join, as `status` tells it."""

import io
from typing import Any

import msgspec
from rich.console import Console

from broker.contract import BrokerStatus, JoinTimes, NodeReport, NodeStatus, RunInfo
from broker.diagnosis.join_times import newest, sentence
from common.process.run_dir import RunDir
from launch.observe.job_view import render_status
from launch.observe.observation import Observation, as_json

TIMES = JoinTimes(1000.0, registered=2.0, engine=11.4, staged=11.6, active=11.7, leased=11.75, delivered=12.35)
SENTENCE = "joined in 12.35 s: engine 11.40, weights 0.30, lease 0.05, first group 0.60"


def node(name: str, times: JoinTimes, alive: bool = True) -> NodeStatus:
    return NodeStatus(NodeReport(name, 1, "here", "generating", 6, joined=times), 2, alive, 0.2)


def status(*nodes: NodeStatus) -> BrokerStatus:
    return BrokerStatus(
        pid=10, address="tcp://127.0.0.1:5", run=RunInfo("demo", "/runs/demo", 4, 1, 3, 60.0, 1 << 20, b"{}"),
        groups_pending=3, groups_ready=1, groups_leased=2, groups_taken=0, groups_committed=28, groups_dead=0,
        bytes_held=100, lease_expiries=0, stale_results=0, tokens_generated_total=500, tokens_wasted_total=0,
        learner=None, learner_last_seen_s=0.5, nodes=list(nodes),
    )  # fmt: skip


def test_each_stage_counts_from_the_one_before() -> None:
    assert sentence(TIMES) == SENTENCE


def test_nothing_is_said_before_the_first_group() -> None:
    assert sentence(msgspec.structs.replace(TIMES, delivered=0.0)) == ""
    assert newest([node("a", JoinTimes(1000.0, engine=3.0))]) == ""


def test_the_newest_living_node_that_works_is_told_of() -> None:
    later = msgspec.structs.replace(TIMES, started_s=2000.0)
    nodes = [node("a", TIMES), node("b", later), node("c", JoinTimes(3000.0)), node("d", later, alive=False)]
    assert newest(nodes) == f"b {SENTENCE}"


def test_status_shows_it_and_json_has_every_node(tmp_path) -> None:
    seen, run = Observation(status(node("a", TIMES)), live=True), RunDir(tmp_path)
    console = Console(file=io.StringIO(), width=200)
    console.print(render_status(run, seen))
    file: Any = console.file
    assert f"newest node: a {SENTENCE}" in file.getvalue()
    assert as_json(run, seen)["nodes"][0]["joined"]["active"] == 11.7


def test_a_node_of_an_earlier_release_says_nothing() -> None:
    older = {k: v for k, v in msgspec.to_builtins(node("a", TIMES).report).items() if k != "joined"}
    assert msgspec.convert(older, NodeReport).joined == JoinTimes()
