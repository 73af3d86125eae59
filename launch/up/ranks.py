"""The ranks of a learner as processes: torchrun and its environment."""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from common.config.schema import BaseConfig
from common.errors import DiskFull
from common.process.run_dir import RunDir
from common.process.versions import versions
from launch.cluster.interface import keep_gloo_here, use_for_weights
from launch.up.devices import compute_capability

# torchrun kills ranks that are still busy this long after SIGTERM: a step and a checkpoint must fit in.
SHUTDOWN_TIMEOUT_S = 300
BLACKWELL = 10.0  # compute capability
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
ROOM_S = 5.0  # between two looks at a full disk


def slurm_machines() -> int:
    """Machines of a Slurm step that runs one task on each of several; 0 outside such a step."""
    machines, tasks = (os.environ.get(f"SLURM_STEP_NUM_{name}", "") for name in ("NODES", "TASKS"))
    return int(machines) if machines == tasks and machines.isdecimal() and int(machines) > 1 else 0


def become_torchrun(config: BaseConfig, run: RunDir, broker: str = "") -> NoReturn:
    """Replace this process, so that signals and exit codes are torchrun's own."""
    prepare(config, run)
    ranks = str(config.learner.world_size)
    command = torchrun(run, ["--nproc-per-node", ranks], ["--broker", broker] if broker else [])
    keep_gloo_here()
    if config.rl is not None:
        use_for_weights(config.rl, config.rl.weights.address)
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, **learner_environment(config)})


def prepare(config: BaseConfig, run: RunDir) -> None:
    """`run.prepare`, once the disk has room: no restart is used up meanwhile. Raises OtherRun and UsageError as it."""
    told = False
    while True:
        try:
            run.prepare(config)
            return
        except DiskFull as error:
            if not told:
                told = True
                with suppress(OSError):  # the log may be on the same disk
                    sys.stderr.write(f"{error}; the learner starts when there is room\n")
                    sys.stderr.flush()
            time.sleep(ROOM_S)


def torchrun(run: RunDir, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """torchrun with more `options`, which starts the ranks of a run once, with more `words` for each."""
    limits = ["--max-restarts", "0", "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
    # torchrun's own command for a module would search the job's folder first
    rank = ["--no-python", sys.executable, "-u", "-P", "-m", "learner.main", "--config", str(run.config), *words]
    return [sys.executable, "-P", "-m", "learner.torchrun", *options, *limits, *rank]


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that bound the CPU threads of torch; read once, at import."""
    return {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}


def learner_environment(config: BaseConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of the ranks that their libraries read once, at import or at the first call of CUDA."""
    found = thread_environment(config.learner.threads)
    found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts
    # Up to Hopper one queue keeps a communication ahead of the product that it overlaps: layers.py of
    # megatron.core.tensor_parallel. Blackwell wants many: PerfEnvPlugin in run_plugins.py of megatron.bridge.recipes.
    parallel = config.learner.parallel
    capability = compute_capability()
    split = parallel.tensor * parallel.context
    if QUEUES not in environ and 0 < capability < BLACKWELL and split > 1:
        found[QUEUES] = "1"
    elif QUEUES not in environ and capability and 1 < split < config.learner.world_size:
        found[QUEUES] = "32"
    # Torch rounds pinned memory up to a power of two and never gives it back, except for what is larger than this.
    settings = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    known = tuple(map(int, re.findall(r"\d+", versions()["torch"])[:2])) >= (2, 13)  # older ones refuse the word
    if known and "pinned_max_cached_size_mb" not in settings:
        found["PYTORCH_ALLOC_CONF"] = f"{settings},pinned_max_cached_size_mb:1".lstrip(",")
    return found
