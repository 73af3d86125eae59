"""Reaching the broker of a run from the outside: where it is, and what it says within a deadline."""

from broker.connect import Access, connect
from broker.contract import BrokerStatus
from common.config.checks import split_address
from common.errors import BrokerUnreachable, UsageError
from common.redis_address import FORMS, is_redis, parse_redis


def ask_status(address: str, timeout_s: float, credentials: str | None = None) -> BrokerStatus:
    """The status from the broker at `address`; raises UsageError with the reason when none answers in time."""
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
