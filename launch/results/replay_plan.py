"""The plan of `slipstream replay`: which steps, from which checkpoint, under which config, into which folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.journal.recording import Recording
from common.config.loading import build_config
from common.config.schema import Config
from common.errors import UsageError
from common.process.run_dir import RunDir
from launch.resolve_target import checked
from learner.checkpoint.folder import CheckpointFolder, read_checkpoint

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
    changed = _config(config, str(original.config), folder, last, overrides)
    return Replay(original, RunDir(folder), changed, first, last, checkpoints.get(first) if first else None)


def _last_step(recording: Recording, first: int, last: int | None, retain_steps: int, checkpoints: list[int]) -> int:
    """`last`, or the last step that follows without a gap."""
    kept = list(recording.steps)
    end = first
    while end in recording.steps:
        end += 1
    if last is not None and last < first:
        raise UsageError(f"--to {last}: expected a step from {first} on, where the replay begins")
    if end > first and (last is None or last < end):
        return end - 1 if last is None else last
    usable = [step for step in [0, *checkpoints] if step in recording.steps]
    hint = f"; --from {' or '.join(map(str, usable))} begins where both are there" if usable else ""
    raise UsageError(
        f"the groups of step {end} are not retained: the run's store has those of "
        f"{f'steps {_listed(kept)}' if kept else 'no step'} (broker.retain_steps: {retain_steps} committed ones){hint}"
    )


def _listed(steps: list[int]) -> str:
    """'3, 4, 5' or, of many without gaps, '3 to 90'."""
    if len(steps) > 3 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def _new_folder(original: RunDir, out: str | None) -> Path:
    if out is None:
        number = 1
        while (folder := original.path / "replays" / str(number)).exists():
            number += 1
        return folder.resolve()
    folder = Path(out).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {out}: expected a new or empty folder, found something in it")
    return folder


def _config(config: Config, file: str, folder: Path, last: int, overrides: Sequence[str]) -> Config:
    """The run's config for its replay: the same computation, no nodes, one checkpoint at the end."""
    for word in overrides:
        key = word.partition("=")[0]
        for fixed, reason in FIXED.items():
            if key == fixed or key.startswith(fixed + "."):
                raise UsageError(f"override {key}: a replay does not take it: {reason}")
    replace = msgspec.structs.replace
    optimizer = replace(config.learner.optimizer, decay_steps=config.learner.optimizer.decay_steps or config.run.steps)
    checkpoint = replace(config.learner.checkpoint, every=last + 1, dir=None)
    own = replace(
        config,
        run=replace(config.run, dir=str(folder), steps=last + 1),
        learner=replace(config.learner, machines=1, optimizer=optimizer, checkpoint=checkpoint),
        broker=replace(config.broker, store="file", redis=None, address="tcp://127.0.0.1:0", credentials=None),
        weights=replace(config.weights, address="127.0.0.1", canary_every=0),
    )
    return checked(build_config(msgspec.to_builtins(own), file, overrides), file, environment=False)[0]
