"""Reaching the broker of a run from the outside: where it is, and what it says within a deadline."""

from collections.abc import Callable
from typing import TypeVar

from broker.connect import Access, connect
from broker.contract import BrokerStatus, ObserverBroker
from common.config.network_checks import split_address
from common.errors import BrokerUnreachable, UsageError
from common.redis_address import is_redis

T = TypeVar("T")


def ask(address: str, timeout_s: float, credentials: str | None, question: Callable[[ObserverBroker], T]) -> T:
    """The answer of the broker at `address` to an observer's question; raises SlipstreamError within `timeout_s`."""
    access = Access(address=address, role="observer", deadline_s=timeout_s, retry_s=0.5, credentials=credentials)
    with connect(access) as client:
        return question(client)


def ask_status(address: str, timeout_s: float, credentials: str | None = None) -> BrokerStatus:
    """The status from the broker at `address`; raises UsageError with the reason when none answers in time."""
    try:
        return ask(address, timeout_s, credentials, lambda client: client.status())
    except BrokerUnreachable as error:
        raise UsageError(
            f"no broker answered at {address} within {timeout_s:g} s ({error}); is the job running?"
        ) from None


def check_join_address(address: str) -> None:
    """Raise UsageError when `address` cannot be a broker's."""
    try:
        ports = [split_address(entry)[1] for entry in address.split(",")]
    except ValueError as error:
        hint = "; the broker of a run with broker.store: redis, not its Redis server" if is_redis(address) else ""
        raise UsageError(f"--join: {error}, found {address!r}{hint}") from None
    if 0 in ports:
        raise UsageError(
            f"--join: {address} names no port; RUN/broker.json and `slipstream status RUN` have the address"
        )
