"""The tasks of a job: which they are, which are offered to the broker, and which no step has consumed yet.

The dataset numbers its tasks 0, 1, 2, ... (positions). Position n is row `order(epoch)[n % rows]` of epoch n // rows,
and the order follows from (run.seed, epoch) alone. The broker numbers the tasks that it is offered likewise (serials).
They are the same as long as the broker remembers the run. A broker that starts with an empty store counts from 0
again, and its store has another id than the checkpoint names. The learner then offers first the positions that were
offered and never consumed, so each position is still consumed once. A learner may meet such a broker while it lives.
Then it makes a checkpoint before it offers anything, because the order of these offers follows from the checkpoint.
"""

import copy
import functools
import hashlib
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from broker.client.calls import LearnerBroker
from broker.contract import Attached, LedgerEntry, WeightChange, WeightRequest
from common.config.schema import Config
from common.config.tasks import EpisodesConfig, kept_rows
from common.errors import SlipstreamError, UsageError
from common.json_lines import dataset_rows
from common.rollouts import Task
from learner.checkpoint.folder import StreamState
from learner.loop.mixture import Mixture, factor


class RowOrder:
    """The rows of a dataset, epoch after epoch; depends on nothing but the arguments."""

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._order = functools.lru_cache(maxsize=2)(self.of_epoch)

    def of_epoch(self, epoch: int) -> np.ndarray:
        """[rows] int64."""
        if not self._shuffle:
            return np.arange(self._rows)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))).permutation(self._rows)

    def row(self, position: int) -> tuple[int, int]:
        """(epoch, row) of a position."""
        epoch, place = divmod(position, self._rows)
        return epoch, int(self._order(epoch)[place])


class TaskSource:
    """Tasks by position; `digest` lets a resumed job notice another dataset."""

    def __init__(
        self,
        dataset: Path,
        seed: int,
        group_size: int,
        shuffle: bool = True,
        *,
        within: EpisodesConfig | None = None,
        key: str = "tasks.dataset",
    ) -> None:
        """Read and check the dataset, which `key` names; raises UsageError on a missing, empty or malformed file.

        `within`: the bounds of the success rate of its rows; None: there are none.
        """
        found = [row for _, row in dataset_rows(dataset, key)] if within is None else kept_rows(within, key)
        self._rows = found
        self._seed = seed
        self._group_size = group_size
        self._order = RowOrder(len(self._rows), seed, shuffle)
        self.digest = hashlib.sha256(b"\n".join(self._rows)).hexdigest()[:16]

    def task(self, position: int, changes: Sequence[WeightChange] = ()) -> Task:
        """The task at a position; `changes` of weights matter to a Mixture only."""
        epoch, row = self._order.row(position)
        seed = int(np.random.SeedSequence([self._seed, position, 1]).generate_state(1)[0]) >> 1
        return Task(position, self._rows[row], seed, self._group_size, epoch)


def task_source(config: Config) -> TaskSource | Mixture:
    """The tasks of a job. Reads and checks its datasets; raises UsageError as TaskSource."""
    tasks = config.tasks
    size = config.rollout.group_size
    seed = config.run.seed
    if not tasks.sources:
        return TaskSource(Path(tasks.dataset), seed, size, tasks.shuffle, within=tasks)
    sources = dict[str, TaskSource]()
    for name, source in tasks.sources.items():
        own = int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1)[0])
        path = Path(source.dataset)
        key = f"tasks.sources.{name}.dataset"
        sources[name] = TaskSource(path, own, size, source.shuffle, within=source, key=key)
    weights = {name: source.weight for name, source in tasks.sources.items()}
    return Mixture(sources, weights, seed, tasks.curriculum)


def check_not_behind(version: int, committed_step: int, checkpoints: Path) -> None:
    """Refuse a checkpoint of `version` that lacks steps which the broker has committed; -1 for none.

    Raises UsageError, which names the folder `checkpoints`.
    """
    if committed_step >= version:
        first = f"its checkpoint is of step {version}" if version else "it has no checkpoint"
        raise UsageError(
            f"the learner would train step {version} next ({first}). The broker has committed steps up to "
            f"{committed_step}: the groups of steps {version} to {committed_step} are gone. Put a checkpoint of step "
            f"{committed_step + 1} back into {checkpoints} (learner.checkpoint.dir), or start anew in another run.dir, "
            "and in another learner.checkpoint.dir if that is set"
        )


class TaskStream:
    """Offers tasks in order and keeps count."""

    def __init__(self, source: TaskSource | Mixture, state: StreamState | None = None) -> None:
        self._source = source
        self._state = _copy(state or StreamState())
        self._told = 0  # changes of the weights that the broker has
        if isinstance(source, Mixture) and not self._state.weight_changes:
            self._state.weight_changes = [WeightChange(0, source.weights, time_s=time.time())]

    @property
    def outstanding(self) -> int:
        """Tasks offered that no step has consumed, dead ones included."""
        return len(self._state.outstanding)

    @property
    def renumbered(self) -> bool:
        """Whether a broker lost its memory, so that serials are lower than positions."""
        return self._state.renumbered

    def attach(self, attached: Attached) -> bool:
        """Agree with the broker on the next serial. Returns False when it lost its memory, or the newest part of it.

        Tasks that were offered after the checkpoint came in the order in which they come now, so the stream
        advances to the broker's serial. A store with fewer serials than the checkpoint lost its newest records, as in
        a power cut with broker.durability: everysec. Only the lost tasks are offered again. Raises UsageError for a
        store that another one had replaced.
        """
        state = self._state
        known = not state.store_id or attached.store_id == state.store_id
        if attached.store_id in state.former_stores:
            raise UsageError(
                f"the broker has the store {attached.store_id} again, whose place {state.store_id} had taken. Its "
                "tasks were offered anew since, so they would be trained on twice. Put the newer store back, or move "
                "this one away and start again with an empty one"
            )
        self._told = len(attached.weight_changes)
        if self._told > len(state.weight_changes):  # tasks behind the checkpoint were made with them
            state.weight_changes = list(attached.weight_changes)
        if not known:
            state.former_stores.append(state.store_id)
        behind = attached.next_serial < state.next_serial
        if known and behind and state.store_id:
            self._forget(attached.next_serial)
        elif not known or behind:
            self._forget(0)
        state.store_id = attached.store_id
        while state.next_serial < attached.next_serial:
            self._advance()
        return known and not behind

    def follow(self, attached: Attached) -> None:
        """Go on with an empty store that took the other's place. Checkpoint before anything is offered.

        Raises SlipstreamError when the learner must resume from its checkpoint instead.
        """
        if attached.next_serial or attached.store_id == self._state.store_id:
            raise SlipstreamError(
                f"the broker's store {attached.store_id} lacks moves that a broker had acknowledged. This follows a "
                "power cut with broker.durability: everysec, or an older copy was put back. It may give out groups "
                "again that were trained on since the last checkpoint; the learner has to resume from there"
            )
        self.attach(attached)

    def _forget(self, first: int) -> None:
        """The broker no longer knows the serials from `first` on."""
        state = self._state
        lost = [serial for serial in state.outstanding if serial >= first]
        state.backlog = sorted([*(state.outstanding.pop(serial) for serial in lost), *state.backlog])
        state.next_serial = first
        state.renumbered = True

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks to offer, under the broker's serials."""
        changes = self._state.weight_changes
        offered = [self._advance() for _ in range(count)]
        return [
            msgspec.structs.replace(self._source.task(position, changes), serial=serial) for serial, position in offered
        ]

    def offer(self, count: int, broker: LearnerBroker) -> None:
        """Offer the next `count` tasks, after the requests for other weights that the broker has."""
        if self._state.weight_changes:
            self.change(broker.status().weight_requests)
        first = self._told
        self._told = len(self._state.weight_changes)
        broker.offer(self.next(count), self._state.weight_changes[first:], first)

    @property
    def shares(self) -> dict[str, float]:
        """Those of the sources for the next task; {} in a job of one source."""
        changes = self._state.weight_changes
        return changes[-1].shares if changes else {}

    def change(self, requests: Sequence[WeightRequest]) -> None:
        """Carry out requests with the next position. Unknown names, and a sum of 0, change nothing."""
        done = {name for change in self._state.weight_changes for name in change.requests} if requests else ()
        for request in requests:
            before = self._state.weight_changes[-1].weights
            known = {name: weight for name, weight in request.weights.items() if name in before}
            if request.id not in done:
                weights = before | known
                self._append(weights=weights if any(weights.values()) else before, requests=[request.id])

    def observe(self, step: int, successes: Mapping[str, tuple[int, int]]) -> None:
        """A step has trained on samples with so many (successes, samples) of each source; tasks.curriculum follows."""
        source = self._source
        if not isinstance(source, Mixture) or source.rule.rule == "none":
            return
        state = self._state
        for name, (won, played) in successes.items():
            before = state.successes.get(name, (0, 0))
            state.successes[name] = (before[0] + won, before[1] + played)
        if (step + 1) % source.rule.every:
            return
        last = state.weight_changes[-1]
        if step > last.step:  # else it is done again, after a crash
            new = {name: factor(won / played, source.rule) for name, (won, played) in state.successes.items() if played}
            self._append(factors=last.factors | new, step=step, requests=[])
        state.successes = {}

    def _append(self, **changed: Any) -> None:
        last = self._state.weight_changes[-1]
        change = msgspec.structs.replace(last, position=self._state.cursor, time_s=time.time(), **changed)
        self._state.weight_changes.append(change)

    def consume(self, serials: list[int]) -> None:
        """A step trains on these. Raises SlipstreamError when an earlier one did."""
        if again := [serial for serial in serials if serial not in self._state.outstanding]:
            raise SlipstreamError(
                f"the broker gave out {len(again)} groups that an earlier step was trained on, first task {again[0]}; "
                "the learner has to resume from its checkpoint"
            )
        for serial in serials:
            del self._state.outstanding[serial]

    def check_known(self, version: int, unfinished: Sequence[LedgerEntry]) -> None:
        """Refuse a broker that would hand out groups which the checkpoint of `version` was trained on, or filtered."""
        offered = range(self._state.next_serial)
        outstanding = self._state.outstanding
        again = [entry for entry in unfinished if entry.serial in offered and entry.serial not in outstanding]
        if again:
            raise UsageError(
                f"the checkpoint of step {version} was trained on {len(again)} groups that the broker does not know as "
                f"taken (the first is task {again[0].serial}, {again[0].state}). Its store lost the newest moves, as "
                "in a power cut with broker.durability: everysec, or was put back from a copy. They would be trained "
                "on twice. Move RUN/store away (with broker.store: redis the run's keys and RUN/redis.json, "
                "docs/redis.md) and start again: what the checkpoint has not consumed is then generated anew"
            )

    def state(self) -> StreamState:
        return _copy(self._state)

    def _advance(self) -> tuple[int, int]:
        """(serial, position) of the next task, counted as offered."""
        state = self._state
        if state.backlog:
            position = state.backlog.pop(0)
        else:
            position = state.cursor
            state.cursor += 1
        serial = state.next_serial
        state.next_serial += 1
        state.outstanding[serial] = position
        return serial, position


def _copy(state: StreamState) -> StreamState:
    """Shares no list and no mapping that a stream changes; their entries never change."""
    return StreamState(**{name: copy.copy(getattr(state, name)) for name in StreamState.__struct_fields__})
