"""CPU of `slipstream sinks` with Prometheus and TensorBoard for a fleet of 1,000 nodes and a long run.

A broker in this process has the nodes; each has reported once. The sink is scraped as Prometheus does, every
15 s; metrics.jsonl has --steps lines at the start and grows by one a second.

    python bench/sinks_scale.py [--nodes 1000] [--steps 20000] [--seconds 90]
"""

import contextlib
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import harness
import psutil

from broker.contract import LearnerReport
from broker.messaging import wire
from common.config.observing import TelemetryConfig
from common.json_lines import LineFile
from tests.broker_rig import ask, dealer, node_report
from tests.integration.sinks.sink_rig import feeding, new_run, state_of, step_line, write_steps
from tests.launch_rig import config_of, living_broker
from tests.redis_server import free_port
from tests.waiting import until

SCRAPE_S = 15


def scrape(port: int) -> tuple[float, int]:
    """(seconds, bytes) of one scrape; 0 bytes while nothing listens."""
    begun, data = time.perf_counter(), b""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        data = answer.read()
    return time.perf_counter() - begun, len(data)


def measure(folder: Path, nodes: int, steps: int, seconds: int, sinks: list[str]) -> dict[str, Any]:
    port = free_port()
    run = new_run(folder, telemetry=TelemetryConfig(prometheus_port=port))
    write_steps(run, range(steps))
    with living_broker(config_of(run.path)) as server, dealer(server.address) as socket:
        ask(socket, wire.Attach(report=LearnerReport(1, 0, "training", 2, step=2)))
        for number in range(nodes):
            ask(socket, wire.Register(report=node_report(f"node-{number}", version=1)))
        with feeding(run, *sinks) as process:
            until(lambda: all(state_of(run, name).step == steps - 1 for name in sinks), every_s=0.2)
            until(lambda: scrape(port)[1] > nodes * 100)
            lines, sidecar, scrapes = LineFile(run.metrics), psutil.Process(process.pid), []
            sidecar.cpu_percent()
            for number in range(seconds):
                if number % SCRAPE_S == 0:
                    scrapes.append(scrape(port))
                lines.write(step_line(steps + number))
                time.sleep(1.0)
            cpu_percent, memory = sidecar.cpu_percent(), sidecar.memory_info().rss
    return {
        "cpu_percent": cpu_percent,
        "scrape_ms": round(1000 * max(seconds for seconds, _ in scrapes)),
        "scrape_bytes": max(size for _, size in scrapes),
        "memory_mib": round(memory / 2**20),
    }


def main() -> None:
    options = harness.parser(__doc__, nodes=1000, steps=20000, seconds=90, sinks=["prometheus"]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.nodes, options.steps, options.seconds, options.sinks)
    measured = "CPU of the process that feeds trackers, one scrape per 15 s and one step per second"
    harness.save("sinks_scale", options, {"rounds": 1, "measured": measured, "steps": options.steps, **found})


if __name__ == "__main__":
    main()
