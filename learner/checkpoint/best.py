"""The best checkpoint of a run, learner.checkpoint.keep_best; RUN/checkpoints/best.json names it.

It keeps its own name, step-N, beside the newest ones: a learner that resumes takes the newest and knows no best. The
value of a checkpoint follows from the metrics file alone, so a killed learner decides the same again:

- a metric of steps: its mean over the learner.checkpoint.every steps before the checkpoint. A step sees few prompts, so
  the best of single steps would be the luckiest. A metric that counts up or is measured seldom: its newest value there.
- evaluation/DATASET/FIGURE: what the evaluation of the checkpoint's own version found. It ends later than the
  checkpoint is written, so a checkpoint without its evaluation stays until there is one of a later version.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from common.config.loading import describe_value, nearest
from common.config.schema import Config, SftConfig
from common.errors import ConfigError
from common.metrics import SftMetrics, StepMetrics, declarations, numbers
from common.process.run_dir import write_json

logger = logging.getLogger(__name__)

KEY = "learner.checkpoint.keep_best"
BEST_FILE = "best.json"
EVALUATION = re.compile(r"evaluation/(.+)/(?:(mean_reward)|pass_at/(\d+))")
MOST_WAITING = 16  # checkpoints that wait for their evaluation; else a fleet without evaluation nodes fills the disk


class BestRecord(msgspec.Struct, frozen=True):
    """RUN/checkpoints/best.json; the checkpoint of `step` is there, complete, as long as the file says so."""

    step: int
    metric: str  # keep_best
    value: float


def read_best(folder: Path) -> BestRecord | None:
    """The choice in a folder of checkpoints; None when there is none."""
    try:
        return msgspec.json.decode((folder / BEST_FILE).read_bytes(), type=BestRecord)
    except (OSError, msgspec.DecodeError):
        return None


def check_keep_best(config: Config | SftConfig, file: str) -> None:
    """Raise ConfigError, naming `file` and the nearest name, when the metric of keep_best does not exist."""
    key = config.learner.checkpoint.keep_best
    if key is None:
        return
    name, sign = key.removeprefix("-"), key[: key.startswith("-")]
    known = numbers(SftMetrics if isinstance(config, SftConfig) else StepMetrics)
    found = EVALUATION.fullmatch(name) if isinstance(config, Config) and config.evaluation.every else None
    if isinstance(config, Config) and config.evaluation.every:
        figures = ["mean_reward", *[f"pass_at/{k}" for k in range(1, config.evaluation.samples + 1)]]
        known += [f"evaluation/{dataset}/{each}" for dataset in config.evaluation.datasets for each in figures]
    if name in known or (found and any(_is(found[1], dataset) for dataset in config.evaluation.datasets)):
        return
    near = nearest(name, known)
    hint = f"did you mean {sign}{near}?" if near else "docs/metrics.md has their names"
    if name.startswith("evaluation/") and not any(each.startswith("evaluation/") for each in known):
        hint = "evaluation.every is 0 or evaluation.datasets is empty, so nothing is evaluated"
    expected = "a metric of this run, or -METRIC where less is better"
    raise ConfigError(file, KEY, expected, describe_value(key), hint)


def _is(name: str, dataset: str) -> bool:
    """Whether `name` means this dataset: as it is in the config, or its file name with or without the ending."""
    path = Path(dataset)
    return name in (dataset, path.name, path.stem)


class Best:
    """The choice among a run's checkpoints; `note` gets every line of the metrics file."""

    def __init__(self, config: Config | SftConfig) -> None:
        """`config` has passed `check_keep_best`, and its keep_best is set."""
        key = self._key = config.learner.checkpoint.keep_best or ""
        self._name, self._sign = key.removeprefix("-"), -1.0 if key.startswith("-") else 1.0
        found = EVALUATION.fullmatch(self._name)
        self._dataset, self._samples = (found[1], found[3]) if found else ("", None)
        self._window, self._evaluated = config.learner.checkpoint.every, config.evaluation.every
        kinds = declarations(SftMetrics if isinstance(config, SftConfig) else StepMetrics)
        self._newest = any(each.name == self._name and each.reduction == "last" for each in kinds)
        self._values: dict[int, float] = {}  # by step, or by version that was evaluated

    def note(self, line: Mapping[str, Any]) -> None:
        """A line of the metrics file, of any kind; one that comes again replaces the one before it."""
        if self._dataset and line.get("kind") == "evaluation" and _is(self._dataset, str(line.get("dataset"))):
            at = line.get("policy_version")
            value = line.get("mean_reward") if self._samples is None else line.get("pass_at", {}).get(self._samples)
        elif not self._dataset and "kind" not in line:
            at, value = line.get("step"), line.get(self._name)
        else:
            return
        if isinstance(at, int) and isinstance(value, int | float) and math.isfinite(value):
            self._values[at] = float(value)

    def value(self, version: int) -> float | None:
        """The value of this version's checkpoint; None: unknown."""
        if self._dataset:
            return self._values.get(version)
        steps = range(max(version - self._window, 0), version)
        found = [self._values[step] for step in steps if step in self._values]
        return None if not found else found[-1] if self._newest else mean(found)

    def choose(self, folder: Path, versions: Iterable[int]) -> set[int]:
        """The versions that must stay: the best one, which best.json then names, and those that may become it.

        The newest of equal ones is the best. Raises OSError.
        """
        versions, before = sorted(versions), read_best(folder)
        known = {version: value for version in versions if (value := self.value(version)) is not None}
        if before is not None and before.metric == self._key and before.step in versions:
            known.setdefault(before.step, before.value)
        newest = max(self._values, default=-1)
        due = [v for v in versions if self._dataset and v > newest and not v % max(self._evaluated, 1)]
        if len(due) > MOST_WAITING:
            logger.warning("%d checkpoints wait for %s; the older ones are removed", len(due), self._name)
        if not known:
            (folder / BEST_FILE).unlink(missing_ok=True)
            return set(due[-MOST_WAITING:])
        best = max(known, key=lambda version: (self._sign * known[version], version))
        if (record := BestRecord(best, self._key, known[best])) != before:
            write_json(folder / BEST_FILE, record)
            logger.info("the best checkpoint is that of step %d, %s %.6g", best, self._name, known[best])
        return {best, *due[-MOST_WAITING:]}
