"""slipstream export RUN DIR: copy the trained Hugging Face model out of a run."""

import argparse
import shutil
from pathlib import Path

from common.errors import UsageError
from launch.targets import find_run


def command(args: argparse.Namespace) -> int:
    """Copy RUN/model to a new folder."""
    run, target = find_run(args.run), Path(args.dir)
    if not (run.model / "config.json").is_file():
        raise UsageError(f"{run.path} has no model yet; it is written when the job is done")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty")
    shutil.copytree(run.model, target, dirs_exist_ok=True)
    print(f"model exported to {target}")
    return 0
