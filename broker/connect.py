"""Connections to the brokers of a run, at one address or several."""

from types import TracebackType
from typing import Protocol, Self

import msgspec

from broker.contract import LearnerBroker, NodeBroker, ObserverBroker
from common.errors import UsageError
from common.redis_address import is_redis
from common.security.credentials import Credential, Role, curve_credentials, load_credential


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Where a broker is, who one is to it, and how long one waits for it.

    Attributes:
        address: tcp://HOST:PORT or ipc://PATH; several with commas between them, when one of several brokers leads.
        role: decides what a connection may do where connections are authenticated.
        max_message_bytes: broker.max_message_bytes.
        deadline_s: without an answer for this long (beyond what a request itself waits), a call gives up.
        retry_s: pause before a request is repeated.
        credentials: broker.credentials: a key folder or a credential's file; None where no keys are needed.
        name: the node's name, which chooses its file in a key folder.
    """

    address: str
    role: Role
    max_message_bytes: int = 1 << 30
    deadline_s: float = 30.0
    retry_s: float = 2.0
    credentials: str | None = None
    name: str = ""


class BrokerConnection(LearnerBroker, ObserverBroker, Protocol):
    """A synchronous connection; any thread may call. Leaving the context closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def close(self) -> None: ...


class NodeConnection(NodeBroker, Protocol):
    """An asynchronous connection of the event loop that makes the first call."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def close(self) -> None: ...


def connect(access: Access) -> BrokerConnection:
    """A learner's or an observer's connection; raises UsageError when the address or the credentials are of no use."""
    _check_scheme(access.address)
    from broker.messaging.sync_client import BrokerClient

    return BrokerClient(
        access.address,
        deadline_s=access.deadline_s,
        retry_s=access.retry_s,
        max_message_bytes=access.max_message_bytes,
        credential=_credential(access),
    )


def connect_node(access: Access) -> NodeConnection:
    """A node's connection; raises UsageError when the address or the credentials are of no use."""
    _check_scheme(access.address)
    from broker.messaging.async_client import AsyncBrokerClient

    return AsyncBrokerClient(
        access.address,
        deadline_s=access.deadline_s,
        retry_s=access.retry_s,
        max_message_bytes=access.max_message_bytes,
        credential=_credential(access),
    )


def _credential(access: Access) -> Credential | None:
    folder = curve_credentials(access.credentials)
    return load_credential(folder, access.role, access.name) if folder is not None else None


def _check_scheme(addresses: str) -> None:
    for address in addresses.split(","):
        if is_redis(address):
            raise UsageError(
                f"broker address: {address} is a Redis server's. Give the broker's address, tcp://HOST:PORT; the "
                "broker finds Redis by broker.store: redis and broker.redis in the job's config"
            )
        if not address.startswith(("tcp://", "ipc://")):
            raise UsageError(f"broker address: expected tcp://HOST:PORT or ipc://PATH, found {address!r}")
