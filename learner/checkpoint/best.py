"""The best checkpoint of a run, learner.checkpoint.keep_best; RUN/checkpoints/best.json names it.

It keeps its own name, step-N, beside the newest ones: a learner that resumes takes the newest and knows no best. The
value of a checkpoint follows from the metrics file alone, so a killed learner decides the same again:

- a metric of steps: its mean over the learner.checkpoint.every steps before the checkpoint. A step sees few prompts, so
  the best of single steps would be the luckiest. A metric that is declared 'last': its newest value there. A step
  that trained nothing has no value of the metrics for which common.metrics.judged gives none.
- evaluation/DATASET/FIGURE: the result of the evaluation of the checkpoint's own version. It ends later than the
  checkpoint is written, so a checkpoint without its evaluation stays until there is one of a later version. Only
  results that were made as the newest one count: other samples or problems may be easier.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import msgspec

from common.config.schema import BaseConfig
from common.metrics import EvaluationMetrics, Metrics, comparable, declarations, judged
from common.process.run_dir import write_json

logger = logging.getLogger(__name__)

BEST_FILE = "best.json"
MOST_WAITING = 16  # checkpoints that wait for their evaluation; else a fleet without evaluation nodes fills the disk


class BestRecord(msgspec.Struct, frozen=True):
    """RUN/checkpoints/best.json; the checkpoint of `step` is complete as long as the file names it."""

    step: int
    metric: str  # keep_best
    value: float


def read_best(folder: Path) -> BestRecord | None:
    """The choice in a folder of checkpoints; None when there is none."""
    try:
        return msgspec.json.decode((folder / BEST_FILE).read_bytes(), type=BestRecord)
    except (OSError, ValueError):  # msgspec's errors, and text that is not UTF-8
        return None


class Best:
    """The choice among a run's checkpoints; `note` gets every line of the metrics file."""

    def __init__(self, config: BaseConfig) -> None:
        """`config` has passed its checks, and keep_best is set."""
        key = self._key = config.learner.checkpoint.keep_best or ""
        self._name = key.removeprefix("-")
        self._sign = -1.0 if key.startswith("-") else 1.0
        self._window = config.learner.checkpoint.every
        self._evaluated = config.evaluation.every if key.removeprefix("-").startswith("evaluation/") else 0
        kinds = declarations(config.step_metrics)
        self._newest = any(each.name == self._name and each.reduction == "last" for each in kinds)
        self._values: dict[int, float] = {}  # by step, or by version that was evaluated
        self._evaluations: dict[int, Metrics] = {}  # the lines of those versions, in the order of the file

    def note(self, line: Metrics) -> None:
        value = judged(line, self._name)
        if value is None or not math.isfinite(value):
            return
        if not isinstance(line, EvaluationMetrics):
            self._values[line.step] = value
            return
        before = next(reversed(self._evaluations.values()), line)
        if not comparable(before, line):
            told = "evaluations changed at version %d: results of another kind do not count for keep_best"
            logger.warning(told, line.policy_version)
        self._values[line.policy_version] = value
        self._evaluations.pop(line.policy_version, None)  # it becomes the newest
        self._evaluations[line.policy_version] = line

    def value(self, version: int) -> float | None:
        """The value of this version's checkpoint; None: unknown."""
        steps = [version] if self._evaluated else range(max(version - self._window, 0), version)
        if self._evaluated and not self._counts(version):
            return None
        found = [self._values[step] for step in steps if step in self._values]
        return None if not found else found[-1] if self._newest else mean(found)

    def _counts(self, version: int) -> bool:
        """Whether its evaluation, if there is one, was made as the newest one."""
        lines = self._evaluations
        return version not in lines or comparable(lines[version], next(reversed(lines.values())))

    def choose(self, folder: Path, versions: Iterable[int]) -> set[int]:
        """The versions that must stay: the best one, which best.json then names, and those that may become it.

        The newest of equal ones is the best. While best.json cannot be written, the one that it names stays, too.
        """
        versions = sorted(versions)
        before = read_best(folder)
        known = {version: value for version in versions if (value := self.value(version)) is not None}
        if before is not None and before.metric == self._key and before.step in versions and self._counts(before.step):
            known.setdefault(before.step, before.value)
        newest = max(self._values, default=-1)
        due = [v for v in versions if self._evaluated and v > newest and v % self._evaluated == 0]
        if len(due) > MOST_WAITING:
            logger.warning("%d checkpoints wait for %s; the oldest are removed", len(due), self._name)
        chosen = set(due[-MOST_WAITING:])
        try:
            if not known:
                (folder / BEST_FILE).unlink(missing_ok=True)
                return chosen
            best = max(known, key=lambda version: (self._sign * known[version], version))
            chosen.add(best)
            if (record := BestRecord(best, self._key, known[best])) != before:
                write_json(folder / BEST_FILE, record)
                logger.info("the best checkpoint is that of step %d, %s %.6g", best, self._name, known[best])
        except OSError as error:  # a full disk: the checkpoints that are removed make room
            logger.warning("%s cannot be written: %s", BEST_FILE, error)
            chosen |= {before.step} if before is not None else set[int]()
        return chosen
