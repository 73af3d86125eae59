"""Failed samples by reason, from the nodes' reports to `status`."""

import io
import json
from typing import Any

import msgspec
from rich.console import Console

from broker.contract import BrokerStatus, NodeReport, NodeStatus, RunInfo
from common.process.run_dir import RunDir
from launch.observe import waste_view
from launch.observe.job_view import render_status
from launch.observe.observation import Observation, as_json


def status(*failed: dict[str, int]) -> BrokerStatus:
    nodes = [
        NodeStatus(NodeReport(f"node-{i}", i, "here", "generating", 6, samples_failed=counts), 2, True, 0.2)
        for i, counts in enumerate(failed)
    ]
    return BrokerStatus(
        pid=10, address="tcp://127.0.0.1:5", run=RunInfo("demo", "/runs/demo", 4, 1, 3, 60.0, 1 << 20, b"{}"),
        groups_pending=3, groups_ready=1, groups_leased=2, groups_taken=0, groups_committed=28, groups_dead=0,
        bytes_held=100, lease_expiries=0, stale_results=0, tokens_generated_total=500, tokens_wasted_total=0,
        learner=None, learner_last_seen_s=0.5, nodes=nodes,
    )  # fmt: skip


def text_of(run: RunDir, found: BrokerStatus) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_status(run, Observation(found, live=True)))
    file: Any = console.file
    return file.getvalue()


def test_failed_samples_are_summed_by_reason_and_shown(tmp_path) -> None:
    found = status({"timeout": 3, "environment_flood": 1}, {"timeout": 9}, {})
    run = RunDir(tmp_path)
    assert waste_view.failed_samples(found, run) == {"environment_flood": 1, "timeout": 12}
    assert "13 samples failed: 12 timeout, 1 environment_flood" in text_of(run, found)
    told = as_json(run, Observation(found, live=True))
    assert told["samples_failed"] == {"environment_flood": 1, "timeout": 12}
    assert told["nodes"][1]["samples_failed"] == {"timeout": 9}


def test_nothing_is_said_where_nothing_failed(tmp_path) -> None:
    assert "failed" not in text_of(RunDir(tmp_path), status({}, {}))


def test_of_a_run_whose_nodes_are_gone_the_trained_groups_tell(tmp_path) -> None:
    run = RunDir(tmp_path)
    for step, failed in enumerate(({"timeout": 3}, {"environment_error": 2, "timeout": 1})):
        line = {"step": step, "policy_version": step + 1, "samples_failed_by_reason": failed}
        with run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert waste_view.failed_samples(status(), run) == {"environment_error": 2, "timeout": 4}


def test_a_report_of_a_node_that_does_not_count_failures_yet_still_decodes() -> None:
    report = status({"timeout": 3}).nodes[0].report
    older = {k: v for k, v in msgspec.to_builtins(report).items() if k != "samples_failed"}
    assert msgspec.convert(older, NodeReport).samples_failed == {}
