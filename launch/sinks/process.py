"""slipstream sinks RUN: the process that feeds the trackers of a run from its files, and nothing waits for it.

Each tracker has a thread and a cursor of its own. The process ends when the run has ended and everything was fed, or
on SIGTERM.
"""

import argparse
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import msgspec

from broker.contract import LEARNER_ENDED
from common.config.loading import load_either
from common.config.observing import Sink as SinkName
from common.config.schema import BaseConfig
from common.errors import EXIT_DONE, EXIT_FAILED, UsageError
from common.process.lifecycle import DrainFlag
from common.process.lock_file import only_one
from common.process.logs import setup_logging
from common.process.run_dir import RunDir, unwritable, write_json
from launch.resolve_target import find_run
from launch.sinks import trackers
from launch.sinks.feed import FedRun, Feed, Sink
from launch.sinks.prometheus import Prometheus
from learner.loop.run_files import read_record

logger = logging.getLogger(__name__)

OVER_FOR_S = 3.0  # a broker or learner that is started again at once is no end of the run
TOLD_S = 10.0  # after SIGTERM for the rest of the lines


class TrackedRun(msgspec.Struct, frozen=True):
    """RUN/sinks/tracked_run.json: the id of this run in its trackers, and the folder that fed them last."""

    id: str
    folder: str
    inode: int  # a folder that was moved keeps it on its file system

    @classmethod
    def read(cls, file: Path) -> "TrackedRun | None":
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, ValueError):
            return None


def command(args: argparse.Namespace) -> int:
    """Feed the trackers of a run; exit code 1 when one of them has not taken everything."""
    run = find_run(args.run)
    config = load_either(run.config)
    names = list(dict.fromkeys(args.sink or config.telemetry.sinks))
    if not names:
        raise UsageError(f"{run.config}: telemetry.sinks is empty; name a tracker there, or with --sink NAME")
    check_packages(names)
    with only_one(run.sinks / "lock", "feeds its trackers already"):
        setup_logging("sinks", "0", run.logs, config.telemetry.log_level)
        os.nice(10)  # the job goes first
        return watch(FedRun(run, config, tracked_id(run)), names, DrainFlag.install())


def tracked_id(run: RunDir) -> str:
    """The id of the run in its trackers; a new one for a copy of a run, because the original feeds the other.

    Those trackers then get the copy from its first line on. Raises UsageError when RUN/sinks cannot be written,
    DiskFull when the disk is full.
    """
    file = run.sinks / "tracked_run.json"
    cursors = [run.sinks / f"{name}.json" for name in trackers.BY_ID]
    try:
        folder, inode = str(run.path.resolve()), run.path.stat().st_ino
        before = TrackedRun.read(file)
        if before is not None and folder != before.folder and inode != before.inode:
            for cursor in cursors:
                cursor.unlink(missing_ok=True)
            told = "%s is no longer the folder %s that its trackers know; %s get another run, from the first step on"
            logger.warning(told, folder, before.folder, ", ".join(trackers.BY_ID))
            known = secrets.token_hex(6)
        elif before is not None:
            known = before.id
        elif any(cursor.exists() for cursor in cursors):  # an earlier release wrote them
            origin = run.run_json.read_bytes() if run.run_json.exists() else folder.encode()
            known = hashlib.sha256(origin).hexdigest()[:12]
        else:
            known = secrets.token_hex(6)
        write_json(file, TrackedRun(known, folder, inode))
    except OSError as error:
        raise unwritable("run.dir", run.sinks, error) from error
    return known


def by_hand(config: BaseConfig, run: RunDir) -> None:
    """Say how to feed telemetry.sinks where no `up` starts the process."""
    if names := config.telemetry.sinks:
        print(f"telemetry.sinks: `slipstream sinks {run.path}` feeds {', '.join(names)}; nothing starts it here")


def check_packages(names: Sequence[str]) -> None:
    """Raise UsageError when the library of a tracker is not installed."""
    for name in names:
        if name not in get_args(SinkName):
            raise UsageError(f"unknown tracker '{name}', expected one of {', '.join(get_args(SinkName))}")
        if name == "prometheus":
            continue
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name in the working directory has no origin
            why = f"needs the package {name}, which is not installed here; pip install 'slipstream-rl[sinks]'"
            raise UsageError(f"telemetry.sinks: {name} {why}")


def watch(job: FedRun, names: Sequence[str], flag: DrainFlag) -> int:
    """Feed until the run is over and all trackers have everything, or until told to stop; returns the exit code."""
    feeds: list[Feed] = []
    classes: dict[str, Callable[..., Sink]] = {**trackers.BY_NAME, "prometheus": partial(Prometheus, feeds=feeds)}
    feeds += [Feed(name, partial(classes[name], job), job) for name in names]
    for feed in feeds:
        feed.start()
    over_s = 0.0
    while any(feed.is_alive() for feed in feeds) and not flag.wait(0.5):
        over_s = over_s + 0.5 if over(job.run) else 0.0
        if over_s >= OVER_FOR_S:
            for feed in feeds:
                feed.closing.set()
    for feed in feeds:
        feed.closing.set()
    deadline = time.monotonic() + TOLD_S
    for feed in feeds:
        feed.join(max(0.0, deadline - time.monotonic()))
    left = [f"{feed.name} ({feed.lag_bytes()} bytes)" for feed in feeds if feed.is_alive()]
    if left:
        logger.error("gave up; not fed to the end: %s. The same command continues", ", ".join(left))
    return EXIT_FAILED if left else EXIT_DONE


def over(run: RunDir) -> bool:
    """Whether neither a broker nor a learner of this run is left, as far as this machine knows."""
    broker = run.broker()
    record = read_record(run)
    if record is None or (broker is not None and not broker.ended):
        return False
    # A warm start has no broker, and may run where this machine sees none of its processes.
    return record.state in LEARNER_ENDED or (record.ended if broker is None else not record.runs_here)
