"""The groups of a run that Redis still has, read back for a replay: those of committed steps that are kept
(broker.retain_steps) and those that steps have taken and not committed."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from broker.redis.moves import Command
from broker.redis.reading import decode_meta
from broker.redis.store_link import StoreLink
from common.errors import BrokerError
from common.rollouts import GroupMeta, Task

_task = msgspec.msgpack.Decoder(Task)


@dataclass(frozen=True)
class RecordedGroup:
    """A group that a step took; `read` fetches the payload, an encoded common.rollouts.Group."""

    task: Task
    node_id: str
    meta: GroupMeta
    filtered: bool
    read: Callable[[], bytes]


def recorded_steps(link: StoreLink) -> dict[int, list[RecordedGroup]]:
    """Every step with its groups in the order in which it took them, ascending; needs no keeper.

    Raises:
        BrokerUnreachable: Redis does not answer, or does not know the run.
    """
    kept, open_steps = link.read(
        lambda moves: [("ZRANGE", moves.keys.of("recorded_steps"), 0, -1), ("HKEYS", moves.keys.of("steps"))]
    )
    return {step: _groups(link, step) for step in sorted(int(name) for name in [*kept, *open_steps])}


def _groups(link: StoreLink, step: int) -> list[RecordedGroup]:
    groups = link.move("recorded", lambda _: (step,), link.store)
    return [
        RecordedGroup(
            _task.decode(body), node.decode(), decode_meta(meta), bool(filtered), _reader(link, payload.decode())
        )
        for _, node, meta, payload, body, filtered in groups
    ]


def _reader(link: StoreLink, payload: str) -> Callable[[], bytes]:
    def read() -> bytes:
        command: Command = ("GET", link.keys.payload(payload.encode()))
        found = link.ask([command])[0]
        if found is None:
            raise BrokerError(f"the payload {payload} is no longer in Redis: a later commit has dropped its step")
        return found

    return read
