"""The live page of a large run: first paint, delay of an update, and the server's CPU and memory.

    python bench/web_page.py            1,000 nodes and 100,000 steps; writes bench/results/web_page.json in 3 minutes

A folder from bench/run_fixture.py stands for the run; nothing else runs. Chromium draws the page without a GPU.

- First paint: from the navigation to the first content (the browser's own figure), and to the reward's curve. `cold`:
  the server has just started and reads the run. `warm`: it has read it.
- Delay: from the moment before a metrics line is written to the change of the reward's chart in the page.
- CPU: of the server's process, while the page is open and a step arrives every second; and without a browser.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import msgspec
import psutil

from bench.run_fixture import Fixture
from tests.chromium import Page, browser
from tests.waiting import until

CURVE = "document.querySelector('.chart path.line') !== null"
LABEL = "document.querySelector('.plot').ariaLabel ?? ''"
WATCH = f"""(() => {{
  globalThis.curve_ms = null;
  const look = () => {{ if ({CURVE}) globalThis.curve_ms = performance.now(); else requestAnimationFrame(look); }};
  look();
}})()"""
CHANGE = """new Promise((done) => {
  const plot = document.querySelector('.plot');
  new MutationObserver((_, all) => { if (plot.ariaLabel.includes('to %s')) { all.disconnect(); done(Date.now()); } })
    .observe(plot, {attributes: true});
})"""


def start(run: Path) -> tuple[subprocess.Popen[str], str]:
    """The server and its address."""
    command = [sys.executable, "-m", "launch.cli", "web", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


def paint(page: Page, address: str) -> dict[str, float]:
    """Seconds from the navigation to the first content and to the reward's curve, of whatever steps there are."""
    page.open("about:blank")
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    page.open(address)
    curve_ms = page.until("globalThis.curve_ms")
    content_ms = page.until("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])
    return {"first_content_s": content_ms / 1e3, "reward_curve_s": curve_ms / 1e3}


def delay(page: Page, fixture: Fixture) -> float:
    """Seconds from before a line is written until the chart has it."""
    fixture.steps += 1
    shown = f"{fixture.steps - 1:,}"
    page.get(f"globalThis.changed = {CHANGE % shown}; 0")
    line = msgspec.json.encode(fixture.metrics(fixture.steps - 1)) + b"\n"
    before_s = time.time()
    with fixture.run.metrics.open("ab") as file:
        file.write(line)
    return page.get("globalThis.changed") / 1e3 - before_s


def used(process: psutil.Process, seconds: float, each_s: Any = lambda: None) -> float:
    """Share of a core that a process uses; `each_s` is called every second."""
    times, began = process.cpu_times(), time.monotonic()
    for _ in range(round(seconds)):
        each_s()
        time.sleep(1.0)
    now = process.cpu_times()
    return (now.user + now.system - times.user - times.system) / (time.monotonic() - began)


def main() -> None:
    options = harness.parser(__doc__, steps=100_000, nodes=1000, rounds=5, updates=20, seconds=30).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slipstream-web-"))
    fixture = Fixture(folder / "run", options.steps, options.nodes)
    fixture.write(0, 2000)
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for number in range(options.rounds):
        server, address = start(fixture.run.path)
        with browser(folder) as page:
            page.size(1440)
            found["cold"].append(paint(page, address))
            until(lambda: page.get(LABEL).find(f"to {fixture.steps - 1:,}") >= 0, "every step is read")
            found["warm"].append(paint(page, address))
            print(number, found["cold"][-1], found["warm"][-1], flush=True)
            if number == options.rounds - 1:
                process = psutil.Process(server.pid)
                delays = [delay(page, fixture) for _ in range(options.updates)]
                busy = used(process, options.seconds, lambda: delay(page, fixture))
                memory_mib = process.memory_info().rss / 2**20
                page.open("about:blank")
                time.sleep(5.0)
                idle = used(process, options.seconds)
        server.terminate()
        server.wait()
    pages = [{"cold": cold, "warm": warm} for cold, warm in zip(found["cold"], found["warm"], strict=True)]
    figures = {
        "rounds": options.rounds,
        "metrics_mib": round(fixture.run.metrics.stat().st_size / 2**20),
        "pages": [{kind: {k: round(v, 3) for k, v in p[kind].items()} for kind in p} for p in pages],
        "changes": [{"delay_s": round(seconds, 3)} for seconds in delays],
        "cpu_open": round(busy, 3),
        "cpu_alone": round(idle, 4),
        "memory_mib": round(memory_mib),
    }
    harness.save("web_page", options, figures, ("starlette", "uvicorn"))


if __name__ == "__main__":
    main()
