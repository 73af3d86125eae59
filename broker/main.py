"""The broker process: `slipstream broker CONFIG` ends here."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from broker.client.connect import Access, connect
from broker.contract import NODE_AWAY, BrokerStatus, RunInfo
from broker.journal.leader_election import LeaderElection
from broker.journal.recovery import open_state
from broker.journal.redis_store import TERM_S, Leader
from broker.journal.run_folder import RunFolder, failed_transcripts
from broker.journal.store import StoreFenced, StoreUnavailable
from broker.server.server import BrokerServer
from broker.server.standby import Standby
from broker.sockets import candidates
from common.config.group_size import most_kept_bytes
from common.config.schema import Config
from common.errors import EXIT_DONE, BrokerError, BrokerUnreachable, UsageError
from common.process.health import LifeSigns, serving_health
from common.process.lifecycle import keep_freed_memory, raise_open_files, stop_signals
from common.process.run_dir import RunDir
from common.security.credentials import curve_credentials
from common.span_buffer import SPANS, SpanFile
from common.waste import Waste

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 5.0
OWN_ADDRESS_S = TERM_S / 2  # a leader must renew its term soon


class BrokerSigns(LifeSigns):
    """Signs of life and the figures that an autoscaler of the fleet needs (docs/kubernetes.md)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        self._looked_at = clock()
        self._waited_s = 0.0

    def tick(self, status: Callable[[], BrokerStatus]) -> None:
        """Called in every turn of the loop; looks at the status about once a second."""
        now = self._clock()
        passed_s = now - self._looked_at
        if passed_s < 1.0:
            return
        self._looked_at = now
        found = status()
        if found.learner is not None and found.learner.state == "waiting":
            self._waited_s += passed_s
        figures = {
            "groups_pending": found.groups_pending,
            "groups_leased": found.groups_leased,
            "groups_ready": found.groups_ready,
            "nodes_ready": sum(node.alive and node.report.state not in NODE_AWAY for node in found.nodes),
            "nodes_waiting_seconds_total": found.waste.get("waiting", Waste()).seconds,
            "learner_waiting_seconds_total": self._waited_s,
        }
        self.show("leading", True, figures)


def run_broker(config: Config, config_json: bytes) -> int:
    """Serve the run until one of `stop_signals`; returns the exit code. With broker.store: redis first stand by.

    The broker continues the store's state (docs/delivery.md). A broker that loses the lead stands by again.
    Raises UsageError when the address is refused or in use, this run has a living broker, or its store is damaged.
    Raises as `RunDir.identify`, and StoreFailed when the store refuses what has to be kept.
    """
    raise_open_files()
    keep_freed_memory(one_heap=True)
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = run_info(config, config_json, RunDir(run_dir).identify())
    signs = BrokerSigns()
    with serving_health(config.telemetry.health_port, signs, config.broker.credentials):
        if config.broker.store == "file":
            refuse_second_broker(run_dir, config.broker.credentials)
            lead(config, run, config.broker.addresses, signs)
            return EXIT_DONE
        LeaderElection(config, run.run_dir).await_server()
        while stand_by_and_lead(config, run, signs):
            pass
        return EXIT_DONE


def stand_by_and_lead(config: Config, run: RunInfo, signs: BrokerSigns) -> bool:
    """Lead once no other broker does; returns whether the lead was lost, otherwise this broker was stopped."""
    election = LeaderElection(config, run.run_dir)
    standby = Standby(
        config.broker, Path(config.run.dir), candidates(config.broker.addresses, election.pointer.address)
    )

    def take() -> Leader | None:
        signs.show("standing by", False)
        return election.take(standby.address)

    try:
        with stopping_on_signals(standby):
            leads = standby.run(take)
        if leads:
            lead(config, run, [standby.bound], signs, election)
        return False
    except (StoreFenced, StoreUnavailable) as error:
        logger.error("this broker no longer leads and stands by again: %s", error)
        return True
    finally:
        election.term.resign()
        standby.release()


def lead(
    config: Config, run: RunInfo, addresses: Sequence[str], signs: BrokerSigns, election: LeaderElection | None = None
) -> None:
    """Serve until a signal, and write the run folder.

    Raises as `run_broker`; also StoreFenced when another broker leads by now, and StoreUnavailable when Redis is away.
    """
    with ExitStack() as at_end:
        files = RunFolder(Path(config.run.dir), election)
        at_end.callback(files.close)
        with election.term.renewing() if election is not None else nullcontext():
            opened = open_state(config, run, files.write_event, election)
        at_end.callback(files.finish)
        at_end.callback(opened.close)
        opened.state.transcripts = transcripts = failed_transcripts(files.path, config.telemetry)
        if transcripts is not None:
            at_end.callback(transcripts.close)
        if run.trace:
            SPANS.open("leading", reference=True)
            trace = SpanFile(RunDir(files.path).trace, "nodes", config.telemetry.trace_mib, "broker")
            at_end.callback(trace.close)
            opened.state.trace = trace.put
        if opened.journal is not None:
            addresses = candidates(addresses, opened.journal.store.address)

        def tick() -> None:
            files.tick()
            if config.telemetry.health_port:
                signs.tick(opened.state.status)

        server = BrokerServer(
            opened.state,
            addresses,
            config.broker.max_message_bytes,
            on_tick=tick,
            credentials=curve_credentials(config.broker.credentials),
            quarantine=RunDir(files.path).quarantine,
            journal=opened.journal,
            # Another broker that looks for an address may have bound the one of this leader for a moment.
            bind_wait_s=OWN_ADDRESS_S if election is not None else 0.0,
        )
        try:
            files.begin(opened, server.address)
        except BaseException:
            server.close()
            raise
        with stopping_on_signals(server):
            logger.info("broker of run %s listens on %s", config.run.name, server.address)
            server.run()
    logger.info("broker of run %s has stopped", config.run.name)


def run_info(config: Config, config_json: bytes, run_id: str = "") -> RunInfo:
    return RunInfo(
        name=config.run.name,
        run_dir=str(Path(config.run.dir).resolve()),
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.staleness.max,
        max_attempts=config.tasks.max_attempts,
        lease_s=config.broker.lease_s,
        max_bytes=most_kept_bytes(config),
        config=config_json,
        max_lease_s=config.broker.max_lease_s,
        trace=config.telemetry.trace_mib > 0,
        memory_bytes=config.broker.memory_bytes if config.broker.durability != "memory" else 0,
        run_id=run_id,
    )


def refuse_second_broker(run_dir: Path, credentials: str | None = None) -> None:
    """Raise UsageError when RUN/broker.json names a broker that is alive, also one with other keys."""
    known = RunDir(run_dir).broker()
    if known is None or known.ended:
        return
    who = f"process {known.pid}, {known.address}"
    try:
        access = Access(address=known.address, role="broker", deadline_s=ALIVE_CHECK_S, credentials=credentials)
        with connect(access) as client:
            status = client.status()
    except (UsageError, BrokerError) as error:  # a broker is there and has refused
        why = f"already has a broker ({who}), which does not talk to this one: {error}"
        hint = f"Stop it first, or remove {run_dir / 'broker.json'} if that process is not a broker"
        raise UsageError(f"run.dir: {run_dir} {why}. {hint}") from error
    except BrokerUnreachable:
        logger.warning("broker.json names process %d, which does not answer; taking its place", known.pid)
        return
    if Path(status.run.run_dir).resolve() == run_dir.resolve():
        raise UsageError(f"run.dir: {run_dir} already has a broker ({who}); stop it first, or choose another run.dir")


@contextmanager
def stopping_on_signals(server: BrokerServer | Standby) -> Generator[None]:
    """While active, `stop_signals` stop `server`; does nothing outside the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        old = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
