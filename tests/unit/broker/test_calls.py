"""Reminders of calls without an answer: all of them, in time, from one timer."""

import asyncio

import pytest

from broker.messaging.pending_requests import Call, Calls


def call(number: int) -> Call:
    return Call(number, [], 1.0, 1.0, asyncio.get_running_loop().create_future())


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts timers."""

    timers = 0

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


def test_every_call_is_reminded_of_at_its_time_and_again_as_asked() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        reminded: list[tuple[int, float]] = []
        start = loop.time()

        def remind(late: Call) -> None:
            reminded.append((late.id, loop.time() - start))
            if len([number for number, _ in reminded if number == late.id]) < 2:
                calls.remind_at(late, loop.time() + 0.1)

        calls = Calls(remind)
        for number, delay_s in ((0, 0.3), (1, 0.05), (2, 0.0)):
            made = calls.by_id[number] = call(number)
            calls.remind_at(made, start + delay_s)
        await asyncio.sleep(0.8)
        calls.close()
        assert sorted(number for number, _ in reminded) == [0, 0, 1, 1, 2, 2]
        first = dict(reversed(reminded))
        assert first[0] >= 0.3 and first[1] >= 0.05
        assert min(later - sooner for n in range(3) for sooner, later in [[t for m, t in reminded if m == n]]) >= 0.099

    asyncio.run(scenario())


def test_a_call_that_was_answered_is_not_reminded_of() -> None:
    async def scenario() -> None:
        reminded: list[int] = []
        calls = Calls(lambda late: reminded.append(late.id))
        now = asyncio.get_running_loop().time()
        for number in range(3):
            calls.by_id[number] = call(number)
            calls.remind_at(calls.by_id[number], now + 0.02)
        del calls.by_id[1]
        await asyncio.sleep(0.2)
        calls.close()
        assert sorted(reminded) == [0, 2]

    asyncio.run(scenario())


def test_closed_calls_are_left_alone() -> None:
    async def scenario() -> None:
        reminded: list[int] = []
        calls = Calls(lambda late: reminded.append(late.id))
        calls.by_id[0] = call(0)
        calls.remind_at(calls.by_id[0], asyncio.get_running_loop().time() + 0.02)
        calls.close()
        await asyncio.sleep(0.1)
        assert reminded == []

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1000])
def test_many_calls_that_are_answered_need_few_timers(count: int) -> None:
    loop = CountingLoop()

    async def scenario() -> None:
        calls = Calls(lambda late: None)
        now = loop.time()
        before = loop.timers
        for number in range(count):
            made = calls.by_id[number] = call(number)
            calls.remind_at(made, now + 30 + number * 1e-3)
            del calls.by_id[number]
        calls.close()
        assert loop.timers - before <= 1

    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
