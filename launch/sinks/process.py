"""slipstream sinks RUN: the process that feeds the trackers of a run from its files, and nothing waits for it.

Each tracker has a thread and a cursor of its own. The process ends when the run has ended and everything was fed, or
on SIGTERM.
"""

import argparse
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from typing import Protocol, get_args

import msgspec

from broker.contract import LEARNER_ENDED
from common.config.loading import load_resolved
from common.config.observing import Sink as SinkName
from common.errors import EXIT_DONE, EXIT_FAILED, UsageError
from common.process.lifecycle import DrainFlag
from common.process.lock_file import only_one
from common.process.logs import setup_logging
from common.process.run_dir import RunDir, write_json
from launch.observe.metrics_tail import LineTail
from launch.resolve_target import find_run
from launch.sinks import trackers
from launch.sinks.points import Cursor, Job, Point
from learner.loop.run_files import read_record

logger = logging.getLogger(__name__)

POLL_S = 1.0
FEED_BYTES = 1 << 20  # read between two flushes, and by Prometheus at its start
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 60.0
OVER_FOR_S = 3.0  # a broker or learner that is started again at once is no end of the run
TOLD_S = 10.0  # after SIGTERM for the rest of the lines


class Sink(Protocol):
    """A connected tracker. Every call may raise anything, and may hang."""

    def write(self, points: Sequence[Point]) -> None: ...  # returns when the tracker has them
    def close(self) -> None: ...


class Feed(threading.Thread):
    """Feeds one sink until `closing` is set and everything was fed."""

    def __init__(self, name: str, make: Callable[[Cursor], Sink], run: RunDir) -> None:
        """`make` connects the sink, for lines behind the cursor."""
        super().__init__(name=name, daemon=True)
        self.closing = threading.Event()
        self.cursor = Cursor()
        self._make, self._metrics, self._file = make, run.metrics, run.sinks / f"{name}.json"
        self._wait_s = FIRST_BACKOFF_S
        with suppress(OSError, ValueError):
            if name == "prometheus":  # it shows the newest state only
                self.cursor.offset = max(0, run.metrics.stat().st_size - FEED_BYTES)
            else:
                kept = msgspec.json.decode(self._file.read_bytes(), type=Cursor)
                self.cursor = msgspec.structs.replace(kept, state="starting")

    def run(self) -> None:
        while self.cursor.state != "ended":
            try:
                with closing(self._make(self.cursor)) as sink:
                    self._feed(sink)
                self._keep(self.cursor, "ended")
            except Exception as error:  # a tracker's library may raise anything
                with suppress(OSError):
                    self._keep(self.cursor, f"{type(error).__name__}: {error}"[:500])
                time.sleep(self._wait_s)
                self._wait_s = min(2 * self._wait_s, LONGEST_BACKOFF_S)

    def lag_bytes(self) -> int:
        """Bytes of metrics.jsonl that the tracker does not have."""
        with suppress(FileNotFoundError):
            stat = self._metrics.stat()
            return stat.st_size - (self.cursor.offset if self.cursor.inode in (-1, stat.st_ino) else 0)
        return 0

    def _feed(self, sink: Sink) -> None:
        tail = LineTail(self._metrics, self.cursor.offset, self.cursor.inode)
        while True:
            last = self.closing.is_set()
            _, lines = tail.read(FEED_BYTES)
            cursor = msgspec.structs.replace(self.cursor)
            if points := cursor.take(lines):
                sink.write(points)
            moved = (tail.offset, tail.inode) != (cursor.offset, cursor.inode)
            cursor.offset, cursor.inode = tail.offset, tail.inode
            self._keep(cursor, "feeding")
            self._wait_s = FIRST_BACKOFF_S
            if not moved:
                if last:
                    return
                self.closing.wait(POLL_S)

    def _keep(self, cursor: Cursor, state: str) -> None:
        """Write where the tracker is, and log a change of its state once."""
        if (cursor := msgspec.structs.replace(cursor, state=state)) == self.cursor:
            return
        if state != self.cursor.state:
            level = logging.INFO if state in ("feeding", "ended") else logging.WARNING
            logger.log(level, "%s: %s, %d bytes behind", self.name, state, self.lag_bytes())
        self.cursor = cursor
        write_json(self._file, cursor)


def command(args: argparse.Namespace) -> int:
    """Feed the trackers of a run; exit code 1 when one of them has not taken everything."""
    run = find_run(args.run)
    config = load_resolved(run.config)
    names = list(dict.fromkeys(args.sink or config.telemetry.sinks))
    if not names:
        raise UsageError(f"{run.config}: telemetry.sinks is empty; name a tracker there, or with --sink NAME")
    check_packages(names)
    with only_one(run.sinks / "lock", "feeds its trackers already"):
        setup_logging("sinks", "0", run.logs, config.telemetry.log_level)
        os.nice(10)  # the job goes first
        origin = run.run_json.read_bytes() if run.run_json.exists() else str(run.path.resolve()).encode()
        return watch(Job(run, config, hashlib.sha256(origin).hexdigest()[:12]), names, DrainFlag.install())


def check_packages(names: Sequence[str]) -> None:
    """Raise UsageError when the library of a tracker is not installed."""
    for name in names:
        if name not in get_args(SinkName):
            raise UsageError(f"unknown tracker '{name}', expected one of {', '.join(get_args(SinkName))}")
        package = "prometheus_client" if name == "prometheus" else name
        found = find_spec(package)
        if found is None or found.origin is None:  # a folder of that name in the working directory has no origin
            why = f"needs the package {package}, which is not installed here; pip install 'slipstream-rl[sinks]'"
            raise UsageError(f"telemetry.sinks: {name} {why}")


def watch(job: Job, names: Sequence[str], flag: DrainFlag) -> int:
    """Feed until the run is over and all trackers have everything, or until told to stop; returns the exit code."""
    feeds: list[Feed] = []
    classes: dict[str, Callable[..., Sink]] = trackers.BY_NAME
    if "prometheus" in names:
        from launch.sinks.prometheus import Prometheus

        classes = classes | {"prometheus": partial(Prometheus, feeds=feeds)}
    feeds += [Feed(name, partial(classes[name], job), job.run) for name in names]
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
    broker, record = run.broker(), read_record(run)
    if record is None or (broker is not None and not broker.ended):
        return False
    return record.state in LEARNER_ENDED or not record.runs_here
