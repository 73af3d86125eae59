"""The groups of a run's store as a recording, which goes into a broker again as steps that were taken."""

import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from broker.contract import RunInfo
from broker.delivery.event_log import EventLog
from broker.delivery.state import DeliveryState
from broker.delivery.task_table import TAKEN, Entry
from broker.journal.recorded_groups import RecordedGroup, RecordedSteps, existing_file_store, steps_of
from broker.journal.redis_store.leading import Leading
from broker.journal.store import StoreUnavailable
from common.config.schema import Config
from common.errors import BrokerError, UsageError
from common.process.run_dir import RunDir


@dataclass(frozen=True)
class Recording:
    """Steps that have all their groups, each in the order in which it took them."""

    store_id: str
    next_serial: int
    steps: dict[int, list[RecordedGroup]]


@contextmanager
def open_recording(run_dir: RunDir, config: Config) -> Generator[Recording]:
    """The groups that the run's store still has, RUN/store or its Redis; no broker of the run can start meanwhile.

    Args:
        config: the run's config. The payloads can be read while this is open.

    Raises:
        UsageError: there is no store, the run works, the store is damaged, Redis does not answer.
    """
    with _source(run_dir, config) as found:
        needed = config.learner.groups_per_step
        yield Recording(
            found.store_id,
            found.next_serial,
            {step: groups for step, groups in found.groups.items() if found.places.get(step, needed) >= needed},
        )


def _source(run_dir: RunDir, config: Config) -> AbstractContextManager[RecordedSteps]:
    if config.broker.store == "redis":
        return _kept_in_redis(run_dir, config)
    return _kept_in_files(run_dir)


@contextmanager
def _kept_in_redis(run_dir: RunDir, config: Config) -> Generator[RecordedSteps]:
    try:
        yield steps_of(Leading(config, str(run_dir.path.resolve())).without_leading())
    except (StoreUnavailable, BrokerError) as error:
        raise UsageError(f"broker.redis: the recorded groups of {run_dir.path} cannot be read: {error}") from error


@contextmanager
def _kept_in_files(run_dir: RunDir) -> Generator[RecordedSteps]:
    store = existing_file_store(run_dir)
    try:
        store.folder.lock()
    except UsageError:
        raise UsageError(
            f"{run_dir.path} is running: a broker has {run_dir.store}; stop the job before it is replayed"
        ) from None
    try:
        yield steps_of(store)
    finally:
        store.close()


def preloaded(run: RunInfo, recording: Recording, steps: Sequence[int]) -> DeliveryState:
    """A state in which `steps` have taken what they took then, and everything before them is committed."""
    state = DeliveryState(
        run,
        time.monotonic,
        lambda: secrets.token_hex(8),
        EventLog(),
        store_id=recording.store_id,
    )
    table = state.tasks
    table.next_serial = recording.next_serial
    state.committed_step = steps[0] - 1
    for step in steps:
        groups = recording.steps[step]
        table.steps[step] = [group.task.serial for group in groups]
        table.freed_by_step[step] = len(groups) - run.groups_per_step  # filtered groups that others were taken for
        for group in groups:
            table.living[group.task.serial] = Entry(
                group.task,
                state=TAKEN,
                attempts=1,
                nodes=[group.node_id],
                meta=group.meta,
                payload=group.stored,
                step=step,
                filtered=group.filtered,
            )
    return state
