"""Reminders of calls without an answer: all of them, in time, from one timer."""

import asyncio
import contextlib

from broker import wire
from broker.client.connection import Call, Calls
from tests.rigs.waiting import until_async


def noted(calls: Calls, number: int, delay_s: float) -> None:
    """A call to be reminded of in `delay_s`."""
    loop = asyncio.get_running_loop()
    calls.by_id[number] = Call(wire.AskStatus(id=number), [], 1.0, 1.0, loop.create_future())
    calls.remind_at(calls.by_id[number], loop.time() + delay_s)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts timers."""

    timers = 0

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


async def test_every_call_without_an_answer_is_reminded_of_at_its_time_and_again_as_asked() -> None:
    loop, start = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    reminded: list[tuple[int, float]] = []

    def remind(late: Call) -> None:
        reminded.append((late.id, loop.time() - start))
        if len([number for number, _ in reminded if number == late.id]) < 2:
            calls.remind_at(late, loop.time() + 0.1)

    calls, closed = Calls(remind), Calls(remind)
    noted(closed, 9, 0.01)
    closed.close()
    for number, delay_s in ((0, 0.3), (1, 0.05), (2, 0.0), (3, 0.02)):
        noted(calls, number, delay_s)
    del calls.by_id[3]  # it was answered
    await until_async(lambda: sorted(number for number, _ in reminded) == [0, 0, 1, 1, 2, 2])
    calls.close()
    first = dict(reversed(reminded))
    assert first[0] >= 0.3 and first[1] >= 0.05
    assert min(later - sooner for n in range(3) for sooner, later in [[t for m, t in reminded if m == n]]) >= 0.099


def test_many_calls_that_are_answered_need_few_timers() -> None:
    loop = CountingLoop()

    async def scenario() -> int:
        calls, before = Calls(lambda late: None), loop.timers
        for number in range(1000):
            noted(calls, number, 30 + number * 1e-3)
            del calls.by_id[number]
        calls.close()
        return loop.timers - before

    with contextlib.closing(loop):
        assert loop.run_until_complete(scenario()) <= 1
