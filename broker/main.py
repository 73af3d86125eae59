"""The broker process: `slipstream broker CONFIG` ends here."""

import logging
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from broker.connect import Access, connect
from broker.contract import RunInfo
from broker.journal.open_state import bind, open_memory
from broker.journal.status_files import Snapshots
from broker.server.server import BrokerServer
from common.config.schema import Config
from common.errors import EXIT_DONE, BrokerError, BrokerUnreachable, UsageError
from common.process.event_file import EventFile
from common.process.files import move_aside
from common.process.lifecycle import alive
from common.process.malloc_tuning import keep_freed_memory
from common.process.run_dir import BrokerFile, RunDir, write_atomic

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 5.0
QUARANTINE = "quarantine"


def run_broker(config: Config, config_json: bytes) -> int:
    """Serve the run until SIGTERM or SIGINT; returns the exit code.

    RUN/broker.json exists while the broker listens. RUN/events.jsonl grows by one line per event.
    RUN/ledger.json and RUN/status.json are written every few seconds and at the end. What RUN/store holds is taken up
    again (docs/delivery.md); without one, the ledger of an earlier broker of the run is kept beside the new one.

    Raises:
        UsageError: the address is refused or in use, this run has a living broker, or its store is damaged.
        StoreFailed: the disk refuses what has to be kept.
    """
    keep_freed_memory(one_heap=True)
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    refuse_second_broker(run_dir, config.broker.credentials)
    with closing(EventFile(run_dir / "events.jsonl", "broker")) as events:
        memory = open_memory(config, run_info(config, config_json), events.write)
        try:
            snapshots = Snapshots(run_dir, memory.state)
            server = bind(memory, config.broker, snapshots.tick, run_dir / QUARANTINE)
            if not memory.recovered:
                keep_former_ledger(run_dir)
            here = BrokerFile(os.getpid(), server.address, time.time())
            write_atomic(run_dir / "broker.json", msgspec.json.encode(here))
            try:
                with stopping_on_signals(server):
                    logger.info("broker of run %s listens on %s", config.run.name, server.address)
                    server.run()
            finally:
                (run_dir / "broker.json").unlink(missing_ok=True)
                snapshots.write()
        finally:
            memory.close()
    logger.info("broker of run %s has stopped", config.run.name)
    return EXIT_DONE


def run_info(config: Config, config_json: bytes) -> RunInfo:
    """The facts that the broker needs, from the job's config."""
    return RunInfo(
        name=config.run.name,
        run_dir=str(Path(config.run.dir).resolve()),
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.staleness.max,
        max_attempts=config.tasks.max_attempts,
        lease_s=config.broker.lease_s,
        max_bytes=config.broker.max_bytes,
        config=config_json,
        max_lease_s=config.broker.max_lease_s,
    )


def refuse_second_broker(run_dir: Path, credentials: str | None = None) -> None:
    """Raise UsageError when RUN/broker.json names a broker that is alive, also one with other keys."""
    known = RunDir(run_dir).broker()
    if known is None or not alive(known.pid):
        return
    who = f"process {known.pid}, {known.address}"
    try:
        access = Access(address=known.address, role="broker", deadline_s=ALIVE_CHECK_S, credentials=credentials)
        with connect(access) as client:
            status = client.status()
    except (UsageError, BrokerError) as error:  # somebody is there, and has said no
        raise UsageError(
            f"run.dir: {run_dir} already has a broker ({who}), which does not talk to this one: {error}; stop it "
            f"first, or remove {run_dir / 'broker.json'} when that process is something else"
        ) from error
    except BrokerUnreachable:
        logger.warning("broker.json names process %d, which does not answer; taking its place", known.pid)
        return
    if Path(status.run.run_dir).resolve() == run_dir.resolve():
        raise UsageError(f"run.dir: {run_dir} already has a broker ({who}); stop it first, or choose another run.dir")


def keep_former_ledger(run_dir: Path) -> None:
    """Move the ledger of an earlier broker of this run aside, to ledger-1.json and so on: it is a record."""
    former = run_dir / "ledger.json"
    if former.exists() and former.stat().st_size > len("[]"):
        move_aside(former)


class stopping_on_signals:
    """While active, SIGTERM and SIGINT stop `server`; does nothing outside the main thread."""

    def __init__(self, server: BrokerServer) -> None:
        self._server = server
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._stop) for s in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._server.stop()
