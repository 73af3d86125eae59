"""Reports the learner's state to the broker from a thread, so that a long step does not look like a dead learner."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from broker.client.calls import LearnerBroker
from broker.contract import LEARNER_ENDED, Delivery, LearnerReport
from common.errors import SlipstreamError
from common.process.logs import log_end, log_path
from common.span_buffer import SPANS
from common.waits import NO_WAIT, WaitFor, WaitKind
from common.weights.source.nodes import Undelivered
from learner.checkpoint.folder import TrainerState

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
SHOWN_DELIVERIES = 16


class StatusReporter:
    """Sends the newest LearnerReport about once a second and at every change of state."""

    def __init__(self, connect: Callable[[], LearnerBroker], logs: Path | None, run_id: str = "") -> None:
        """`logs`: the folder of the ranks' logs, whose ends the broker may ask for; None: the launchers send them.

        `run_id`: as RunDir's; a broker of another run refuses the reports.
        """
        self._connect = connect
        self._logs = logs
        self.stop_requested: str | None = None  # why the broker wants this learner to leave
        host = socket.gethostname()
        instance = secrets.token_hex(8)
        self._report = LearnerReport(os.getpid(), 0, "starting", 0, instance=instance, host=host, run_id=run_id)
        self._silence = ""
        self._silent_since = 0.0
        self._undelivered: Callable[[], Sequence[Undelivered]] = tuple
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learner-reporter", daemon=True)

    def take_over(self, incarnation: int, state: TrainerState) -> None:
        """Claim the role: from now on the broker refuses the requests of any other learner. `state`: known so far.

        Raises BrokerUnreachable. Raises BrokerError when another process of this or a later incarnation has come, or
        when the broker serves another run.
        """
        self.update(incarnation=incarnation)
        self.resume(state)
        with closing(self._connect()) as client:
            client.report(self.snapshot())

    def resume(self, state: TrainerState) -> None:
        """Report version and waste of the state from which the learner starts. Totals must not fall at a restart."""
        self.update(policy_version=state.policy_version, step=state.policy_version, waste=state.waste)

    def start(self, undelivered: Callable[[], Sequence[Undelivered]] = tuple) -> None:
        """Report from a thread, which calls `undelivered` for the broadcasts that nodes still lack."""
        self._undelivered = undelivered
        self._thread.start()

    def snapshot(self) -> LearnerReport:
        """The report as of now. If ranks are silent, it says so instead of what the loop does."""
        missing = self._undelivered()
        now = time.perf_counter()
        oldest = [Delivery(m.node_id, m.version, m.stage, now - m.since) for m in missing[:SHOWN_DELIVERIES]]
        with self._lock:
            report = self._report
            since = self._since
            if self._silence and report.state not in LEARNER_ENDED:
                report = msgspec.structs.replace(
                    report, state="stalled", wait=WaitFor(WaitKind.RANKS, cause=self._silence)
                )
                since = self._silent_since
            return msgspec.structs.replace(
                report, since_s=time.monotonic() - since, deliveries=oldest, deliveries_waiting=len(missing)
            )

    def set_silence(self, silence: str) -> None:
        """Report these silent ranks as what the learner waits for; '' when all of them answer."""
        with self._lock:
            if bool(silence) != bool(self._silence):
                self._silent_since = time.monotonic()
                self._changed.set()
            self._silence = silence

    def set(
        self, state: str, wait: WaitFor = NO_WAIT, policy_version: int | None = None, groups_missing: int = 0
    ) -> None:
        version = {} if policy_version is None else {"policy_version": policy_version, "step": policy_version}
        self.update(state=state, wait=wait, groups_missing=groups_missing, **version)

    def update(self, **fields: object) -> None:
        """Change fields of the report. `since_s` starts over with another state, which is sent at once."""
        with self._lock:
            before = self._report
            self._report = msgspec.structs.replace(self._report, **fields)
            if before.state != self._report.state:
                self._since = time.monotonic()
                SPANS.state(self._report.state)
            if (before.state, before.weights_address) != (self._report.state, self._report.weights_address):
                self._changed.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send the last state and end the thread; waits for a sending that is under way, at most `timeout_s`."""
        self._stopping.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        client: LearnerBroker | None = None
        warned = False
        rank = -1  # whose log the broker asked for
        while True:
            last = self._stopping.is_set()
            try:
                client = client or self._connect()
                log = log_end(log_path(self._logs, "learner", str(rank))) if self._logs and rank >= 0 else None
                sent_s = SPANS.now()
                reply = client.report(self.snapshot(), log, rank)
                SPANS.heard(sent_s, reply.time_s if reply is not None else 0.0)
                rank = reply.log_rank if reply is not None else -1
                if reply is not None and reply.stop:
                    self.stop_requested = "slipstream stop"
                warned = False
            except SlipstreamError as error:
                if not warned:
                    logger.warning("cannot report to the broker: %s", error)
                    warned = True
            if last:
                break
            self._changed.wait(INTERVAL_S)
            self._changed.clear()
        if client is not None:
            client.close()
