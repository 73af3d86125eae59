"""Follow RUN/metrics.jsonl: only what was added is read again."""

from pathlib import Path
from typing import Any

from common.metrics import no_file
from common.process.run_dir import RunDir
from launch.observe.line_tail import LineTail

LATEST = slice(-10, None)  # the steps whose mean stands for the present


class MetricsTail:
    """Steps seen so far, one entry per step; a resumed learner's rewritten file is read from its start."""

    def __init__(self, path: Path | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []  # lines of kind evaluation
        self._tail = LineTail(path) if path else None

    @classmethod
    def of(cls, run: RunDir | None) -> "MetricsTail":
        """The metrics that a run has by now, none without a run folder; raises as `update`."""
        tail = cls(run.metrics if run else None)
        tail.update()
        return tail

    @property
    def last(self) -> dict[str, Any]:
        """The newest step, without metrics that were no number, which JSON has as null; {} before the first."""
        return {name: value for name, value in self.lines[-1].items() if value is not None} if self.lines else {}

    def update(self) -> None:
        """Read what is new. Raises UsageError when it is no file, or may not be read."""
        if self._tail is None:
            return
        while True:
            try:
                replaced, lines = self._tail.read()
            except OSError as error:
                raise no_file(self._tail.path, error) from None
            if replaced:
                self.lines, self.evaluations = [], []
            if not lines:
                return
            self.lines += [line for line in lines if "kind" not in line]
            self.evaluations += [line for line in lines if line.get("kind") == "evaluation"]

    def series(self, name: str) -> list[float]:
        """Values of one metric over the steps that have it."""
        return [float(line[name]) for line in self.lines if isinstance(line.get(name), int | float)]

    def total(self, name: str) -> float:
        """The sum of one metric over all steps."""
        return sum(self.series(name))

    def mean(self, name: str, steps: slice = slice(None)) -> float | None:
        """The mean of one metric over `steps`; None when no step has it."""
        return mean(self.series(name)[steps])


def mean(values: list[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def ends(values: list[float]) -> dict[str, float | None]:
    """The means of the first and of the last steps, as reports name them."""
    return {"first_5_steps": mean(values[:5]), "last_10_steps": mean(values[LATEST])}
