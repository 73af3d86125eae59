"""Places: order, cancelled askers, a limit that moves; the limit that follows the KV cache."""

import asyncio

import pytest
from fleet_fakes import run

from rollout_fleet.places import SETTLE_LOOKS, AdaptiveLimit, Places, Pressure


def calm(usage: float = 0.3) -> Pressure:
    return Pressure(usage, 0, 0)


async def hold(places: Places, name: str, order: list[str], until: asyncio.Event) -> None:
    async with places:
        order.append(name)
        await until.wait()


def test_places_are_given_in_the_order_of_asking() -> None:
    async def once() -> None:
        places, order, done = Places(2), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(places, name, order, done)) for name in "abcd"]
        await asyncio.sleep(0.01)
        assert (order, places.taken) == (["a", "b"], 2)
        done.set()
        await asyncio.gather(*tasks)
        assert (order, places.taken) == (["a", "b", "c", "d"], 0)

    run(once())


def test_a_higher_limit_lets_in_those_who_wait_and_a_lower_one_stops_nobody() -> None:
    async def once() -> None:
        places, order, done = Places(1), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(places, name, order, done)) for name in "abc"]
        await asyncio.sleep(0.01)
        places.resize(3)
        await asyncio.sleep(0.01)
        assert order == ["a", "b", "c"]
        places.resize(1)
        assert places.taken == 3
        late = asyncio.create_task(hold(places, "d", order, done))
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        assert (order, places.taken) == (["a", "b", "c"], 1)
        done.set()
        await asyncio.gather(tasks[2], late)
        assert order[-1] == "d"

    run(once())


def test_an_asker_that_gives_up_loses_no_place() -> None:
    async def once() -> None:
        places, order, done = Places(1), [], asyncio.Event()
        first = asyncio.create_task(hold(places, "a", order, done))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(hold(places, "b", order, done))
        third = asyncio.create_task(hold(places, "c", order, done))
        await asyncio.sleep(0.01)
        second.cancel()
        first.cancel()  # its place goes to `second`, or past it, in the same turn of the loop
        await asyncio.sleep(0.01)
        done.set()
        await third
        assert (order, places.taken) == (["a", "c"], 0)

    run(once())


def test_a_place_given_to_an_asker_that_is_cancelled_at_that_moment_goes_on_to_the_next() -> None:
    async def once() -> None:
        places, order, done = Places(0), [], asyncio.Event()
        second = asyncio.create_task(hold(places, "b", order, done))
        third = asyncio.create_task(hold(places, "c", order, done))
        await asyncio.sleep(0.01)
        places.resize(1)  # given to `b`, which has not run since
        second.cancel()
        await asyncio.sleep(0.01)
        assert (order, places.taken) == (["c"], 1)
        done.set()
        await third

    run(once())


def test_the_limit_doubles_until_the_cache_is_used_and_then_grows_by_steps() -> None:
    limit = AdaptiveLimit(8, 1000, 8)
    assert limit.limit == 32
    assert [limit.look(calm(), limit.limit) for _ in range(3)] == [64, 128, 256]
    assert [limit.look(calm(0.95), limit.limit), limit.look(calm(0.6), limit.limit)] == [264, 272]


def test_the_limit_does_not_grow_while_places_are_left() -> None:
    limit = AdaptiveLimit(8, 1000, 8)
    assert limit.look(calm(), 31) == 32


def test_the_limit_grows_by_steps_with_a_short_queue_in_front_of_the_engine_and_not_with_a_long_one() -> None:
    limit = AdaptiveLimit(8, 1000, 8)
    assert limit.look(Pressure(0.5, 3, 0), 32) == 40
    assert limit.look(calm(), 40) == 48
    assert [limit.look(Pressure(1.0, waiting, 0), 48) for waiting in (32, 100, 31)] == [48, 48, 56]


def test_requests_that_lose_their_cache_shrink_the_limit_once_until_it_has_worked() -> None:
    limit = AdaptiveLimit(8, 1000, 8)
    assert limit.look(Pressure(0.99, 0, 5), 32) == 24
    assert [limit.look(Pressure(0.99, 0, 5 + i), 24) for i in range(SETTLE_LOOKS)] == [24] * SETTLE_LOOKS
    assert limit.look(Pressure(0.99, 0, 20), 24) == 18
    for i in range(40):
        limit.look(Pressure(0.99, 0, 25 + 5 * i), 18)
    assert limit.limit == 8  # never below


def test_a_few_requests_that_lose_their_cache_are_the_price_of_a_full_one() -> None:
    limit = AdaptiveLimit(8, 1000, 16)
    assert limit.limit == 64
    assert [limit.look(Pressure(0.99, 64, seen), 64) for seen in (1, 4, 7)] == [64] * 3  # three of 64 are under 5 %
    assert limit.look(Pressure(0.99, 0, 11), 64) == 48


@pytest.mark.parametrize(("low", "high", "start"), [(8, 16, 16), (8, 1000, 32), (64, 16, 64)])
def test_the_limit_starts_and_stays_within_its_bounds(low: int, high: int, start: int) -> None:
    limit = AdaptiveLimit(low, high, 8)
    assert limit.limit == start
    for _ in range(20):
        limit.look(calm(), limit.limit)
    assert limit.limit == max(low, high)


def test_it_settles_where_the_cache_ends() -> None:
    """An engine that holds 100 requests and lets the others wait; one that throws them out."""
    waits, throws, thrown_out = AdaptiveLimit(8, 1000, 8), AdaptiveLimit(8, 1000, 8), 0
    seen: list[tuple[int, int]] = []
    for _ in range(300):
        over = max(0, waits.limit - 100)
        waits.look(Pressure(min(1.0, waits.limit / 100), over, 0), waits.limit)
        thrown_out += max(0, throws.limit - 100)
        throws.look(Pressure(min(1.0, throws.limit / 100), 0, thrown_out), throws.limit)
        seen.append((waits.limit, throws.limit))
    waiting, throwing = zip(*seen[50:], strict=True)
    assert min(waiting) >= 132 and max(waiting) <= 140
    assert min(throwing) >= 64 and max(throwing) <= 120
