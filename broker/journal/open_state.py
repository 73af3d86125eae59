"""The delivery state of a broker that starts: empty, or recovered from its store."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker.contract import BrokerEvent, RunInfo
from broker.delivery.event_log import EventLog
from broker.delivery.lease_tokens import Tokens
from broker.delivery.state import DeliveryState
from broker.journal.file_store.folder import StoreFolder
from broker.journal.file_store.store import open_file_store
from broker.journal.journal import Journal
from broker.journal.recovery import Recovered, former_events, recover
from broker.journal.redis_store.leading import Leading
from broker.journal.store import Store
from common.config.schema import Config
from common.process.files import move_aside
from common.process.run_dir import RunDir

logger = logging.getLogger(__name__)

NOTHING = Recovered()


@dataclass
class Memory:
    """A delivery state, and where it is kept; `journal` is None when it is kept nowhere."""

    state: DeliveryState
    journal: Journal | None = None
    found: Recovered = NOTHING

    @property
    def recovered(self) -> bool:
        """Whether this broker continues the state of an earlier one."""
        return self.found.records > 0

    def close(self) -> None:
        """Let go of the store; a no-op when the server has done so."""
        if self.journal is not None:
            self.journal.close()


def open_memory(
    config: Config, run: RunInfo, write_event: Callable[[BrokerEvent], None], leading: Leading | None = None
) -> Memory:
    """The state that this broker begins with.

    Args:
        leading: this broker's lead, with broker.store: redis.

    Raises:
        UsageError: another broker has the store, or it is damaged.
    """
    run_dir = RunDir(config.run.dir)
    if leading is not None:
        set_aside_store(run_dir, "broker.store is redis")
        memory = recovered(config, run, leading.open(), write_event)
        if leading.lost:
            memory.state.event_log.add("store_lost", reason=leading.lost)
        return memory
    if config.broker.durability == "memory":
        set_aside_store(run_dir, "broker.durability is memory")
        _set_aside_redis(run_dir)
        return Memory(DeliveryState(run, time.monotonic, Tokens(), EventLog(write_event)))
    store = open_file_store(run_dir.store, config.run.name)
    try:
        _set_aside_redis(run_dir)
        return recovered(config, run, store, write_event)
    except BaseException:
        store.close()
        raise


def recovered(config: Config, run: RunInfo, store: Store, write_event: Callable[[BrokerEvent], None]) -> Memory:
    """The state in an open store. Raises UsageError when the store is damaged."""
    earlier = former_events(RunDir(config.run.dir).events)
    events = EventLog(write_event, earlier=earlier)

    def make_state(journal: Journal) -> DeliveryState:
        retain_steps = config.broker.retain_steps
        return DeliveryState(run, time.monotonic, Tokens(), events, journal, retain_steps, store.store_id)

    assert config.broker.durability != "memory"
    journal = Journal(store, config.broker.durability)
    state, found = recover(journal, make_state)
    return Memory(state, journal, found)


def set_aside_store(run_dir: RunDir, why: str) -> None:
    """A store that a broker without one passes by would be of yesterday when it is opened again: it gets a number."""
    if not run_dir.store.exists():
        return
    folder = StoreFolder(run_dir.store)
    folder.lock()
    folder.unlock()
    logger.warning("%s: the run's store was moved to %s", why, move_aside(run_dir.store))


def _set_aside_redis(run_dir: RunDir) -> None:
    """Likewise the name of a store in Redis; a broker with broker.store: redis then refuses that store."""
    if run_dir.redis_json.exists():
        logger.warning(
            "broker.store is file: what named the run's store in Redis was moved to %s",
            move_aside(run_dir.redis_json),
        )
