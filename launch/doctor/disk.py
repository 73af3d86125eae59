"""Doctor: the disk under run.dir: room, whether a sync reaches it, and whether files can be locked there."""

import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.config.schema import Config, SftConfig
from common.process.files import sync
from launch.doctor.findings import Finding, judged, problem, warning
from launch.plan.job_plan import Plan

GIB, MIB = 1 << 30, 1 << 20
VOLATILE = ("tmpfs", "ramfs")
SLOW_SYNC_S = 0.05
LOGS_BYTES = 256 * MIB  # logs, metrics, the ledger
SYNCS = 5
LOCAL = "run.dir=FOLDER on a local file system"


def check_disk(run_dir: Path, config: Config | SftConfig, plan: Plan | None) -> Iterator[Finding]:
    """Room, and whether a sync reaches the disk and a lock keeps a second broker out."""
    folder = next((path for path in (run_dir, *run_dir.parents) if path.is_dir()), Path("/"))
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "every role writes there"
        yield problem("disk", f"{folder} cannot be written", why, "run.dir=FOLDER elsewhere, or chown it")
        return
    yield _space(folder, config, plan)
    inside = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    kind = max(reversed(inside), key=lambda p: len(p.mountpoint)).fstype if inside else ""
    if kind in VOLATILE:
        why = "checkpoints and groups are gone with the power, whatever broker.durability promises, and take memory"
        yield warning("file system", f"{folder} is on a {kind}", why, "run.dir=FOLDER on a disk")
    yield _sync(folder, config)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "two brokers of one run could write the same store"
        yield problem("locks", f"{folder}: {error.strerror or error}", why, LOCAL)


def _space(folder: Path, config: Config | SftConfig, plan: Plan | None) -> Finding:
    """Room for checkpoints, the final model, and the broker's groups, all of full length."""
    free, needed = shutil.disk_usage(folder).free, LOGS_BYTES
    if plan is not None:
        weights = plan.rl.publish.bytes if plan.rl is not None else plan.parameters * 4
        needed += plan.checkpoint.bytes * plan.checkpoint.kept + weights
        if isinstance(config, Config) and plan.rl is not None and config.broker.store == "file":
            step = config.learner.groups_per_step * plan.rl.window.group_bytes
            steps = config.broker.retain_steps + config.learner.checkpoint.every + config.staleness.max + 1
            needed += min(steps * step, 2 * config.broker.max_bytes)
    why = "on a full disk the broker acknowledges nothing and checkpoints fail"
    fix = "run.dir=FOLDER on a larger disk, or a smaller learner.checkpoint.keep or broker.retain_steps"
    what = f"{free / GIB:.1f} GiB free under {folder}, up to {needed / GIB:.1f} needed"
    return judged("disk", what, (free < needed / 2, "problem", why, fix), (free < needed, "warning", why, fix))


def _sync(folder: Path, config: Config | SftConfig) -> Finding:
    """The median time of one append and fsync, where fsync of a file and of its folder works."""
    taken: list[float] = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            for _ in range(SYNCS):
                file.write(b"x" * 4096)
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - began)
            sync(folder)
    except OSError as error:
        why = "neither checkpoints nor the broker's promises would be on the disk when they say so"
        return problem("fsync", f"{folder}: {error.strerror or error}", why, LOCAL)
    waits = isinstance(config, Config) and config.broker.durability == "fsync"
    seconds = statistics.median(taken)
    why = "each promise of the broker waits for one, so groups take longer to be ready"
    fix = "run.dir on a faster disk, or broker.durability=everysec (docs/delivery.md says what that costs)"
    return judged("fsync", f"{seconds * 1e3:.1f} ms", (seconds > SLOW_SYNC_S and waits, "warning", why, fix))
