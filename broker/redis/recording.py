"""The groups of a run that Redis still has, read back for a replay: those of committed steps that are kept
(broker.retain_steps) and those that steps have taken and not committed."""

from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from broker.contract import LEARNER_ENDED, LOST_AFTER_S
from broker.journal.recorded_groups import RecordedGroup, RecordedSteps
from broker.journal.store import StoredPayload
from broker.redis.client import RedisClient
from broker.redis.endpoint import endpoint
from broker.redis.keeper import Seen, only_keeper
from broker.redis.moves import Command
from broker.redis.reading import decode_meta, open_step, pairs
from broker.redis.store_link import StoreLink
from common.config.schema import Config
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.process.run_dir import RunDir
from common.redis_address import with_run
from common.rollouts import Task

ROLE = "learner"
ASK_S = 5.0
_STOP = "stop the job before it is replayed"

_task = msgspec.msgpack.Decoder(Task)


class Payloads:
    """Fetches payloads. Redis that was away once stays away: the replay ends then, and no request of its learner, which
    are repeated, may wait for Redis again."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self._failure: BrokerUnreachable | None = None

    def read(self, name: str) -> bytes:
        """The payload whose key has `name` after `p:`; raises BrokerError."""
        command: Command = ("GET", self._link.keys.payload(name.encode()))
        try:
            if self._failure is not None:
                raise self._failure
            found = self._link.ask([command])[0]
        except BrokerUnreachable as error:
            self._failure = error
            raise BrokerError(f"the payload {name} cannot be read: {error}") from error
        if found is None:
            raise BrokerError(f"the payload {name} is no longer in Redis: a later commit has dropped its step")
        return found


class RedisPayload(StoredPayload):
    """A group's payload in Redis."""

    __slots__ = ("_name", "_payloads")

    def __init__(self, payloads: Payloads, name: str) -> None:
        self._payloads, self._name = payloads, name

    def read(self) -> bytes:
        """See StoredPayload."""
        return self._payloads.read(self._name)


@contextmanager
def kept_in_redis(run_dir: RunDir, config: Config) -> Generator[RecordedSteps]:
    """What Redis has of the run in RUN, under RUN/keeper.lock, so that no broker of the run starts meanwhile.

    Raises:
        UsageError: the folder has no run in Redis, the run works, Redis does not answer, refuses, or has lost the run.
    """
    mine = _own_store(run_dir)
    server = endpoint(config.broker.address, ROLE, config.broker.credentials)
    link = StoreLink(server, ROLE, config.run.name, ASK_S)
    try:
        with only_keeper(run_dir.path, f"{run_dir.path} is running: it has a broker; {_STOP}"):
            try:
                found = recorded_steps(link)
                _check_own(found, mine, run_dir, server.name)
                _check_silent(config, run_dir)
            except (BrokerUnreachable, BrokerError) as error:
                raise UsageError(
                    f"broker.address: the recorded groups of {run_dir.path} cannot be read: {error}"
                ) from error
            yield found
    finally:
        link.close()


def recorded_steps(link: StoreLink) -> RecordedSteps:
    """Every step with its groups in the order in which it took them, ascending; needs no keeper.

    Raises:
        BrokerUnreachable: Redis does not answer, or does not know the run.
        StoreGone: it has lost moves of the run.
    """
    numbers, kept, flat = link.read(
        lambda moves: [
            ("HMGET", moves.keys.state, "next", "committed"),
            ("ZRANGE", moves.keys.of("recorded_steps"), 0, -1),
            ("HGETALL", moves.keys.of("steps")),
        ]
    )
    taken = {int(step): open_step.decode(packed) for step, packed in pairs(flat).items()}
    payloads = Payloads(link)
    groups = {step: _groups(link, payloads, step) for step in sorted([*map(int, kept), *taken])}
    places = {step: len(serials) - passed for step, (passed, serials) in taken.items()}
    next_serial, committed = (int(number) for number in numbers)
    return RecordedSteps(link.store, committed, groups, next_serial, places)


def _groups(link: StoreLink, payloads: Payloads, step: int) -> list[RecordedGroup]:
    groups = link.move("recorded", lambda _: (step,), link.store)
    return [
        RecordedGroup(
            _task.decode(body),
            node.decode(),
            decode_meta(meta),
            bool(filtered),
            RedisPayload(payloads, payload.decode()),
        )
        for _, node, meta, payload, body, filtered in groups
    ]


def _own_store(run_dir: RunDir) -> str:
    """The store that RUN/redis.json names."""
    file = run_dir.path / "redis.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Seen).store
    except FileNotFoundError:
        raise UsageError(
            f"{file}: expected the name of the run's store in Redis, found no such file: this run has none"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{file} cannot be read ({error}); it names the run's store in Redis") from None


def _check_own(found: RecordedSteps, mine: str, run_dir: RunDir, server: str) -> None:
    if found.store_id != mine:
        raise UsageError(
            f"broker.address: {server} has the store {found.store_id} under this run.name, and the groups of "
            f"{run_dir.path} were in {mine} (redis.json)"
        )


def _check_silent(config: Config, run_dir: RunDir) -> None:
    """A learner goes on without the keeper, and its commits would drop what is read here."""
    address = with_run(config.broker.address, config.run.name)
    with RedisClient(address, role="observer", credentials=config.broker.credentials, deadline_s=ASK_S) as client:
        status = client.status()
    learner = status.learner
    if learner is not None and learner.state not in (*LEARNER_ENDED, "lost"):
        raise UsageError(
            f"{run_dir.path} is running: its learner (process {learner.pid}) was {learner.state} "
            f"{status.learner_last_seen_s:.0f} s ago; {_STOP}, or wait until it was silent for {LOST_AFTER_S:.0f} s"
        )
