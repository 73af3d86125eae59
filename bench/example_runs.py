"""Every example word by word as its README says: python bench/example_runs.py [NAME ...].

A copy of examples/NAME in a scratch folder runs the commands of the README's bash block. Then the README's claims about
curves are checked. A line is printed for each example, and the exit code is 1 if one failed. With names, those that did
not run keep the figures of their own commit.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

from bench.figures import RESULTS, ROOT, machine_of, result

EXAMPLES = ROOT / "examples"
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
CLAIM = re.compile(
    r"^- `(?P<metric>[\w/]+)` of `(?P<run>[\w-]+)`: (?P<start>below|above) (?P<first>[\d.]+),"
    r" then (?P<end>below|above) (?P<last>[\d.]+)$",
    re.MULTILINE,
)  # means of the first 5 and of the last 10 steps
BARS, COLUMNS = "▁▂▃▄▅▆▇█", 20
LIMIT_S, TAIL = 3600, 2000
FAILED = list[str]()


@dataclass(frozen=True)
class Example:
    """An example as its README tells it."""

    name: str
    commands: str
    claims: list[re.Match[str]]


def names() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


def example(name: str) -> Example:
    """Raises ValueError for a README that has not one block of commands and at least one claim."""
    text = (EXAMPLES / name / "README.md").read_text()
    blocks = COMMANDS.findall(text)
    claims = list(CLAIM.finditer(text))
    if len(blocks) != 1 or not claims:
        expected = "one bash block and lines such as '- `reward_mean` of `run`: below 0.5, then above 0.9'"
        raise ValueError(f"examples/{name}/README.md: expected {expected}, found {len(blocks)} and {len(claims)}")
    return Example(name, blocks[0], claims)


def played(one: Example, scratch: Path) -> dict[str, Any]:
    """Figures of the first claim; raises RuntimeError when a command fails or a claim is wrong."""
    folder = scratch / one.name
    shutil.copytree(EXAMPLES / one.name, folder)
    began, commit = time.monotonic(), harness.commit()
    log = folder / "output.log"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as out:
        words = ["bash", "-euo", "pipefail", "-c", one.commands]
        shell = subprocess.Popen(
            words, cwd=folder, env=os.environ | {"PATH": path}, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = shell.wait(LIMIT_S)
        finally:  # a command in the background does not outlive its example
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    if code != 0:
        raise RuntimeError(f"a command exited with {code}; {log}:\n{log.read_text()[-TAIL:]}")
    seconds = round(time.monotonic() - began, 1)
    found = [judged(claim, folder) for claim in one.claims]
    about = {"load_1min": round(os.getloadavg()[0], 1), "commit": commit}
    about["machine"] = machine_of({"machine": harness.machine()})
    return {"example": one.name, "seconds": seconds, **found[0], "more": found[1:], **about}


def judged(claim: re.Match[str], folder: Path) -> dict[str, Any]:
    """The curve of a claim's metric; raises RuntimeError when it is not as claimed."""
    field, _, key = claim["metric"].partition("/")  # as in docs/metrics.md: environment/KEY
    lines = harness.read(folder / claim["run"]).lines
    curve = [round(line[field][key] if key else line[field], 3) for line in lines]
    first, last = round(statistics.mean(curve[:5]), 3), round(statistics.mean(curve[-10:]), 3)
    bounds = ((first, claim["start"], claim["first"]), (last, claim["end"], claim["last"]))
    if not all(value < float(bound) if side == "below" else value > float(bound) for value, side, bound in bounds):
        raise RuntimeError(f"{claim[0]}: found {first} and {last}")
    return {"metric": claim["metric"], "first_5": first, "last_10": last, "bars": bars(curve), "curve": curve}


def bars(curve: list[float]) -> str:
    """The curve in COLUMNS characters, each the mean of its part, from the least to the largest mean."""
    cuts = [round(n * len(curve) / COLUMNS) for n in range(COLUMNS + 1)]
    means = [statistics.mean(curve[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(int((mean - low) / span * len(BARS)), len(BARS) - 1)] for mean in means)


@harness.script(names=(), name="examples")
def main(options: harness.Options) -> harness.Figures:
    chosen, scratch, rows = options.names or names(), harness.scratch(), dict[str, dict[str, Any]]()
    for name in chosen:
        try:
            rows[name] = played(example(name), scratch)
        except RuntimeError as error:
            FAILED.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
        else:
            said = "{example}: ok, {seconds:.0f} s; {metric} {first_5} to {last_10} {bars}"
            print(said.format_map(rows[name]), flush=True)
    before = result("examples")["rows"] if (RESULTS / "examples.json").exists() else []
    kept = [row for row in before if row["example"] in set(names()) - set(chosen)]
    return {"rounds": 1, "rows": sorted([*kept, *rows.values()], key=lambda row: row["example"])}


if FAILED:
    sys.exit(f"not as their README says: {', '.join(FAILED)}")
