"""Calls cross to the environment thread in batches and come back to the right caller."""

import asyncio
import threading

from rollout_fleet.environments.isolation.thread_host import EnvironmentHost


def test_many_calls_at_once_each_get_their_own_answer_from_the_other_thread() -> None:
    host = EnvironmentHost()

    async def one(number: int) -> tuple[int, str]:
        async def work() -> tuple[int, str]:
            if number % 3 == 0:
                await asyncio.sleep(0.001 * (number % 5))
            if number % 7 == 0:
                raise ValueError(f"call {number}")
            return number, threading.current_thread().name

        try:
            return await host.call(work)
        except ValueError as error:
            return number, str(error)

    async def run() -> list[tuple[int, str]]:
        return await asyncio.gather(*(one(n) for n in range(200)))

    try:
        answers = asyncio.run(run())
    finally:
        host.close()
    assert answers == [(n, f"call {n}" if n % 7 == 0 else "environments") for n in range(200)]


def test_a_call_given_up_is_cancelled_there_and_others_go_on() -> None:
    host = EnvironmentHost()
    cancelled = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def quick() -> int:
        return 7

    async def run() -> int:
        task = asyncio.create_task(host.call(endless))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await host.call(quick)

    try:
        assert asyncio.run(run()) == 7
        assert cancelled.wait(5)
    finally:
        host.close()
