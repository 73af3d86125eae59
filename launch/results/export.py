"""slipstream export RUN DIR [--step N | --best] [--adapter | --critic] [--upload NAME]: as a Hugging Face folder.

The model of a run that is done is in RUN/model, which is copied; that of fewer steps is not, once the run goes on. A
checkpoint is converted by a process of the learner's, as the model, or with --adapter as a folder of its adapters
alone. With --critic it is the value model, from RUN/critic or the checkpoint. With --upload the folder is put on the
hub, too. Its repository is made before the conversion, so that a wrong token is found first. A failed upload leaves DIR
as it is.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from common import hub
from common.config.loading import load_either
from common.errors import EXIT_DONE, UsageError
from common.process.install import need_packages
from common.process.run_dir import RunDir
from launch.resolve_target import find_run
from learner.checkpoint.best import BEST_FILE, read_best
from learner.checkpoint.folder import CheckpointFolder, read_checkpoint
from learner.loop.run_files import went_on


def command(args: argparse.Namespace) -> int:
    """Write DIR from the best checkpoint or checkpoint N, else from the final folder, else from the newest checkpoint.

    Adapters are in checkpoints only.
    """
    run, target = find_run(args.run), Path(args.dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty")
    if args.adapter and load_either(run.config).learner.lora is None:
        raise UsageError(f"--adapter: {run.path} trained without learner.lora, so it has no adapters")
    if args.critic and load_either(run.config).learner.value_model is None:
        raise UsageError(f"--critic: {run.path} trained without learner.critic, so it has no value model")
    if args.best:
        if (best := read_best(run.checkpoints)) is None:
            hint = "learner.checkpoint.keep_best chooses one"
            raise UsageError(f"{run.path} has no best checkpoint: {run.checkpoints / BEST_FILE} is not there; {hint}")
        args.step = best.step
    final, name = (run.critic, "critic") if args.critic else (run.model, "model")
    done = args.step is None and not args.adapter and (final / "config.json").is_file() and not went_on(run)
    checkpoint = None if done else find_checkpoint(run, args.step)
    if checkpoint is not None:
        need_packages("learner")
    if args.upload:
        hub.open_upload("--upload", args.upload)
    if checkpoint is None:
        shutil.copytree(final, target, dirs_exist_ok=True)
    elif code := convert(run, checkpoint, target, *["--adapter"] * args.adapter, *["--critic"] * args.critic):
        return code
    what = f"the final {name}" if checkpoint is None else checkpoint.name
    print(f"{what} of {run.path} is in {target}")
    if args.upload:
        message = f"slipstream export: {what} of {run.path.resolve().name}"  # no path of this machine goes to the hub
        print(f"and at {hub.upload(args.upload, target, message)}")
    return EXIT_DONE


def find_checkpoint(run: RunDir, step: int | None) -> Path:
    """The checkpoint of `step`, None: the newest. Raises SlipstreamError when there is none, or it is not complete."""
    found = CheckpointFolder(run.checkpoints, keep=1).steps()
    if not found:
        hint = "one comes every learner.checkpoint.every steps"
        raise UsageError(f"{run.path} has no model and no checkpoint yet; {hint}")
    step = max(found) if step is None else step
    if step not in found:
        raise UsageError(f"{run.path} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(found)))}")
    read_checkpoint(found[step])
    return found[step]


def convert(run: RunDir, checkpoint: Path, target: Path, *options: str) -> int:
    """Run the conversion in a process of its own, on the CPU, beside whatever trains; its exit code."""
    words = ["--config", str(run.config), "--checkpoint", str(checkpoint.resolve()), "--out", str(target.resolve())]
    words += options
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "learner.checkpoint.export_main", *words]
    return subprocess.run(command, env=environment, check=False).returncode
