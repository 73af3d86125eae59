"""The live page of a large run: first paint, delay of an update, and the server's CPU and memory.

    python bench/web_page.py            1,000 nodes and 100,000 steps; writes bench/results/web_page.json in 3 minutes

A folder from tests/rigs/telemetry.py stands for the run; nothing else runs. Chromium draws the page without a GPU.

- First paint: from the navigation to the first content (the browser's own figure), and to the reward's curve. `cold`:
  the server has just started and reads the run. `warm`: it has read it.
- Delay: from the moment before a metrics line is written to the change of the reward's chart in the page.
- CPU: of the server's process, while the page is open and a step arrives every second; and without a browser.
"""

import time
from collections.abc import Callable
from typing import Any

import harness
import msgspec
import psutil

from tests.rigs.chromium import Page, browser, serving
from tests.rigs.telemetry import Fixture

LOOK = "new Promise((done) => { const look = () => { if (%s) done(%s); else requestAnimationFrame(look); }; look(); })"
CURVE = LOOK % ("document.querySelector('.chart canvas')", "globalThis.curve_ms = performance.now()")
SHOWN = "(document.querySelector('.plot')?.ariaLabel ?? '').includes('to {}')"


def paint(page: Page, address: str) -> dict[str, float]:
    """Seconds from the navigation to the first content and to the reward's curve, of whatever steps there are."""
    page.open("about:blank")
    script = page.call("Page.addScriptToEvaluateOnNewDocument", source=CURVE)
    page.open(address)
    curve_ms = page.until("globalThis.curve_ms")
    content_ms = page.until("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])
    return {"first_content_s": round(content_ms / 1e3, 3), "reward_curve_s": round(curve_ms / 1e3, 3)}


def delay(page: Page, fixture: Fixture) -> float:
    """Seconds from before a line is written until the chart has it."""
    fixture.steps += 1
    line, before_s = msgspec.json.encode(fixture.metrics(fixture.steps - 1)) + b"\n", time.time()
    with fixture.run.metrics.open("ab") as file:
        file.write(line)
    return round(page.get(LOOK % (SHOWN.format(f"{fixture.steps - 1:,}"), "Date.now()")) / 1e3 - before_s, 3)


def cores(pid: int, seconds: float, each_s: Callable[[], object]) -> float:
    """Cores that a process uses while `each_s` is called every second."""
    process, began = psutil.Process(pid), time.monotonic()
    before_s = harness.cpu_s(process)
    for _ in range(round(seconds)):
        each_s()
        time.sleep(1.0)
    return round((harness.cpu_s(process) - before_s) / (time.monotonic() - began), 4)


@harness.script(steps=100_000, nodes=1000, rounds=5, updates=20, seconds=30)
def main(options: harness.Options) -> harness.Figures:
    folder = harness.scratch()
    fixture = Fixture(folder / "run", options.steps, options.nodes)
    fixture.write(0, 2000)
    figures: dict[str, Any] = {"rounds": options.rounds, "pages": []}
    for number in range(options.rounds):
        with serving(folder, str(fixture.run.path)) as (address, pid), browser(folder) as page:
            page.size(1440)
            cold = paint(page, address)
            page.until(SHOWN.format(f"{fixture.steps - 1:,}"))
            figures["pages"].append({"cold": cold, "warm": paint(page, address)})
            print(number, figures["pages"][-1], flush=True)
            if number == options.rounds - 1:
                figures["changes"] = [{"delay_s": delay(page, fixture)} for _ in range(options.updates)]
                figures["cpu_open"] = cores(pid, options.seconds, lambda: delay(page, fixture))
                figures["memory_mib"] = round(psutil.Process(pid).memory_info().rss / 2**20)
                page.open("about:blank")
                time.sleep(5.0)
                figures["cpu_alone"] = cores(pid, options.seconds, lambda: None)
    return figures
