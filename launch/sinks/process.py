"""slipstream sinks RUN: the process that feeds the trackers of a run from its files, and nothing waits for it.

Each tracker has a thread and a cursor of its own (launch/sinks/feed.py). The process ends when the run has ended and
everything was fed, or on SIGTERM.
"""

import argparse
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import get_args

from broker.contract import LEARNER_ENDED
from common.config.loading import load_resolved
from common.config.observing import Sink as SinkName
from common.errors import EXIT_DONE, EXIT_FAILED, UsageError
from common.process.lifecycle import DrainFlag, alive
from common.process.lock_file import AlreadyLocked, take_lock
from common.process.logs import setup_logging
from common.process.run_dir import RunDir
from launch.observe.line_tail import LineTail
from launch.resolve_target import find_run
from launch.sinks import trackers
from launch.sinks.feed import Feed, Sink
from launch.sinks.points import Cursor, Job
from learner.loop.run_files import read_record

logger = logging.getLogger(__name__)

LOOK_S = 0.5
OVER_FOR_S = 3.0  # a broker or learner that is started again at once is no end of the run
TOLD_S = 10.0  # after SIGTERM for the rest of the lines
STUCK_S = 60.0  # at the end of the run, while no tracker moves
NICENESS = 10  # the job goes first
PACKAGES = {"mlflow": "mlflow-skinny", "prometheus": "prometheus_client"}  # others are named like their sink
CLASSES: dict[str, Callable[[Job, Cursor], Sink]] = {
    "tensorboard": trackers.TensorBoard,
    "wandb": trackers.Wandb,
    "mlflow": trackers.Mlflow,
    "trackio": trackers.Trackio,
}


def command(args: argparse.Namespace) -> int:
    """Feed the trackers of a run; exit code 1 when one of them has not taken everything."""
    run = find_run(args.run)
    if not run.config.exists():
        raise UsageError(f"{run.path} has no config.yaml, which names its trackers: telemetry.sinks")
    config = load_resolved(run.config)
    names = list(dict.fromkeys(args.sink or config.telemetry.sinks))
    if not names:
        raise UsageError(f"{run.config}: telemetry.sinks is empty; name a tracker there, or with --sink NAME")
    check_packages(names)
    try:
        run.sinks.mkdir(exist_ok=True)
        lock = take_lock(run.sinks / "lock")
    except AlreadyLocked as error:
        raise UsageError(f"{run.path}: process {error.holder} feeds its trackers already") from None
    except OSError as error:
        raise UsageError(f"{run.sinks} cannot be written: {error}") from None
    with lock:
        setup_logging("sinks", "0", run.logs, config.telemetry.log_level)
        with suppress(OSError):
            os.nice(NICENESS)
        origin = run.run_json.read_bytes() if run.run_json.exists() else str(run.path.resolve()).encode()
        job = Job(run, config, hashlib.sha256(origin).hexdigest()[:12], config.run.name)
        return watch(start(job, names), run, DrainFlag.install())


def check_packages(names: Sequence[str]) -> None:
    """Raise UsageError when the library of a tracker is not installed."""
    for name in names:
        if name not in get_args(SinkName):
            raise UsageError(f"unknown tracker '{name}', expected one of {', '.join(get_args(SinkName))}")
        found = find_spec("prometheus_client" if name == "prometheus" else name)
        if found is None or found.origin is None:  # a folder of that name in the working directory has no origin
            package, hint = PACKAGES.get(name, name), "pip install 'slipstream-rl[sinks]'"
            raise UsageError(
                f"telemetry.sinks: {name} needs the package {package}, which is not installed here; {hint}"
            )


def start(job: Job, names: Sequence[str]) -> list[Feed]:
    """A running thread for each tracker."""
    feeds: list[Feed] = []
    for name in names:
        if name == "prometheus":
            from launch.sinks.prometheus import Prometheus

            make = partial(Prometheus, job, lags=lambda: {feed.name: feed.shown.lag_lines for feed in feeds})
        else:
            make = partial(CLASSES[name], job)
        feeds.append(Feed(name, make, job.run.metrics, job.run.sinks / f"{name}.json", name == "prometheus"))
    for feed in feeds:
        feed.start()
    return feeds


def watch(feeds: Sequence[Feed], run: RunDir, flag: DrainFlag) -> int:
    """Until all feeds have ended, or those that have not no longer move; returns the exit code."""
    tail, total, over_since, give_up_at = LineTail(run.metrics), 0, None, float("inf")
    moved: list[int] = []
    while any(feed.is_alive() for feed in feeds) and time.monotonic() < give_up_at:
        flag.wait(LOOK_S) if not flag.is_set else time.sleep(LOOK_S / 10)
        with suppress(OSError):  # the files of a run, or its disk, may be away for a while
            replaced, lines = tail.read()
            total = len(lines) + (0 if replaced else total)
            for feed in feeds:
                feed.show(total)
        now = time.monotonic()
        over_since = (over_since or now) if over(run) else None
        if not flag.is_set and (over_since is None or now - over_since < OVER_FOR_S):
            continue
        positions = [feed.shown.cursor.lines for feed in feeds]
        if give_up_at == float("inf") or (positions != moved and not flag.is_set):
            give_up_at, moved = now + (TOLD_S if flag.is_set else STUCK_S), positions
        for feed in feeds:
            feed.closing.set()
    left = [f"{feed.name} ({feed.shown.lag_lines} lines)" for feed in feeds if feed.is_alive()]
    if left:
        logger.error("gave up; not fed to the end: %s. The same command continues", ", ".join(left))
    return EXIT_FAILED if left else EXIT_DONE


def over(run: RunDir) -> bool:
    """Whether neither a broker nor a learner of this run is left, as far as this machine knows."""
    broker, record = run.broker(), read_record(run)
    if record is None or (broker is not None and not broker.ended):
        return False
    return record.state in LEARNER_ENDED or not alive(record.pid)
