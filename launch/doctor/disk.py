"""Doctor: the disk under run.dir: room, whether a sync reaches it, and whether files can be locked there."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.config.schema import Config, SftConfig
from common.process.files import sync
from launch.doctor.findings import Finding, fine, problem, warning
from launch.plan.job_plan import Plan

GIB, MIB = 1 << 30, 1 << 20
VOLATILE = ("tmpfs", "ramfs")
SLOW_SYNC_S = 0.05
LOGS_BYTES = 256 * MIB  # logs, metrics, the ledger
SYNCS = 5


def check_disk(run_dir: Path, config: Config | SftConfig, plan: Plan | None) -> Iterator[Finding]:
    """Everything about the folder of the run."""
    place = nearest(run_dir)
    if not os.access(place, os.W_OK | os.X_OK):
        why = "every role writes there"
        yield problem("disk", f"{place} cannot be written", why, "run.dir=FOLDER elsewhere, or chown it")
        return
    yield _space(place, config, plan)
    yield from _kind(place)
    yield from _sync(place, config)
    yield from _lock(place)


def nearest(path: Path) -> Path:
    """`path` itself or the nearest folder above it that exists."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            return folder
    return Path("/")


def disk_bytes(config: Config | SftConfig, plan: Plan) -> int:
    """The largest size of the run: checkpoints, the final model, and the broker's groups, all of full length."""
    weights = plan.rl.publish.bytes if plan.rl is not None else plan.parameters * 4
    needed = LOGS_BYTES + plan.checkpoint.bytes * plan.checkpoint.kept + weights
    if isinstance(config, Config) and plan.rl is not None and config.broker.store == "file":
        step = config.learner.groups_per_step * plan.rl.window.group_bytes
        held = config.broker.retain_steps + config.learner.checkpoint.every + config.staleness.max + 1
        needed += min(held * step, 2 * config.broker.max_bytes)
    return needed


def _space(place: Path, config: Config | SftConfig, plan: Plan | None) -> Finding:
    free = shutil.disk_usage(place).free
    needed = disk_bytes(config, plan) if plan is not None else LOGS_BYTES
    what = f"{free / GIB:.1f} GiB free under {place}, up to {needed / GIB:.1f} needed"
    mend = "run.dir=FOLDER on a larger disk, or a smaller learner.checkpoint.keep or broker.retain_steps"
    if free < needed:
        why = "on a full disk the broker acknowledges nothing and checkpoints fail"
        return (problem if free < needed / 2 else warning)("disk", what, why, mend)
    return fine("disk", what)


def _kind(place: Path) -> Iterator[Finding]:
    kind = file_system(place)
    if kind in VOLATILE:
        what = f"{place} is on a {kind}"
        why = "checkpoints and groups are gone with the power, whatever broker.durability promises, and take memory"
        yield warning("file system", what, why, "run.dir=FOLDER on a disk")


def file_system(place: Path) -> str:
    """Type of the file system of `place`; '' when it is not known."""
    whole = str(place.resolve())
    best, kind = "", ""
    for partition in psutil.disk_partitions(all=True):
        point = partition.mountpoint
        inside = whole == point or whole.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, partition.fstype
    return kind


def _sync(place: Path, config: Config | SftConfig) -> Iterator[Finding]:
    """fsync of a file and of its folder works, and takes how long."""
    try:
        seconds = sync_seconds(place)
    except OSError as error:
        why = "neither checkpoints nor the broker's promises would be on the disk when they say so"
        yield problem("fsync", f"{place}: {error.strerror or error}", why, "run.dir=FOLDER on a local file system")
        return
    what = f"{seconds * 1e3:.1f} ms"
    if seconds > SLOW_SYNC_S and isinstance(config, Config) and config.broker.durability == "fsync":
        why = "each promise of the broker waits for one, so groups take longer to be ready"
        mend = "run.dir on a faster disk, or broker.durability=everysec (docs/delivery.md says what that costs)"
        yield warning("fsync", what, why, mend)
    else:
        yield fine("fsync", what)


def sync_seconds(place: Path) -> float:
    """Median seconds of one append and fsync in `place`. Raises OSError where that does not work."""
    with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
        taken: list[float] = []
        for _ in range(SYNCS):
            file.write(b"x" * 4096)
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
        sync(place)
    return sorted(taken)[SYNCS // 2]


def _lock(place: Path) -> Iterator[Finding]:
    """flock works, which keeps a second broker out."""
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "two brokers of one run could write the same store"
        yield problem("locks", f"{place}: {error.strerror or error}", why, "run.dir=FOLDER on a local file system")
