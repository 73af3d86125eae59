"""The lead rank acts on watch rules: events, pauses, stops and commands; docs/watch.md.

A failure of it is logged, and training continues.
"""

import logging
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from threading import Thread

import msgspec

from common.config.observing import WatchRule
from common.config.schema import Config
from common.json_lines import EventFile
from common.metrics import EvaluationMetrics, Metrics, StepMetrics
from common.process.run_dir import RunDir
from common.rollouts import Group
from common.run_reader import read_tail
from common.weights.source.publisher import WeightPublisher
from learner.batch.batch import TrainingBatch
from learner.loop.run_files import RunFiles
from learner.loop.watch import Firing, RuleState, largest

logger = logging.getLogger(__name__)

REASON = "watch"  # among the publisher's
ALARMS = 64  # that a report may have
OUTPUT_BYTES = 1 << 16  # reach RUN/logs/watch.log from one command
LOG_BYTES = 1 << 22  # a longer log begins anew
LAST_COMMANDS_S = 10.0  # at the end of the learner, for the last output of all commands
SPARE_S = 1.0  # after a command's time limit, for its last output


class Watcher:
    """The rules of a run."""

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
        """Remember the steps before `version`."""
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
        last, replay = firing.step - (firing.kind == "evaluation"), ""  # the step that made an evaluated version
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
