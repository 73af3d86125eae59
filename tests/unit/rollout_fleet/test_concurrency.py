"""Slots: order, cancelled askers, a limit that moves; the limit that follows what the KV cache carries."""

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from rollout_fleet.episode.concurrency import LOOKS, AdaptiveLimit, Slots
from rollout_fleet.episode.sampler_protocol import EngineCounters
from tests.unit.rollout_fleet.engine_model import ModelEngine


class Looker:
    """Looks at an engine once a second: `ended` requests since the last look, `lost` of the second to preemptions."""

    def __init__(self, limit: AdaptiveLimit) -> None:
        self.limit = limit
        self._seen, self._at_s = EngineCounters(), 0.0

    def look(
        self, *, usage: float = 0.3, waiting: int = 0, ended: int = 0, lost: float = 0.0, taken: int | None = None
    ) -> int:
        seen, taken = self._seen, self.limit.limit if taken is None else taken
        seen.kv_cache_usage, seen.running, seen.waiting = usage, taken - waiting, waiting
        seen.requests += ended
        seen.recompute_s += lost
        self._at_s += 1
        return self.limit.look(seen, self._at_s, taken)


class Holders:
    """Tasks that take a slot each and keep it until `done`; `order` is that in which they got one."""

    def __init__(self, limit: int) -> None:
        self.slots, self.order, self.done = Slots(limit), list[str](), asyncio.Event()

    async def hold(self, name: str) -> None:
        async with self.slots:
            self.order.append(name)
            await self.done.wait()

    async def begin(self, names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self.hold(name)) for name in names]
        await asyncio.sleep(0.01)
        return tasks


async def test_slots_are_given_in_the_order_of_asking() -> None:
    holders = Holders(2)
    tasks = await holders.begin("abcd")
    assert (holders.order, holders.slots.taken) == (["a", "b"], 2)
    holders.done.set()
    await asyncio.gather(*tasks)
    assert (holders.order, holders.slots.taken) == (["a", "b", "c", "d"], 0)


async def test_a_higher_limit_lets_in_those_who_wait_and_a_lower_one_stops_nobody() -> None:
    holders = Holders(1)
    first, second, third = await holders.begin("abc")
    holders.slots.resize(3)
    await asyncio.sleep(0.01)
    assert holders.order == ["a", "b", "c"]
    holders.slots.resize(1)
    assert holders.slots.taken == 3
    first.cancel()
    second.cancel()
    (late,) = await holders.begin("d")
    assert (holders.order, holders.slots.taken) == (["a", "b", "c"], 1)
    holders.done.set()
    await asyncio.gather(third, late)
    assert holders.order[-1] == "d"


async def test_an_asker_that_gives_up_loses_no_place_also_when_it_was_given_a_slot_at_that_moment() -> None:
    holders = Holders(1)
    first, second, third = await holders.begin("abc")
    second.cancel()
    first.cancel()  # its slot goes to `second`, or past it, in the same turn of the loop
    await asyncio.sleep(0.01)
    holders.done.set()
    await third
    assert (holders.order, holders.slots.taken) == (["a", "c"], 0)
    holders = Holders(0)
    second, third = await holders.begin("bc")
    holders.slots.resize(1)  # given to `b`, which has not run since
    second.cancel()
    await asyncio.sleep(0.01)
    assert (holders.order, holders.slots.taken) == (["c"], 1)
    holders.done.set()
    await third


def test_the_limit_doubles_until_the_cache_is_used_and_then_grows_by_an_eighth() -> None:
    limit = AdaptiveLimit(8, 1000, 8)
    looker = Looker(limit)
    assert limit.limit == 32
    assert [looker.look(ended=1000) for _ in range(4)] == [32, 64, 128, 256]  # the first look has nothing to compare
    assert [looker.look(usage=0.95, ended=256), looker.look(usage=0.6, ended=288)] == [288, 324]


def test_the_limit_grows_by_as_many_slots_as_requests_end() -> None:
    looker = Looker(AdaptiveLimit(8, 1000, 8))
    assert [looker.look(ended=n) for n in (9, 0, 5, 3)] == [32, 32, 37, 40]
    assert looker.look(waiting=1, ended=6) == 40  # an eighth from the first sign of pressure on
    assert [looker.look(ended=2), looker.look(ended=16)] == [41, 43]


def test_the_limit_does_not_grow_while_slots_are_left_or_with_a_long_queue_in_front_of_the_engine() -> None:
    looker = Looker(AdaptiveLimit(8, 1000, 8))
    assert [looker.look(taken=31, ended=50) for _ in range(3)] == [32, 32, 32]
    looker = Looker(AdaptiveLimit(8, 1000, 8))
    assert [looker.look(usage=1.0, waiting=n, ended=80) for n in (32, 100, 31)] == [32, 32, 42]


def test_a_queue_that_stays_too_long_is_cut() -> None:
    looker = Looker(AdaptiveLimit(8, 1000, 8, holds=200))
    assert [looker.look(waiting=n) for n in (72, 90, 60, 80)] == [200] * 3 + [172]  # 32 are enough, 60 were the least
    assert [looker.look(waiting=60) for _ in range(3)] == [172] * 3
    assert [looker.look(waiting=n) for n in (20, 60, 60, 60, 60)] == [172] * 4 + [144]


def test_preemptions_that_cost_little_time_do_not_shrink_the_limit_and_those_that_cost_more_only_stop_it() -> None:
    looker = Looker(AdaptiveLimit(8, 1000, 8))
    assert [looker.look(usage=0.99, waiting=5, lost=0.02) for _ in range(4)] == [32] * 4
    assert looker.look(usage=0.99, waiting=5, ended=80, lost=0.02) == 42
    assert [looker.look(usage=0.99, waiting=5, ended=80, lost=0.04) for _ in range(6)] == [42] * 6


def test_lost_time_shrinks_the_limit_to_what_the_engine_holds() -> None:
    looker = Looker(AdaptiveLimit(8, 1000, 8, holds=100))
    assert [looker.look(waiting=30, lost=0.2) for _ in range(LOOKS + 1)] == [100] * LOOKS + [70]
    assert [looker.look(taken=90, lost=0.2) for _ in range(5)] == [70] * 5  # those who have a slot keep it
    assert looker.look(lost=0.2) == 63  # at least a tenth, where no request waits
    assert [looker.look(waiting=60, lost=0.2) for _ in range(LOOKS + 1)] == [63] * LOOKS + [31]  # at most half


@pytest.mark.parametrize(
    ("low", "high", "holds", "start"),
    [(8, 16, 0, 16), (8, 1000, 0, 32), (8, 1000, 90, 90), (64, 16, 0, 64), (8, 64, 90, 64)],
)
def test_the_limit_starts_and_stays_within_its_bounds(low: int, high: int, holds: int, start: int) -> None:
    looker = Looker(AdaptiveLimit(low, high, 8, holds))
    assert looker.limit.limit == start
    for _ in range(20):
        looker.look(ended=1000)
    assert looker.limit.limit == max(low, high)
    for _ in range(300):
        looker.look(lost=0.2)
    assert looker.limit.limit == low


def tailed(draw: random.Random) -> tuple[int, int]:
    return 11, min(1900, 1 + int(draw.expovariate(1 / 700 if draw.random() < 0.04 else 1 / 24)))


def long(draw: random.Random) -> tuple[int, int]:
    return 11, draw.randint(600, 1900)


def short(draw: random.Random) -> tuple[int, int]:
    return 11, 1 + int(draw.expovariate(1 / 100))


def prompted(draw: random.Random) -> tuple[int, int]:
    return draw.randint(400, 1000), draw.randint(200, 1000)


def requests(kind: Callable[[random.Random], tuple[int, int]]) -> Iterator[tuple[int, int]]:
    draw = random.Random(1)
    while True:
        yield kind(draw)


@pytest.mark.parametrize(
    ("kind", "blocks", "few", "many"),
    [
        pytest.param(tailed, 64, 0.6, 1.01, id="heavy tail, small cache: few starve it, and many do no harm"),
        pytest.param(tailed, 512, 0.4, 1.01, id="heavy tail, ample cache: few starve it"),
        pytest.param(long, 512, 0.4, 0.8, id="long answers: few starve it, many thrash"),
        pytest.param(long, 64, 1.01, 1.0, id="long answers, small cache"),
        pytest.param(prompted, 512, 0.5, 0.8, id="long prompts: few starve it, many thrash"),
        pytest.param(short, 32, 0.6, 1.01, id="short answers: preemptions are harmless"),
    ],
)
@pytest.mark.slow
def test_it_settles_at_the_best_fixed_number(
    kind: Callable[[random.Random], tuple[int, int]], blocks: int, few: float, many: float
) -> None:
    """`few`, `many`: 8 and 128 slots reach at most this share of the best."""
    found = {n: ModelEngine(blocks, requests(kind)).fixed(n, 45) for n in (8, 16, 32, 48, 64, 96, 128)}
    best = max(found.values())
    assert found[8] <= few * best and found[128] <= many * best
    assert ModelEngine(blocks, requests(kind)).adaptive(AdaptiveLimit(8, 256, 8), 45) >= 0.95 * best
