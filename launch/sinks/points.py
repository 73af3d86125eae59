"""From lines of metrics.jsonl to points for trackers, and the place in the file up to which a tracker has them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from common.config.schema import Config, SftConfig
from common.metrics import StepMetrics, declarations
from common.process.run_dir import RunDir

# The group of a metric follows from its declared unit.
GROUPS = {"s": "time", "tokens": "tokens", "bytes": "weights", "steps": "staleness", "versions": "staleness"}
GROUPS |= {"groups": "broker", "samples": "samples", "nodes": "broker", "episodes": "fleet", "requests": "fleet"}
GROUP_OF = {known.name: GROUPS.get(known.unit, "train") for known in declarations(StepMetrics)}


class Job(NamedTuple):
    """The run that is fed."""

    run: RunDir
    config: Config | SftConfig
    id: str  # unique, and the same after a restart
    name: str


class Point(msgspec.Struct, frozen=True):
    """Values of one step, or of an evaluation: then `step` is the policy version."""

    step: int
    time_s: float
    values: dict[str, float]
    dataset: str = ""  # set for an evaluation
    again: bool = False  # a resumed learner does this step again: all points from it on are void


class Cursor(msgspec.Struct, forbid_unknown_fields=False):
    """Where a tracker is; valid once the tracker has flushed."""

    offset: int = 0
    inode: int = -1
    lines: int = 0  # taken from the file that `inode` names
    step: int = -1  # the newest one that was fed
    highest: int = -1  # the largest one; a resumed learner begins below it
    start: float = -1.0  # which start of the learner wrote it; without one, the Unix time of the line
    evaluated: dict[str, int] = {}  # newest policy version by dataset

    def take(self, lines: Sequence[dict[str, Any]]) -> list[Point]:
        """The points of lines that were not fed before; the same lines may come again in a replaced file."""
        self.lines += len(lines)
        return [point for line in lines if (point := self._point(line)) is not None]

    def _point(self, line: dict[str, Any]) -> Point | None:
        time_s, kind = line.get("time_s", 0.0), line.get("kind")
        if kind == "evaluation":
            return self._evaluation(line, time_s)
        step = line.get("step")
        if kind is not None or not isinstance(step, int):
            return None
        start = float(line.get("incarnation", time_s))
        if step <= self.step and start <= self.start:
            return None
        again = step <= self.step
        if again:
            self.evaluated = {name: min(version, step) for name, version in self.evaluated.items()}
        self.step, self.highest, self.start = step, max(step, self.highest), start
        values = {
            f"{GROUP_OF.get(name, 'train')}/{name}": line[name] for name in line if name not in ("step", "time_s")
        }
        return Point(step, time_s, flat(values), again=again)

    def _evaluation(self, line: dict[str, Any], time_s: float) -> Point | None:
        version, dataset = line.get("policy_version"), line.get("dataset")
        if not isinstance(version, int) or not isinstance(dataset, str) or version <= self.evaluated.get(dataset, -1):
            return None
        self.evaluated = self.evaluated | {dataset: version}
        name = re.sub(r"[^\w.-]+", "_", dataset).strip("._")
        values = {f"evaluation/{name}/{key}": line[key] for key in line if key not in ("step", "time_s")}
        return Point(version, time_s, flat(values), dataset=name)


def leaves(values: dict[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """('a/b/0', value) of every value in nested lists and mappings."""
    for name, value in values.items():
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from leaves({f"{name}{separator}{key}": inner for key, inner in items}, separator)
        else:
            yield name, value


def flat(values: dict[str, Any]) -> dict[str, float]:
    """The numbers among the leaves, which are metrics."""
    numbers = ((name, value) for name, value in leaves(values, "/") if isinstance(value, int | float))
    return {name: float(value) for name, value in numbers if not isinstance(value, bool)}
