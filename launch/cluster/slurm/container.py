"""A role's command in a container: by Apptainer for a .sif file or a folder, by pyxis for every other image.

role_job stays outside, because it asks Slurm; its host needs the base install. pyxis takes the options of an srun.
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from common.config.checks import named_paths
from common.config.schema import Config
from common.errors import UsageError, meant
from common.process.run_dir import RunDir

SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))  # The image has its own.
REGISTRY = "registry.example#slipstream-learner:1"
SLIPSTREAM = "env -u PYTHONPATH slipstream"  # the image's own


def check(image: str) -> None:
    """Raise UsageError for the name of a file or folder that is not there; a registry's image has no such name."""
    if (image.startswith(("/", "./", "../", "~")) or image.endswith((".sif", ".sqsh"))) and not os.path.exists(image):
        folder = Path(image).parent
        near = meant(Path(image).name, [entry.name for entry in folder.iterdir()] if folder.is_dir() else [], "")
        hint = f"; {near}" if near else f"; images of a registry are named like {REGISTRY}"
        raise UsageError(f"--container: expected a file or folder that exists, found {image!r}{hint}")


def by_apptainer(image: str) -> bool:
    return image.endswith(".sif") or os.path.isdir(image)


def paths(config: Config, run: RunDir) -> list[str]:
    """Files and folders of this host that a role reads or writes, each once and none inside another one.

    Raises UsageError for a path that the runtimes would read as several.
    """
    found = sorted({Path(path) for path in _named(config, run) if os.path.exists(path)} - {Path("/")})
    for path in found:
        if wrong := {",", ":"} & {*str(path)}:
            raise UsageError(f"--container: {path} cannot be mounted, because of '{min(wrong)}' in its name")
    return [str(path) for path in found if not any(path != other and path.is_relative_to(other) for other in found)]


def _named(config: Config, run: RunDir) -> Iterator[str]:
    yield from (os.getcwd(), str(run.path), os.environ.get("HF_HOME", ""))
    for path in map(Path, named_paths(config)):
        yield str(path.parent if "*" in path.name else path)  # a pattern of files
    for job in config.sources.values():
        python = Path(job.tasks.limits.python or "")
        if python.is_absolute() and (prefix := python.parent.parent) not in SYSTEM:
            yield str(prefix)  # its packages, too


def apptainer(image: str, mounted: list[str], gpus: bool) -> str:
    """Words before a command, as the shell reads them."""
    words = ["apptainer", "exec", *["--nv"] * gpus, "--bind", ",".join(mounted), image]
    return shlex.join(words)


def pyxis(image: str, mounted: list[str]) -> str:
    """Options of srun, as the shell reads them."""
    mounts = ",".join(f"{path}:{path}" for path in mounted)
    return shlex.join([f"--container-image={image}", f"--container-mounts={mounts}"])
