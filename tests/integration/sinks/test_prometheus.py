"""The sink prometheus, the dashboard and the alerts, against a real Prometheus that scrapes the real process."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from broker import wire
from broker.contract import LearnerReport
from broker.server.server import BrokerServer
from common.config.observing import TelemetryConfig
from common.json_lines import EventFile
from common.process.run_dir import RunDir
from common.waste import Waste
from tests.rigs.brokers import ask, dealer, node_report
from tests.rigs.configs import config_of, living_broker
from tests.rigs.processes import ROOT
from tests.rigs.redis_servers import free_port
from tests.rigs.sinks import EVALUATION, feeding, new_run, python_with_trackers, said, write_steps
from tests.rigs.waiting import until

FOLDER = ROOT / "launch" / "cluster" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboards" / "slipstream.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES if "alert" in rule}
# Intervals of the copies that the test runs: 1 s or 4 s for the shipped 15 s, no waiting in `for`, shorter windows.
SHORTER = {"15s": "1s", "for: \\d+m": "for: 0s", "\\[10m\\]": "[6s]", '"learner"} > 60': '"learner"} > 20'}


def get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return ""


class Fleet:
    """A living broker with a learner and two nodes, its sink, and a Prometheus that scrapes it."""

    def __init__(self, run: RunDir, broker: BrokerServer, socket: Any, port: int, prometheus_port: int) -> None:
        self.run, self.broker, self.socket = run, broker, socket
        self.port, self._prometheus = port, prometheus_port
        self._tokens = 0

    def report(self, version: int, node_version: int, waste: int = 0, learner: bool = True) -> None:
        """Every process reports; the nodes have sampled 1,000 tokens more, and wasted `waste` in all."""
        self._tokens += 1000
        if learner:
            told = LearnerReport(1, 0, "training", version, step=version, host="head")
            ask(self.socket, wire.Report(report=told))
        for name in ("n0", "n1"):
            told = node_report(name, 1, node_version, tokens_generated=self._tokens, tokens_per_s=10.0)
            told = msgspec.structs.replace(told, waste={"cancelled": Waste(waste, 0.0)})
            ask(self.socket, wire.Heartbeat(report=told, tokens=[]))

    def register(self) -> None:
        ask(self.socket, wire.Attach(report=LearnerReport(1, 0, "training", 1, step=1, host="head")))
        for name in ("n0", "n1"):
            ask(self.socket, wire.Register(report=node_report(name)))

    def scraped(self) -> str:
        return get(f"http://127.0.0.1:{self.port}/metrics")

    def api(self, path: str, **words: str) -> Any:
        text = get(f"http://127.0.0.1:{self._prometheus}/api/v1/{path}?{urllib.parse.urlencode(words)}")
        return json.loads(text)["data"] if text else None

    def has_data(self, query: str) -> bool:
        found = self.api("query", query=query.replace("$run", ".*"))
        return bool(found and found["result"])

    def firing(self) -> set[str]:
        alerts = (self.api("alerts") or {"alerts": []})["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def shortened(name: str, folder: Path, **more: str) -> None:
    text = (FOLDER / name).read_text()
    for pattern, value in {**SHORTER, **more}.items():
        text = re.sub(pattern, value, text)
    (folder / name).write_text(text)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("needs prometheus and promtool; on Debian: apt install prometheus")
    folder, python = tmp_path_factory.mktemp("prometheus"), python_with_trackers()
    port, prometheus_port = free_port(), free_port()
    run = new_run(folder, telemetry=TelemetryConfig(prometheus_port=port))
    write_steps(run, range(10), reward_mean=0.9, effective_sample_fraction=0.9)
    with run.metrics.open("ab") as file:
        file.write(EVALUATION % (9, 10, time.time()))
    events = EventFile(run.events, "learner")
    events.add("learner_started")
    events.add("publish", version=1)
    events.close()
    (run.path / "tensorboard").write_text("a file where TensorBoard's folder should be")
    longer = {"15s": "4s"}  # a scrape waits 3 s for a broker that does not answer
    shortened("prometheus.yml", folder, **longer, **{"127.0.0.1:9464": f"127.0.0.1:{port}"})
    shortened("rules.yml", folder)
    listen = f"--web.listen-address=127.0.0.1:{prometheus_port}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", listen]
    with living_broker(config_of(run.path)) as server, dealer(server.address) as socket:
        made = Fleet(run, server, socket, port, prometheus_port)
        made.register()
        with feeding(run, "prometheus", "tensorboard", python=python), (folder / "log").open("wb") as log:
            prometheus = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                until(made.scraped, "the sink listens", told=lambda: said(run))
                yield made
            finally:
                prometheus.kill()
                prometheus.wait()


def test_promtool_accepts_the_config_and_the_rules() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool; on Debian: apt install prometheus")
    subprocess.run(["promtool", "check", "config", str(FOLDER / "prometheus.yml")], check=True, capture_output=True)
    subprocess.run(["promtool", "check", "rules", str(FOLDER / "rules.yml")], check=True, capture_output=True)


def test_the_dashboard_has_unique_panels_of_the_provisioned_source() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/slipstream.yaml").read_text())["datasources"]
    targets = [target for panel in panels for target in panel.get("targets", [])]
    assert {part["datasource"]["uid"] for part in [*panels, *targets] if "datasource" in part} == {source["uid"]}
    for one, other in ((a, b) for a in panels for b in panels if a["id"] < b["id"]):
        a, b = one["gridPos"], other["gridPos"]
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart_x or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (one["title"], other["title"])


def test_the_page_names_every_alert() -> None:
    page = (ROOT / "docs" / "sinks.md").read_text()
    assert set(re.findall(r"`(Slipstream\w+)`", page)) == ALERTS.keys()


def test_images_are_pinned() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (FOLDER / source).exists()


@pytest.mark.slow
def test_every_query_of_dashboard_and_alerts_has_data_and_no_alert_fires(fleet: Fleet) -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    queries += [re.sub(r" [<>] [\d.]+$", "", expr) for expr in ALERTS.values()]
    queries += [rule["record"] for rule in RULES if "record" in rule]
    assert all(re.search(r" [<>] [\d.]+$", expr) for expr in ALERTS.values())
    missing = set(queries)

    def found() -> bool:
        fleet.report(2, 1)
        missing.difference_update([query for query in missing if fleet.has_data(query)])
        return not missing

    until(found, told=lambda: f"no data: {missing}", every_s=0.3)
    assert fleet.firing() == set()


@pytest.mark.slow
def test_series_of_processes_have_the_labels_of_node_role_and_host(fleet: Fleet) -> None:
    fleet.report(2, 1)
    for labels in ('node="n1",role="rollout",host="host"', 'node="learner",role="learner",host="head"'):
        query = f'slipstream_policy_version{{run="demo",{labels}}}'
        until(lambda query=query: fleet.has_data(query), query, every_s=0.3)
    until(lambda: fleet.has_data('slipstream_node_up{node="broker",role="broker"} == 1'), every_s=0.3)


@pytest.mark.slow
def test_a_node_that_left_has_no_series_any_more(fleet: Fleet) -> None:
    ask(fleet.socket, wire.Register(report=node_report("n2")))
    until(lambda: 'node="n2"' in fleet.scraped())
    ask(fleet.socket, wire.Leave(node_id="n2"))
    until(lambda: 'node="n2"' not in fleet.scraped())
    assert 'node="n1"' in fleet.scraped()


@pytest.mark.slow
def test_each_alert_fires_on_its_fault(fleet: Fleet) -> None:
    run = fleet.run
    until(lambda: fleet.has_data('slipstream_events_total{kind="ejection"} == 0'), every_s=0.3)
    events = EventFile(run.events, "learner")
    events.add("ejection", step=1, node="node-0", reason="it was silent")
    events.close()
    with run.events.open("ab") as file:
        old = {"time_s": time.time() - 10000, "kind": "checkpoint", "detail": {}, "source": "learner"}
        file.write(json.dumps(old).encode() + b"\n")
    write_steps(run, range(10, 150), reward_mean=0.0, effective_sample_fraction=0.1)
    missing = set(ALERTS) - {"SlipstreamLearnerSilent", "SlipstreamBrokerDown"}
    waste = 0

    def fired() -> bool:
        nonlocal waste
        waste += 900
        fleet.report(20, 1, waste)
        return fleet.firing() >= missing

    until(fired, told=lambda: f"{missing - fleet.firing()} do not fire", every_s=0.3)
    until(lambda: fleet.report(20, 1, waste, learner=False) or "SlipstreamLearnerSilent" in fleet.firing(), every_s=0.3)
    fleet.broker.stop()
    until(lambda: "SlipstreamBrokerDown" in fleet.firing(), every_s=0.3)
