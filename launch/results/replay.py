"""slipstream replay RUN: a learner trains recorded steps of a run again, offline, to see where a loss went wrong.

the run's store  ->  a broker in this process, its steps preloaded as taken  ->  the learner, in its own run folder
"""

import argparse
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from broker.contract import LearnerReport
from broker.delivery.state import DeliveryState
from broker.journal.recording import Recording, open_recording, preloaded
from broker.main import run_info
from broker.server.server import BrokerServer
from common.config.loading import build_config
from common.config.schema import Config, LearnerConfig
from common.errors import EXIT_DONE, SlipstreamError, UsageError
from common.metrics import StepMetrics
from common.process.install import need_packages
from common.process.lifecycle import DrainFlag
from common.process.logs import log_path
from common.process.progress import bar
from common.process.run_dir import BrokerFile, RunDir, write_json
from common.run_reader import MetricsTail, read_tail
from launch.resolve_target import checked, config_of, find_run
from launch.up.roles import role_command
from launch.up.supervisor import DRAIN_S, RoleSpec, Supervisor, end_error
from learner.checkpoint.folder import CheckpointFolder, read_checkpoint, schedule_ends

POLL_S = 0.1
STUCK_S = 60.0
COMPARED = ("loss", "grad_norm", "reward_mean")
# The recording fixes these keys: its groups belong to these tasks and have this size. The command sets the rest.
FIXED = {
    "run.dir": "use --out DIR",
    "run.steps": "use --to STEP",
    "broker": "the replay has a broker of its own",
    "tasks": "the recorded groups are of these tasks",
    "learner.groups_per_step": "the recorded steps have this many groups",
    "learner.checkpoint.dir": "the replay keeps its checkpoint in its own folder",
    "learner.machines": "a replay runs on this machine",
    "rollout.group_size": "the recorded groups have this many samples",
}


@dataclass(frozen=True)
class Replay:
    """Steps `first` to `last`, both trained, of `original` again in `run`; `checkpoint` is None from the start on."""

    original: RunDir
    run: RunDir
    config: Config
    first: int
    last: int
    checkpoint: Path | None

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)


class ReplayedStep(msgspec.Struct, frozen=True):
    """A step's figures then and now; `original` is None where the run has no line for the step, as after a crash."""

    step: int
    original: dict[str, float] | None
    replayed: dict[str, float]

    @property
    def equal(self) -> bool:
        """Bitwise, NaN included."""
        return self.original is not None and all(_same(self.original[n], x) for n, x in self.replayed.items())


def compare(original: StepMetrics | None, replayed: StepMetrics) -> ReplayedStep:
    now = {name: float(getattr(replayed, name)) for name in COMPARED}
    then = original and {name: float(getattr(original, name)) for name in COMPARED}
    return ReplayedStep(replayed.step, then, now)


def line(step: ReplayedStep) -> str:
    """'step 12  loss 0.1234 =  grad_norm 1.5 -> 1.7 (+0.2)  ...'."""
    parts = [f"step {step.step:>5}"]
    for name, now in step.replayed.items():
        then = None if step.original is None else step.original[name]
        if then is None:
            parts.append(f"{name} {now:.6g} (the run has none)")
        elif _same(then, now):
            parts.append(f"{name} {now:.6g} =")
        else:
            parts.append(f"{name} {then:.6g} -> {now:.6g} ({now - then:+.2e})")
    return "  ".join(parts)


def summary(steps: list[ReplayedStep]) -> str:
    known = [step for step in steps if step.original is not None]
    different = [step for step in known if not step.equal]
    if not known:
        return f"{len(steps)} steps replayed; the run has no metrics of them"
    if not different:
        return f"all {len(known)} steps equal the run's, bit for bit"
    first = different[0]
    return f"{len(known) - len(different)} of {len(known)} steps equal the run's; the first that differs: {line(first)}"


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def command(args: argparse.Namespace) -> int:
    original = find_run(args.run)
    config = config_of(original)
    if config is None:
        raise UsageError(f"{original.path} is not the folder of an RL job: it has no groups to replay")
    need_packages("learner")
    with open_recording(original, config) as recording:
        plan = plan_replay(original, config, recording, args.first, args.last, args.out, args.overrides)
        steps: list[ReplayedStep] = []
        plan.run.prepare(plan.config)  # before there is a report to write in the folder
        try:
            run_replay(plan, recording, steps)
        finally:  # also of a learner that failed, as one does that replays the step in which the run failed
            report = {"run": str(original.path.resolve()), "first": plan.first, "last": plan.last, "steps": steps}
            report |= {"checkpoint": plan.checkpoint and str(plan.checkpoint), "overrides": list(args.overrides)}
            write_json(plan.run.path / "replay.json", report)
    print(f"{summary(steps)}; model, metrics and replay.json are in {plan.run.path}")
    return EXIT_DONE


def plan_replay(
    original: RunDir,
    config: Config,
    recording: Recording,
    first: int,
    last: int | None,
    out: str | None,
    overrides: Sequence[str],
) -> Replay:
    """Check everything before anything is written; raises UsageError, or SlipstreamError for a torn checkpoint."""
    checkpoints = CheckpointFolder(original.checkpoints, keep=1).steps()
    if first:
        if first not in checkpoints:
            there = f"it has those of steps {_listed(list(checkpoints))}" if checkpoints else "it has none"
            raise UsageError(f"--from {first}: {original.checkpoints} has no checkpoint of step {first}; {there}")
        read_checkpoint(checkpoints[first])
    last = _last_step(recording, first, last, config.broker.retain_steps, list(checkpoints))
    folder = _new_folder(original, out)
    ends = _schedule_ends(config, checkpoints)
    began = max((step for step in ends if step <= first), default=None)
    schedules = schedule_ends(config) if began is None else ends[began]
    changed = _config(config, str(original.config), folder, last, overrides, schedules)
    if others := [step for step in sorted(ends) if first < step <= last and ends[step] != schedules]:
        print(f"the run's schedules end elsewhere from step {others[0]} on; a replay has those of step {first}")
    return Replay(original, RunDir(folder), changed, first, last, checkpoints.get(first) if first else None)


def _last_step(recording: Recording, first: int, last: int | None, retain_steps: int, checkpoints: list[int]) -> int:
    """`last`, or the last step that follows without a gap."""
    kept = list(recording.steps)
    end = next(step for step in count(first) if step not in recording.steps)
    if last is not None and last < first:
        raise UsageError(f"--to {last}: expected a step from {first} on, where the replay begins")
    if end > first and (last is None or last < end):
        return end - 1 if last is None else last
    usable = [step for step in [0, *checkpoints] if step in recording.steps]
    hint = f"; --from {' or '.join(map(str, usable))} begins where both are there" if usable else ""
    there = f"steps {_listed(kept)}" if kept else "no step"
    there += f" (broker.retain_steps: {retain_steps} committed ones)"
    raise UsageError(f"the groups of step {end} are not retained: the run's store has those of {there}{hint}")


def _listed(steps: list[int]) -> str:
    """'3, 4, 5' or, of many without gaps, '3 to 90'."""
    if len(steps) > 3 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def _new_folder(original: RunDir, out: str | None) -> Path:
    if out is None:
        folders = (original.path / "replays" / str(number) for number in count(1))
        return next(folder for folder in folders if not folder.exists()).resolve()
    folder = Path(out).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {out}: expected a new or empty folder, found something in it")
    return folder


def _schedule_ends(config: Config, checkpoints: dict[int, Path]) -> dict[int, tuple[int, int]]:
    """Where the run's schedules ended, by the first step that was trained so; {} in a run of an earlier release.

    The steps from the newest checkpoint on were trained as the config says.
    """
    for step in sorted(checkpoints, reverse=True):
        with suppress(SlipstreamError):  # a torn one
            found = read_checkpoint(checkpoints[step]).schedule_ends
            return found | {step: schedule_ends(config)} if found else {}
    return {}


def _config(
    config: Config, file: str, folder: Path, last: int, overrides: Sequence[str], schedules: tuple[int, int]
) -> Config:
    """The run's config for its replay: the same computation, no nodes, one checkpoint at the end.

    `schedules`: where those of policy and critic end.
    """
    for word in overrides:
        key = word.partition("=")[0]
        for fixed, reason in FIXED.items():
            if key == fixed or key.startswith(fixed + "."):
                raise UsageError(f"override {key}: a replay does not take it: {reason}")
    replace = msgspec.structs.replace
    checkpoint = replace(config.learner.checkpoint, every=last + 1, dir=None)
    learner = _with_schedules(config.learner, *schedules)
    own = replace(
        config,
        run=replace(config.run, dir=str(folder), steps=last + 1),
        learner=replace(learner, machines=1, checkpoint=checkpoint),
        broker=replace(config.broker, store="file", redis=None, address="tcp://127.0.0.1:0", credentials=None),
        weights=replace(config.weights, address="127.0.0.1", canary_every=0),
        watch=[],  # the steps that made a rule act are to be trained
    )
    built = build_config(msgspec.to_builtins(own), file, overrides)
    return checked(built, file, environment=False, reader="learner")[0]


def _with_schedules(learner: LearnerConfig, policy_end: int, critic_end: int) -> LearnerConfig:
    """The schedules end at these updates, also in a shorter run."""
    replace = msgspec.structs.replace
    critic = learner.critic
    if critic is not None:
        critic = replace(critic, optimizer=replace(critic.optimizer, decay_steps=critic_end))
    return replace(learner, optimizer=replace(learner.optimizer, decay_steps=policy_end), critic=critic)


def _originals(path: Path) -> dict[int, StepMetrics]:
    """The steps of the run that is replayed; raises UsageError for a damaged line, since its step would not compare."""
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), start=1):
        try:
            msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path} line {number}: {error}") from None
    return {found.step: found for found in read_tail(path, StepMetrics).lines}


def run_replay(plan: Replay, recording: Recording, steps: list[ReplayedStep]) -> None:
    """Train the steps; appends and prints each. Raises SlipstreamError when the learner fails, waits or is stopped."""
    flag = DrainFlag.install()
    if plan.checkpoint is not None:
        plan.run.checkpoints.mkdir(exist_ok=True)
        (plan.run.checkpoints / plan.checkpoint.name).symlink_to(plan.checkpoint.resolve())
    print(f"replaying steps {plan.first} to {plan.last} of {plan.original.path} in {plan.run.path}")
    originals = _originals(plan.original.metrics)
    state = preloaded(run_info(plan.config, b""), recording, plan.steps)
    tail = MetricsTail(plan.run.metrics, StepMetrics)
    supervisor = Supervisor(lambda kind, detail: None)  # the learner's end is looked at
    with serving(state, plan.config, plan.run), bar("replay", len(plan.steps), "steps") as show:
        log = log_path(plan.run.logs, "learner", "0")
        learner = supervisor.start(RoleSpec("learner", role_command(["learner", str(plan.run.config)]), log))
        try:
            while learner.running and not flag.wait(POLL_S):
                supervisor.poll()
                tail.update()
                for found in tail.lines[len(steps) :]:
                    steps.append(compare(originals.get(found.step), found))
                    print(line(steps[-1]), flush=True)
                    show(len(steps))
                check_progress(state.learner.report)
            if learner.running:
                raise SlipstreamError(f"{flag.reason}: the replay was stopped after {len(steps)} steps")
        finally:
            supervisor.stop(["learner"], DRAIN_S)
    if learner.exit_code != EXIT_DONE:
        raise end_error(learner)


@contextmanager
def serving(state: DeliveryState, config: Config, run: RunDir) -> Generator[None]:
    """While active, a broker with `state` serves the run's learner."""
    server = BrokerServer(state, config.broker.addresses, config.broker.max_message_bytes)
    thread = threading.Thread(target=server.run, name="broker", daemon=True)
    thread.start()
    write_json(run.broker_json, BrokerFile.of_this_process(server.address))
    try:
        yield
    finally:
        run.broker_json.unlink(missing_ok=True)
        server.stop()
        thread.join()


def check_progress(report: LearnerReport | None) -> None:
    """Raise UsageError when the learner waits for groups that no node will generate."""
    if report is not None and report.state in ("waiting", "replaying") and report.since_s > STUCK_S:
        raise UsageError(
            f"step {report.step} waits for groups that its recording does not have ({report.waiting_on}). With these "
            "overrides it gives groups back or leaves some out, and a replay has no node to generate others"
        )
