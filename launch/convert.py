"""slipstream convert MODEL DIR: a model whose weights each rank of the learner reads in part, without converting them.

DIR is written on the CPU by a process of the learner's. It is complete or absent, also after a kill.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from common.config.checks import model_folder_problems
from common.config.converted import is_converted, read_converted
from common.errors import EXIT_DONE, UsageError
from common.hub import absolute, local_copy
from common.process.install import need_packages
from launch.checks.job import GET_AGAIN, broken_weights
from learner.megatron.conversion.hf_folder import stored_bytes, stored_dtype

GIB = 1 << 30


def command(args: argparse.Namespace) -> int:
    """Write DIR from MODEL, a folder or a name of the hub; exit code 2 when one of them cannot be used."""
    target = Path(absolute("DIR", args.dir))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not empty; name a new folder")
    source = Path(local_copy("model.path", absolute("model.path", args.model)))
    check_source(source)
    check_room(source, target)
    need_packages("learner")
    words = ["--model", str(source), "--out", str(target), *["--no-verify"] * args.no_verify]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = [sys.executable, "-P", "-m", "learner.checkpoint.convert_main", *words]
    code = subprocess.run(process, env=environment, check=False).returncode
    if code == EXIT_DONE:
        made = read_converted(target)
        print(f"{target} has {made.weight_bytes / GIB:.2f} GiB of weights in {made.dtype}; set model.path to it")
    return code


def check_source(folder: Path) -> None:
    """Raise UsageError for a folder that cannot be converted."""
    if is_converted(folder):
        raise UsageError(f"{folder} is converted already; any layout loads it as it is")
    for problem in model_folder_problems(str(folder)):
        raise UsageError(str(replace(problem, key="MODEL")))
    for file in sorted(folder.glob("*.safetensors")):
        if reason := broken_weights(file):
            raise UsageError(f"MODEL: {file}: {reason}; {GET_AGAIN}")


def check_room(source: Path, target: Path) -> None:
    """Raise UsageError where the disk has less room than the converted weights take."""
    needed = stored_bytes(source)
    at = next(folder for folder in target.parents if folder.is_dir())
    if (free := shutil.disk_usage(at).free) < needed:
        sizes = f"{needed / GIB:.1f} GiB in {stored_dtype(source)}, and {free / GIB:.1f} GiB are free in {at}"
        raise UsageError(f"the converted weights of {source} take {sizes}")
