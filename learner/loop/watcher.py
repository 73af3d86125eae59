"""The lead rank acts on watch rules: events, pauses, stops and commands; docs/watch.md.

A failure of it is logged, and training continues.
"""

import logging
import math
import os
import select
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from statistics import fmean, median
from threading import Thread

import msgspec
import numpy as np

from common.config.observing import WatchRule
from common.config.schema import Config
from common.json_lines import EventFile
from common.metrics import EvaluationMetrics, Metrics, StepMetrics, comparable, judged
from common.process.run_dir import RunDir
from common.rollouts import Group, Sample
from common.run_reader import read_tail
from common.weights.source.publisher import WeightPublisher
from learner.batch.batch import TRUNCATED, TrainingBatch
from learner.loop.run_files import RunFiles

# ---------------------------------------------------------------- rules as state machines
# They go over the lines of RUN/metrics.jsonl, with no clock and no files:
#
#     line -> the metric's value -> well, or astray -> astray for `steps` lines: the rule acts, once
#                                   well again: it may act again
#
# The state follows from the lines alone, so a learner that is started again reads them and continues as if never
# killed.


MEDIAN_OF = 50  # values before the one that is judged
FEWEST = 10  # values before, without which nothing counts as a spike
SHOWN = 5  # groups with the largest contributions, from what the lead rank has of each sample
# From |advantage|, log-probabilities and staleness of a sample's trained tokens; docs/watch.md says what it means.
OF_TOKENS: dict[str, Callable[[float, np.ndarray, np.ndarray], float]] = {
    "grad_norm": lambda advantage, logprobs, age: advantage * (1 - np.exp(logprobs)).sum(),
    "entropy": lambda advantage, logprobs, age: -logprobs.sum(),
    "ratio_max": lambda advantage, logprobs, age: -logprobs.min(),
    "staleness_mean": lambda advantage, logprobs, age: age.sum(),
}
OF_SAMPLES: dict[str, Callable[[Sample], float]] = {
    "truncated_fraction": lambda sample: sample.stop_reason in TRUNCATED,
    "samples_failed": lambda sample: sample.error is not None,
    "reward_mean": lambda sample: sample.reward if sample.error is None else 0.0,
    "length_mean": lambda sample: sample.sampled_all,
}
LIKE = {
    **{"loss": "grad_norm", "veto_fraction": "ratio_max", "length_max": "length_mean"},
    **dict.fromkeys(("ratio_mean", "ratio_p99", "mismatch_abs_mean", "drift_abs_mean", "kl_mean"), "entropy"),
    **dict.fromkeys(("correction_clip_fraction", "correction_masked_fraction", "objective_clip_fraction"), "entropy"),
}
LARGEST = {"ratio_max", "veto_fraction", "length_max"}  # a group counts by its largest part, elsewhere by the sum


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that acts: the facts of the event `watch`, and of a command's standard input."""

    rule: str  # its key path, watch[0]
    metric: str
    step: int
    value: float | None  # that was judged; None: not finite
    limit: float | None  # None: no line before gave one
    do: str
    text: str

    @property
    def kind(self) -> str:
        """Which lines it judges: step, or evaluation, whose `step` is the version."""
        return "evaluation" if self.metric.startswith("evaluation/") else "step"


class RuleState:
    def __init__(self, number: int, rule: WatchRule) -> None:
        """`number`: its place in the config."""
        self.name = f"watch[{number}]"
        self.rule = rule
        self.firing: Firing | None = None  # from the step at which it acted until the metric is well again
        self._evaluation: EvaluationMetrics | None = None  # the newest one that was judged
        self._begin()

    def _begin(self) -> None:
        self._astray = 0  # lines in a row
        self._best: float | None = None  # mean of `steps` values
        self._values: deque[float] = deque(maxlen=MEDIAN_OF if self.rule.drops is None else self.rule.steps)

    def see(self, line: Metrics) -> None:
        """Take the next line. It changes nothing where it lacks the metric."""
        value = judged(line, self.rule.metric)
        if value is None:
            return
        if isinstance(line, EvaluationMetrics):
            if self._evaluation is not None and not comparable(self._evaluation, line):
                self._begin()  # the values so far were measured otherwise
            self._evaluation = line
        value, limit = self._judged(value)
        astray = not math.isfinite(value)
        if limit is not None and not astray:
            astray = value > limit if self.rule.upper else value < limit
        self._astray = self._astray + 1 if astray else 0
        if not astray:
            self.firing = None
        elif self.firing is None and self._astray >= (self.rule.steps if self.rule.drops is None else 1):
            self.firing = self._fire(line.step, value, limit)

    def _judged(self, value: float) -> tuple[float, float | None]:
        """(the figure that counts, its limit or None where too little is known)."""
        rule = self.rule
        limit = self.rule.above if self.rule.below is None else self.rule.below
        if rule.drops is not None:
            self._values.append(value)
            if len(self._values) == rule.steps and math.isfinite(value := fmean(self._values)):
                limit = None if self._best is None else self._best - rule.drops * abs(self._best)
                self._best = value if self._best is None else max(self._best, value)
        elif rule.spikes is not None:
            middle = median(self._values) if len(self._values) >= FEWEST else 0.0
            limit = rule.spikes * middle if middle > 0 else None
            if math.isfinite(value):
                self._values.append(value)
        return value, limit

    def _fire(self, step: int, value: float, limit: float | None) -> Firing:
        rule = self.rule
        why = ""
        what = rule.metric if rule.drops is None else f"the mean of {rule.metric} over {rule.steps} steps"
        if rule.drops is not None:
            why = f" (its best mean less {rule.drops:.0%})"
        elif rule.spikes is not None:
            why = f" ({rule.spikes:g} times the median of the steps before)"
        if rule.steps > 1 and rule.drops is None:
            why += f", for {rule.steps} steps"
        found = value if math.isfinite(value) else None
        side = "above" if rule.upper else "below"
        how = "not finite" if found is None or limit is None else f"{found:.6g}, {side} {limit:.6g}{why}"
        text = f"{self.name}: {what} was {how} at step {step}"
        return Firing(rule=self.name, metric=rule.metric, step=step, value=found, limit=limit, do=rule.do, text=text)


def largest(metric: str, batch: TrainingBatch, groups: Sequence[Group]) -> list[dict[str, float]]:
    """The groups with the largest contributions, largest first; [] for a metric that groups do not make."""
    kind = LIKE.get(metric, metric)
    parts = defaultdict[int, list[float]](list)
    for document in batch.documents if kind in OF_TOKENS else ():
        trained = document.loss_mask > 0
        assert document.behavior_logprobs is not None and document.staleness is not None
        figures = abs(document.advantage), document.behavior_logprobs[trained], document.staleness[trained]
        parts[document.serial].append(float(OF_TOKENS[kind](*figures)))
    for group in groups if kind in OF_SAMPLES else ():
        parts[group.serial] = [float(OF_SAMPLES[kind](sample)) for sample in group.samples]
    reduce = max if metric in LARGEST else sum
    found = sorted(((reduce(values), serial) for serial, values in parts.items()), reverse=True)
    return [{"serial": serial, "contribution": value} for value, serial in found[:SHOWN] if value > 0]


# ---------------------------------------------------------------- what they do

logger = logging.getLogger(__name__)

REASON = "watch"  # among the publisher's
ALARMS = 64  # that a report may have
OUTPUT_BYTES = 1 << 16  # reach RUN/logs/watch.log from one command
LOG_BYTES = 1 << 22  # a longer log begins anew
LAST_COMMANDS_S = 10.0  # at the end of the learner, for the last output of all commands
SPARE_S = 1.0  # after a command's time limit, for its last output


class Watcher:
    def __init__(self, config: Config, files: RunFiles, publisher: WeightPublisher, tell: Callable[..., None]) -> None:
        """`tell` gets the fields `alarms` and `paused` of the learner's report."""
        self._run = RunDir.of(config)
        self._files = files
        self._publisher = publisher
        self._tell = tell
        self._every = config.learner.checkpoint.every
        self._states = [RuleState(number, rule) for number, rule in enumerate(config.watch)]
        self._commands: dict[str, Thread] = {}
        self.trained: tuple[TrainingBatch, Sequence[Group]] | None = None  # the newest step's batch and groups
        self.paused = ""  # the rule's sentence while nothing is published

    def begin(self, version: int) -> None:
        if self._states:
            known = read_tail(self._run.metrics, StepMetrics)
            lines = [*known.lines, *known.evaluations]  # a rule judges one of the two
            for line in lines:
                if line.step < version + isinstance(line, EvaluationMetrics):  # the lines that the file keeps
                    for state in self._states:
                        state.see(line)
        self.turn()

    @property
    def stopped(self) -> str:
        """Why the run must stop, and how it continues; '' while it must not."""
        text = self._acting("stop")
        return f"stopped by {text}; `slipstream resume {self._run.path}`, then the same command, continues" * bool(text)

    def see(self, line: Metrics) -> None:
        """Take a line of the metrics and begin what rules ask for. `trained` belongs to the newest step."""
        try:
            before = [state.firing for state in self._states]
            for state in self._states:
                state.see(line)
            for state, firing in zip(self._states, before, strict=True):
                if state.firing is not None and state.firing is not firing:
                    self._act(state.rule, state.firing)
                elif firing is not None and state.firing is None:
                    self._files.note("watch_well", rule=state.name, step=line.step)
        except Exception:
            logger.exception("watch rules")
        self.trained = None
        self.turn()

    def turn(self) -> None:
        """Once per turn of the loop: begin or end a pause."""
        if (text := self._acting("pause")) != self.paused:
            if text and not self.paused:
                self._publisher.hold(REASON)
            elif not text:
                self._publisher.release(REASON)
            self.paused = text
            self._files.note("publishing_paused" if text else "publishing_resumed", reason=text)
        self._tell(alarms=[state.firing.text for state in self._states if state.firing][:ALARMS], paused=self.paused)

    def close(self) -> None:
        """Wait a little for the output of commands that still run."""
        end = time.monotonic() + LAST_COMMANDS_S
        for command in self._commands.values():
            command.join(max(0.0, end - time.monotonic()))

    def _acting(self, do: str) -> str:
        """The sentence of a rule that acts and that `slipstream resume` has not answered; '' for none."""
        for state in self._states:
            firing = state.firing if state.rule.do == do else None
            if firing is not None and firing.step > resumed_step(self._run, firing.kind):
                return firing.text
        return ""

    def _act(self, rule: WatchRule, firing: Firing) -> None:
        logger.warning("%s (do: %s)", firing.text, rule.do)
        last = firing.step - (firing.kind == "evaluation")  # the step that made an evaluated version
        replay = ""
        if last >= 0:
            begun = last // self._every * self._every  # is perhaps still being written
            first = max(begun, *(step for step in self._files.checkpoints.steps() if step <= last), 0)
            replay = f"slipstream replay {self._run.path} --from {first} --to {last}"
        causes = largest(rule.metric, *self.trained) if rule.upper and self.trained else []
        self._files.note("watch", **msgspec.structs.asdict(firing), groups=causes, replay=replay)
        if rule.do != "run":
            return
        if firing.rule in self._commands and self._commands[firing.rule].is_alive():
            reason = "the last one still runs"
            self._files.note("watch_command_skipped", rule=firing.rule, step=firing.step, reason=reason)
            return
        self._commands[firing.rule] = Thread(target=run_command, args=(rule, firing, self._run), daemon=True)
        self._commands[firing.rule].start()


def resumed_step(run: RunDir, kind: str) -> int:
    """The last line of this kind, step or evaluation, that `slipstream resume` was told of; -1 for none."""
    try:
        return msgspec.json.decode(run.resume_json.read_bytes(), type=dict[str, int]).get(kind, -1)
    except (OSError, ValueError):
        return -1


def run_command(rule: WatchRule, firing: Firing, run: RunDir) -> None:
    """Run the command to its end, with the facts as JSON on its standard input and as SLIPSTREAM_WATCH_* variables.

    GNU timeout ends it with its process group, also when the learner is killed meanwhile. Its output may be longer in
    the hands of a process that it left behind; that is not waited for.
    """
    facts = {**msgspec.structs.asdict(firing), "run": str(run.path)}
    env = os.environ | {f"SLIPSTREAM_WATCH_{name.upper()}": str(value) for name, value in facts.items()}
    words = ["timeout", "--signal=KILL", str(rule.timeout_s), *rule.command]
    pipe = subprocess.PIPE
    log = run.logs / "watch.log"
    try:
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=env) as child:
            assert child.stdin is not None and child.stdout is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(msgspec.json.encode(facts))
            output = b""
            end = time.monotonic() + rule.timeout_s + SPARE_S
            while (left := end - time.monotonic()) > 0 and select.select([child.stdout], [], [], left)[0]:
                if not (part := os.read(child.stdout.fileno(), OUTPUT_BYTES)):
                    break
                output = (output + part)[:OUTPUT_BYTES]  # more than that is dropped
        with log.open("wb" if log.exists() and log.stat().st_size > LOG_BYTES else "ab") as file:
            file.write(f"{firing.text}: {rule.command}: exit code {child.returncode}\n".encode() + output)
        with closing(EventFile(run.events, "learner")) as events:
            events.add("watch_command", rule=firing.rule, step=firing.step, exit_code=child.returncode)
    except (OSError, ValueError) as error:  # a full disk, no timeout on this machine, or words that none can have
        logger.error("%s: the command %s: %s", firing.rule, rule.command[0], error)
