"""Bind the broker's server at the first of its addresses that can be had."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from broker.journal.recovery import Memory
from broker.server.server import BrokerServer
from common.config.schema import BrokerConfig
from common.errors import UsageError
from common.security.credentials import curve_credentials

logger = logging.getLogger(__name__)


def bind(
    memory: Memory, config: BrokerConfig, addresses: Sequence[str], on_tick: Callable[[], None], quarantine: Path
) -> BrokerServer:
    """The server of this state, at the first of `addresses` that can be had.

    Raises:
        UsageError: all of them are refused or in use.
    """
    refused: UsageError | None = None
    keys = curve_credentials(config.credentials)
    for address in addresses:
        try:
            return BrokerServer(
                memory.state, address, config.max_message_bytes, on_tick, keys, quarantine, memory.journal
            )
        except UsageError as error:
            refused = error
            if address != addresses[-1]:
                logger.warning("%s; taking another port, which running nodes and learners do not know", error)
    assert refused is not None
    raise refused
