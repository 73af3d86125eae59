"""Counts of the tests that ran on a GPU, from their logs.

    python bench/gpu_tests.py --commits COMMIT... --folders FOLDER...

A folder has one run: NAME.log is what pytest printed for an item of `ITEMS`, at any depth. A file of a benchmark that
ran there (gpu_*.json) names the machine. The last run of an item counts, and `earlier` has the others.
An item that its time limit ended is `cut`: pytest was interrupted, or its ranks were aborted to show their stacks.
"""

import json
import re
from pathlib import Path

import harness

ITEMS = {  # an item's tests, and the layers or library under them
    "parity1": ("parity, one rank", "plain layers"),
    "parity1te": ("parity, one rank", "Transformer Engine"),
    "parity2": ("layouts: DP, TP with SP, PP, CP, TP with EP", "plain layers, two ranks over NCCL"),
    "losses1": ("every objective of the losses, against transformers", "plain layers"),
    "memory1": ("recomputation and offloading, with checkpoints", "plain layers"),
    "critic1": ("a critic, with its checkpoints", "plain layers"),
    "weights": ("weight transports and their faults", "NCCL"),
    "engine": ("engine: labels, flips, canary, read-back", "vLLM"),
    "checkpoint": ("a learner killed with -9 in a save", "plain layers"),
    "lora1": ("adapters", "plain layers"),
}
ENDED = re.compile(r"^(no tests ran|\d+ \w+(?:, \d+ \w+)*) in ([\d.]+)s", re.MULTILINE)
CUT = re.compile(r"KeyboardInterrupt|Fatal Python error: Aborted")


def counted(log: Path) -> harness.Figures:
    """Passed, failed and skipped tests, the seconds, and whether the limit ended them; raises ValueError without."""
    text = log.read_text()
    if not (found := ENDED.findall(text)):
        raise ValueError(f"{log}: expected pytest's last line, `9 passed in 1.2s`")
    counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (\w+)", found[-1][0])}
    named = {"passed": "passed", "failed": "failed", "errors": "error", "skipped": "skipped"}
    row = {name: counts.get(word, 0) for name, word in named.items()}
    return {**row, "s": float(found[-1][1]), "cut": "yes" if CUT.search(text) else "no"}


def runs(commits: list[str], folders: list[Path]) -> list[harness.Figures]:
    """A row of each item in each folder, in the order of `ITEMS`."""
    found = []
    for name, (tests, used) in ITEMS.items():
        for commit, folder in zip(commits, folders, strict=True):
            logs = sorted(folder.rglob(f"{name}.log"))
            found += [{"item": name, "tests": tests, "with": used, "commit": commit, **counted(log)} for log in logs]
    return found


@harness.script(commits=[""], folders=[""])
def main(options: harness.Options) -> harness.Figures:
    folders = [Path(name) for name in options.folders]
    every = runs(options.commits, folders)
    last = {row["item"]: row for row in every}
    told = json.loads(min(folders[-1].glob("gpu_*.json")).read_text())
    beside = {"commit": ", ".join(options.commits), "arguments": {}}  # folders are those of one machine
    beside |= {name: told[name] for name in ("machine", "load_1min")}
    earlier = [row for row in every if row is not last[row["item"]]]
    return {**beside, "rounds": 1, "items": list(last.values()), "earlier": earlier}
