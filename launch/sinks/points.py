"""From lines of metrics.jsonl to points for trackers, and the place in the file up to which a tracker has them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from common.config.schema import BaseConfig
from common.metrics import StepMetrics, declarations
from common.process.run_dir import RunDir

# The group of a metric follows from its declared unit.
GROUPS = {"s": "time", "tokens": "tokens", "bytes": "weights", "steps": "staleness", "versions": "staleness"}
GROUPS |= {"groups": "broker", "samples": "samples", "nodes": "broker", "episodes": "fleet", "requests": "fleet"}
GROUP_OF = {known.name: GROUPS.get(known.unit, "train") for known in declarations(StepMetrics)}


class Job(NamedTuple):
    """The run that is fed; `id` is unique, and the same after a restart."""

    run: RunDir
    config: BaseConfig
    id: str


class Point(msgspec.Struct, frozen=True):
    """Values of one step, or of an evaluation: then `step` is the policy version."""

    step: int
    time_s: float
    values: dict[str, float]
    dataset: str = ""  # set for an evaluation
    again: bool = False  # a resumed learner does this step again: all points from it on are void


class Cursor(msgspec.Struct):
    """RUN/sinks/NAME.json: up to where a tracker has the metrics, moved when it has flushed."""

    state: str = "starting"  # starting, feeding, ended, or the error after which it tries again
    offset: int = 0
    inode: int = -1
    step: int = -1  # the newest one that was fed
    start: float = -1.0  # which start of the learner wrote it; without one, the Unix time of the line
    evaluated: dict[str, int] = {}  # newest policy version by dataset

    def take(self, lines: Sequence[dict[str, Any]]) -> list[Point]:
        """The points of lines that were not fed before; the same lines may come again in a replaced file."""
        points: list[Point] = []
        for line in lines:
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # not a line of a learner
                kind = line.get("kind", "step")
                points += self._step(line) if kind == "step" else self._evaluation(line)
        return points

    def _step(self, line: dict[str, Any]) -> Iterator[Point]:
        step, time_s, values = line["step"], float(line.get("time_s", 0.0)), flat(line)
        start, again = float(line.get("incarnation", time_s)), step <= self.step
        if again and start > self.start:
            self.evaluated = {name: min(version, step) for name, version in self.evaluated.items()}
        if not again or start > self.start:
            self.step, self.start = step, start
            yield Point(step, time_s, values, again=again)

    def _evaluation(self, line: dict[str, Any]) -> Iterator[Point]:
        version, dataset = line["policy_version"], line["dataset"]
        if version > self.evaluated.get(dataset, -1):
            self.evaluated = self.evaluated | {dataset: version}
            name = re.sub(r"[^\w.-]+", "_", dataset).strip("._")
            yield Point(version, line.get("time_s", 0.0), flat(line, f"evaluation/{name}"), dataset=name)


def leaves(values: dict[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """('a/b/0', value) of every value in nested lists and mappings."""
    for name, value in values.items():
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from leaves({f"{name}{separator}{key}": inner for key, inner in items}, separator)
        else:
            yield name, value


def flat(line: dict[str, Any], group: str = "") -> dict[str, float]:
    """The numbers of a line, by group and name; the group is that of the metric unless it is given."""
    kept = {key: value for key, value in line.items() if key not in ("step", "time_s")}
    named = leaves({f"{group or GROUP_OF.get(key, 'train')}/{key}": value for key, value in kept.items()}, "/")
    return {name: float(value) for name, value in named if type(value) in (int, float)}
