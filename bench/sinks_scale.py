"""CPU of `slipstream sinks` with Prometheus for a fleet of 1,000 nodes and a long run.

A broker in this process has the nodes; each has reported once. The sink is scraped as Prometheus does, every
15 s; metrics.jsonl has --steps lines at the start and grows by one a second.

    python bench/sinks_scale.py [--nodes 1000] [--steps 20000] [--seconds 90]
"""

import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import harness
import psutil

from broker import wire
from broker.contract import LearnerReport
from common.config.observing import TelemetryConfig
from common.json_lines import LineFile
from tests.rigs.brokers import ask, dealer, node_report
from tests.rigs.configs import config_of, living_broker
from tests.rigs.redis_servers import free_port
from tests.rigs.sinks import feeding, new_run, state_of, step_line, write_steps
from tests.rigs.waiting import until

SCRAPE_S = 15


def measure(folder: Path, options: harness.Options) -> dict[str, Any]:
    port, scrapes = free_port(), []
    run = new_run(folder, telemetry=TelemetryConfig(prometheus_port=port))
    write_steps(run, range(options.steps))
    with living_broker(config_of(run.path)) as server, dealer(server.address) as socket:
        ask(socket, wire.Attach(report=LearnerReport(1, 0, "training", 2, step=2)))
        for number in range(options.nodes):
            ask(socket, wire.Register(report=node_report(f"node-{number}", version=1)))
        with feeding(run, "prometheus") as process:
            until(lambda: state_of(run, "prometheus").step == options.steps - 1, every_s=0.2)
            lines, sidecar = LineFile(run.metrics), psutil.Process(process.pid)
            sidecar.cpu_percent()
            for number in range(options.seconds):
                begun = time.perf_counter()
                if number % SCRAPE_S == 0:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                        scrapes.append((len(answer.read()), time.perf_counter() - begun))
                lines.write(step_line(options.steps + number))
                time.sleep(max(0.0, begun + 1.0 - time.perf_counter()))
            cpu_percent, memory = sidecar.cpu_percent(), sidecar.memory_info().rss
    figures = {"scrape_ms": round(1000 * max(took_s for _, took_s in scrapes)), "scrape_bytes": scrapes[-1][0]}
    return figures | {"cpu_percent": cpu_percent, "memory_mib": round(memory / 2**20), "steps": options.steps}


@harness.script(nodes=1000, steps=20000, seconds=90)
def main(options: harness.Options) -> harness.Figures:
    with tempfile.TemporaryDirectory() as folder:
        return {"rounds": 1, **measure(Path(folder), options)}
