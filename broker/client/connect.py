"""Connections to the brokers of a run, at one address or several."""

from typing import Any

import msgspec

from broker.client.calls import LearnerBroker, NodeBroker
from broker.contract import BrokerStatus
from common.config.network_checks import is_redis
from common.errors import BrokerUnreachable, UsageError
from common.security.credentials import Role, curve_credentials, load_credential


class Access(msgspec.Struct, frozen=True, kw_only=True):
    address: str  # tcp://HOST:PORT or ipc://PATH; several with commas between them, when one of several brokers leads
    role: Role  # decides what a connection may do where connections are authenticated
    max_message_bytes: int = 1 << 30  # broker.max_message_bytes
    deadline_s: float = 30.0  # without an answer for this long (beyond what a request itself waits), a call gives up
    retry_s: float = 2.0  # pause before a request is repeated
    credentials: str | None = None  # broker.credentials: a key folder or a credential's file
    name: str = ""  # the node's name, which chooses its file in a key folder


def connect(access: Access) -> LearnerBroker:
    """A connection whose calls block, for all but nodes; raises UsageError for a wrong address or credentials."""
    from broker.client.connection import BrokerClient

    return BrokerClient(access.address, **_options(access))


def connect_node(access: Access) -> NodeBroker:
    """A node's connection; raises UsageError when the address or the credentials are of no use."""
    from broker.client.connection import AsyncBrokerClient

    return AsyncBrokerClient(access.address, **_options(access))


def connect_observer(address: str, timeout_s: float, credentials: str | None, role: Role = "observer") -> LearnerBroker:
    """A connection of a command; its calls raise BrokerUnreachable after `timeout_s`. Raises as `connect`."""
    return connect(Access(address=address, role=role, deadline_s=timeout_s, retry_s=0.5, credentials=credentials))


def ask_status(address: str, timeout_s: float, credentials: str | None = None) -> BrokerStatus:
    """The status from the broker at `address`; raises UsageError with the reason when none answers in time."""
    try:
        with connect_observer(address, timeout_s, credentials) as client:
            return client.status()
    except BrokerUnreachable as error:
        why = f"no broker answered at {address} within {timeout_s:g} s ({error}); is the job running?"
        raise UsageError(why) from None


def _options(access: Access) -> dict[str, Any]:
    for address in access.address.split(","):
        if is_redis(address):
            hint = "the broker finds Redis by broker.store: redis and broker.redis in the job's config"
            given = f"{address} is a Redis server's. Give the broker's address, tcp://HOST:PORT"
            raise UsageError(f"broker address: {given}; {hint}")
        if not address.startswith(("tcp://", "ipc://")):
            raise UsageError(f"broker address: expected tcp://HOST:PORT or ipc://PATH, found {address!r}")
    folder = curve_credentials(access.credentials)
    return {
        "deadline_s": access.deadline_s,
        "retry_s": access.retry_s,
        "max_message_bytes": access.max_message_bytes,
        "credential": load_credential(folder, access.role, access.name) if folder is not None else None,
    }
