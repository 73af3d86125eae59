"""A role's command in a container: by Apptainer for a .sif file or a folder, by pyxis for every other image.

role_job stays outside, because it asks Slurm; its host needs the base install. pyxis takes the options of an srun.
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from common.config.schema import Config
from common.process.run_dir import RunDir

SLIPSTREAM = "env -u PYTHONPATH slipstream"  # the image's own


def by_apptainer(image: str) -> bool:
    return image.endswith(".sif") or os.path.isdir(image)


def paths(config: Config, run: RunDir) -> list[str]:
    """Folders of this host that a role reads or writes, each once and none inside another one."""
    found = sorted({Path(path) for path in _named(config, run) if os.path.exists(path)})
    return [str(path) for path in found if not any(path != other and path.is_relative_to(other) for other in found)]


def _named(config: Config, run: RunDir) -> Iterator[str]:
    yield from (os.getcwd(), str(run.path), os.environ.get("HF_HOME", ""))
    yield os.path.dirname(config.broker.credentials or "")
    yield from (config.model.path, config.learner.loss.reference or "", config.learner.checkpoint.dir or "")
    for dataset in (*(job.tasks.dataset for job in config.sources.values()), *config.evaluation.paths):
        yield os.path.dirname(dataset)


def apptainer(image: str, mounted: list[str], gpus: bool) -> str:
    """Words before a command, as the shell reads them."""
    words = ["apptainer", "exec", *["--nv"] * gpus, "--bind", ",".join(mounted), image]
    return shlex.join(words)


def pyxis(image: str, mounted: list[str]) -> str:
    """Options of srun, as the shell reads them."""
    mounts = ",".join(f"{path}:{path}" for path in mounted)
    return shlex.join([f"--container-image={image}", f"--container-mounts={mounts}"])
