"""The groups of a step: tasks are offered, groups are taken, and what cannot be trained on is given back."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from broker.client.calls import LearnerBroker
from broker.client.look_ahead import LookAhead
from broker.contract import BrokerStatus, LedgerEntry, StoredGroup
from common.config.schema import Config
from common.errors import HopelessError
from common.rollouts import Group
from common.waits import WaitFor, WaitKind, sentence
from learner.batch.batch import BadGroup, Prepared, length_deciles
from learner.batch.dynamic_sampling import carries_signal, most_replaced
from learner.loop.run_files import RunFiles
from learner.loop.step_metrics import GivenBack
from learner.loop.tasks import TaskStream

logger = logging.getLogger(__name__)

TAKE_WAIT_S = 1.0  # bound on one turn of the loop without a batch, so that no rank waits longer in a broadcast
DEAD_STEPS = 3  # steps' worth of tasks that may die without one step in between, before the run stops
BAD_GROUP_ATTEMPTS = 3  # times one task may come back unusable before the run stops


class Ready(NamedTuple):
    """A group, decoded and prepared for its step, or why it cannot be trained on."""

    group: Group | BadGroup
    prepared: Prepared = []


class Gathering:
    """Gathers the groups of one step after the other; the lead rank has one."""

    def __init__(
        self,
        config: Config,
        broker: LearnerBroker,
        tasks: TaskStream,
        files: RunFiles,
        ahead: LookAhead[Ready],
    ) -> None:
        self._config = config
        self._broker = broker
        self._tasks = tasks
        self._files = files
        self._ahead = ahead
        self.prepared: dict[int, Prepared] = {}  # the newest step's groups, by serial
        self.given_back = GivenBack()  # since the last metrics line
        self.forget()

    def forget(self) -> None:
        """Another store took the place of the broker's: it knows no step and no group."""
        self.missing = self._config.learner.groups_per_step  # groups that the step still waits for
        self.replaced = 0  # filtered groups of the step that others are taken for
        self._filtered_before: Counter[int | None] = Counter()  # groups that an earlier learner filtered, by step
        self._bad: Counter[int] = Counter()  # by serial
        self._dead_at_last_take = 0
        self._replays_below = 0
        self._ahead.made = {}

    def resume(self, version: int, unfinished: Iterable[LedgerEntry], status: BrokerStatus) -> None:
        """Continue at the step `version`, with the groups that an earlier learner took and did not commit."""
        if self._config.learner.dynamic_sampling:
            self._filtered_before = Counter(e.step for e in unfinished if e.filtered and e.state == "taken")
        self._dead_at_last_take = status.groups_dead
        self._replays_below = version + status.steps_taken
        if self._replays_below > version:
            logger.info("steps %d to %d replay the groups they had", version, self._replays_below - 1)

    def prepare(self, step: int, status: BrokerStatus) -> None:
        """Offer the tasks that the step and its window lack. Raises HopelessError when tasks do nothing but die."""
        self._check_deaths(status)
        if filtered := self._filtered_before.pop(step, 0):  # the last learner may have been killed before it offered
            self.replaced = min(filtered, most_replaced(self._config.learner.groups_per_step))
        self._offer(step, status)

    def take(self, step: int, status: BrokerStatus) -> tuple[list[StoredGroup], list[Group]] | None:
        """The step's groups as they came and decoded; None: not enough yet, or some must be generated again."""
        told = {"in_order": self._config.staleness.expired == "wait", "held": self._ahead.end()}
        taken = self._broker.take(step, self._config.learner.groups_per_step, TAKE_WAIT_S, **told)
        if taken is None:
            return None
        self._dead_at_last_take = status.groups_dead
        ready = {stored.serial: self._ahead.get(stored, step) for stored in taken}
        usable, refused = self._usable(found.group for found in ready.values())
        jobs = self._config.sources if self._config.learner.dynamic_sampling else {}
        flat = [group.serial for group in usable if jobs and not carries_signal(group, jobs[group.source])]
        if self._config.staleness.expired == "regenerate":
            refused += [n for n, found in ready.items() if any(played.expired for played, _ in found.prepared)]
            all_played = [played for found in ready.values() for played, _ in found.prepared]
            expired = [played.expired for played in all_played]
            self.given_back.by_length_decile += length_deciles([played.sampled for played in all_played], expired)
        if refused:
            self._broker.regenerate(step, refused)
            self.given_back.groups += len(refused)
            self._files.note("groups_regenerated", step=step, groups=len(refused), first_serial=min(refused))
            return None
        if not self._filter(step, flat, len(taken)):
            return None
        if self.is_replayed(step):
            self._files.note("replay", step=step, groups=len(taken))
        self._tasks.consume([group.serial for group in taken])
        self.prepared = {serial: found.prepared for serial, found in ready.items()}
        self._ahead.begin(step + 1, len(taken) if step + 1 < self._config.run.steps else 0)
        self.missing = self._config.learner.groups_per_step
        self.replaced = 0
        return taken, usable

    def wait(self, step: int, status: BrokerStatus) -> WaitFor:
        """The groups that the step waits for, and who generates them or does not yet."""
        live = [node for node in status.nodes if node.alive and not node.report.pool]
        wait = WaitFor(
            WaitKind.GROUPS,
            version=step,
            count=max(0, min(status.groups_ready, self.missing)),
            of=max(0, self.missing),
            replaced=self.replaced,
            leased=status.groups_leased,
            nodes=len(live),
        )
        none_leased = not status.groups_leased and live and live[0].report.state != "generating"
        if none_leased or (live and all(node.report.state == "environments" for node in live)):
            first = live[0].report
            cause = sentence(first.wait)
            wait = msgspec.structs.replace(wait, peer=first.node_id, peer_state=first.state, cause=cause)
        return wait

    def is_replayed(self, step: int) -> bool:
        """Whether the step gets the groups that an earlier learner took for it."""
        return step < self._replays_below

    def _filter(self, step: int, flat: list[int], taken: int) -> bool:
        """Tell the broker which groups the step trains nothing on; returns whether it has all that it may take."""
        size = self._config.learner.groups_per_step
        if flat:
            self._broker.filter(step, flat, most_replaced(size))
        self.replaced = min(len(flat), most_replaced(size))
        self.missing = size + self.replaced - taken
        if self.missing <= 0 and flat and len(flat) == taken:
            self._files.note("step_without_signal", step=step, groups=taken)
            logger.warning("step %d trains nothing: none of %d groups carries a signal", step, taken)
        return self.missing <= 0

    def _check_deaths(self, status: BrokerStatus) -> None:
        """Raise HopelessError when tasks do nothing but die, as when every episode of the environment fails."""
        died = status.groups_dead - self._dead_at_last_take
        if died < DEAD_STEPS * self._config.learner.groups_per_step:
            return
        last = [entry for page in self._broker.ledger_pages() for entry in page if entry.state == "dead"][-1]
        raise HopelessError(
            f"{died} tasks died since the last step, each after {self._config.tasks.max_attempts} failed attempts; "
            f"the last was task {last.serial}: {last.reason}"
        )

    def _offer(self, step: int, status: BrokerStatus) -> None:
        """Keep the window full: B(k + 1) tasks that may be leased and, while the broker counts with us, B more.

        Never more than the rest of the run consumes, so every group that is generated becomes a step's. Filtered
        groups that the current step replaces are offered anew, one for one.
        """
        size = self._config.learner.groups_per_step
        ahead = self._config.staleness.max + (1 if self._tasks.renumbered else 2)
        wanted = size * min(ahead, self._config.run.steps - step)
        missing = wanted - (self._tasks.outstanding - status.groups_dead - self.replaced)
        if missing > 0:
            self._tasks.offer(missing, self._broker)

    def _usable(self, taken: Iterable[Group | BadGroup]) -> tuple[list[Group], list[int]]:
        """(usable groups, serials of the others); raises HopelessError for a task that stays unusable."""
        usable: list[Group] = []
        refused: list[int] = []
        for found in taken:
            if isinstance(found, Group):
                usable.append(found)
                continue
            logger.error("%s; it is generated again", found)
            self._files.note("bad_group", serial=found.serial, node=found.node_id, reason=found.reason)
            self._bad[found.serial] += 1
            if self._bad[found.serial] >= BAD_GROUP_ATTEMPTS:
                raise HopelessError(f"unusable {BAD_GROUP_ATTEMPTS} times: {found}")
            refused.append(found.serial)
        return usable, refused
