"""A scorer's reports to the broker of its run, from a thread: the scorer serves whether a broker answers or not.

find the broker --> report, about once a second --> the order to stop, or the question for the log's end
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from broker.client.calls import LearnerBroker
from broker.client.connect import Access, connect
from broker.contract import ServiceReport
from common.errors import BrokerUnreachable, SlipstreamError
from common.process.logs import log_end
from common.security.credentials import own_node_id

logger = logging.getLogger(__name__)

REPORT_S = 1.0
ANSWER_S = 3.0  # the deadline of a report
RETRY_S = 1.0  # the pause before it is repeated
REFUSED_S = 30.0  # the pause after a refusal


class Reports:
    """The reports of the scorer `name`.

    `find` returns the broker's address, '' while none is known. `credentials` is broker.credentials. `run` is run.name,
    or '' where the broker of any run is meant.
    """

    def __init__(
        self, name: str, url: str, log: Path, find: Callable[[], str], *, credentials: str | None = None, run: str = ""
    ) -> None:
        host = socket.gethostname()
        self._report = ServiceReport(f"scorer-{name}", host, os.getpid(), "scorer", "starting", url, run=run)
        self._name = self._report.name
        self._since = time.monotonic()
        self._log = log
        self._find = find
        self._credentials = credentials
        self._client: LearnerBroker | None = None
        self._address = ""
        self._said = ""
        self._sends_log = False
        self._news = threading.Event()

    def say(self, **changes: object) -> None:
        """Report a change at once."""
        self._since = time.monotonic()
        self._report = replace(self._report, **changes)
        self._news.set()

    @contextmanager
    def running(self, on_stop: Callable[[], None]) -> Generator[None]:
        """Report while the block runs, then leave. The thread calls `on_stop` with every order to stop."""
        thread = threading.Thread(target=self._run, args=(on_stop,), name="reports", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.say(leaving=True)
            thread.join(3 * ANSWER_S)

    def _run(self, on_stop: Callable[[], None]) -> None:
        while not self._report.leaving:
            self._news.wait(self._turn(on_stop))
            self._news.clear()
        if self._said == "joined":
            self._turn(on_stop)
        self._disconnect()

    def _turn(self, on_stop: Callable[[], None]) -> float:
        """Report once; returns the pause until the next time."""
        if (address := self._find()) != self._address:
            self._disconnect()
            self._address = address
        if not address:
            self._note("alone", "no broker of this run is known; the scorer serves without one")
            return REPORT_S
        try:
            client = self._connected()
            report = replace(self._report, name=self._name, since_s=time.monotonic() - self._since)
            told = client.report_service(report, log_end(self._log) if self._sends_log else None)
        except BrokerUnreachable as error:
            self._note("away", f"{error}; the scorer serves on")
            return REPORT_S
        except SlipstreamError as error:
            self._disconnect()
            self._note("refused", f"the broker at {address} does not take this scorer, which serves on: {error}")
            return REFUSED_S
        self._note("joined", f"reports to the broker at {address}")
        if told.stop:
            on_stop()
        self._sends_log = told.log
        return 0.0 if told.log else REPORT_S

    def _connected(self) -> LearnerBroker:
        """The connection. Its key is a node's, which may speak for the name."""
        if self._client is None:
            self._name = own_node_id(self._credentials, self._report.name)
            access = Access(
                address=self._address,
                role="node",
                deadline_s=ANSWER_S,
                retry_s=RETRY_S,
                credentials=self._credentials,
                name=self._name,
            )
            self._client = connect(access)
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _note(self, what: str, text: str) -> None:
        """Log a change, once."""
        if what != self._said:
            self._said = what
            logger.log(logging.INFO if what in ("alone", "joined") else logging.WARNING, "%s", text)
