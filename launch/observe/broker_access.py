"""Reaching the broker of a run from the outside: where it is, and what it says within a deadline."""

import time
from collections.abc import Callable

from broker.connect import Access, connect
from broker.contract import BrokerStatus
from common.config.checks import fixed_address, split_address
from common.config.schema import Config
from common.errors import BrokerUnreachable, UsageError
from common.process.lifecycle import alive
from common.process.run_dir import RunDir
from common.redis_address import FORMS, is_redis, parse_redis

POLL_S = 0.1


def ask_status(address: str, timeout_s: float, credentials: str | None = None) -> BrokerStatus:
    """What the broker at `address` says; raises UsageError with the reason when none answers in time."""
    access = Access(address=address, role="observer", deadline_s=timeout_s, retry_s=0.5, credentials=credentials)
    try:
        with connect(access) as client:
            return client.status()
    except BrokerUnreachable as error:
        raise UsageError(
            f"no broker answered at {address} within {timeout_s:g} s ({error}); is the job running?"
        ) from None


def check_join_address(address: str) -> None:
    """Raise UsageError when `address` cannot be a broker's."""
    try:
        if is_redis(address):
            parse_redis(address)
            return
        _, port = split_address(address)
    except ValueError as error:
        others = "" if is_redis(address) else f", or {FORMS} of a Redis broker"
        raise UsageError(f"--join: {error}{others}, found {address!r}") from None
    if port == 0:
        raise UsageError(
            f"--join: {address} names no port; RUN/broker.json and `slipstream status RUN` have the address"
        )


def discover_broker(config: Config, run: RunDir, timeout_s: float) -> str:
    """The configured address, or the one that a running broker wrote to RUN/broker.json.

    Waits at most `timeout_s` for the file, so that roles may be started in any order; raises UsageError then.
    """
    fixed = fixed_address(config)
    if fixed is not None:
        return fixed
    found = wait_for(lambda: running_broker(run), timeout_s)
    if found is None:
        raise UsageError(
            f"no broker has written {run.broker_json} within {timeout_s:g} s; start `slipstream broker` with this "
            "config, or name the broker of a running job with --join tcp://HOST:PORT"
        )
    return found


def running_broker(run: RunDir) -> str | None:
    """Address in RUN/broker.json when the process that wrote it still runs here."""
    file = run.broker()
    return file.address if file is not None and alive(file.pid) else None


def wait_for(found: Callable[[], str | None], timeout_s: float) -> str | None:
    """Poll until `found` gives something; None when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = found()
        if value is not None or time.monotonic() >= deadline:
            return value
        time.sleep(POLL_S)
