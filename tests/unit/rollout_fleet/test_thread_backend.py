"""The environments' thread: results, cancellation, and being replaced when it is blocked."""

import asyncio
import threading

import pytest

from rollout_fleet.environments.isolation import thread_backend
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until_async
from tests.unit.rollout_fleet.fleet_fakes import new_host


async def thread_name() -> str:
    return threading.current_thread().name


async def test_many_calls_at_once_each_get_their_own_answer_from_the_other_thread() -> None:
    host = new_host()

    async def one(number: int) -> tuple[int, str]:
        async def work() -> tuple[int, str]:
            await asyncio.sleep(0.001 * (number % 5) if number % 3 == 0 else 0)
            if number % 7 == 0:
                raise ValueError(f"call {number}")
            return number, threading.current_thread().name

        try:
            return await host.call(work)
        except ValueError as error:
            return number, str(error)

    answers = await asyncio.gather(*(one(n) for n in range(200)))
    assert answers == [(n, f"call {n}" if n % 7 == 0 else "environments") for n in range(200)]


async def test_a_loop_is_kept_with_its_tasks_for_the_next_thread_unless_the_thread_is_blocked() -> None:
    first, blocks = thread_backend.EnvironmentThread(), threading.Event()

    async def loop_and_tasks() -> tuple[asyncio.AbstractEventLoop, list[asyncio.Task[object]]]:
        return asyncio.get_running_loop(), [asyncio.create_task(asyncio.sleep(LIMIT_S))]

    loop, (task,) = await first.call(loop_and_tasks)
    first.close(keep_loop=True)
    second = thread_backend.EnvironmentThread()
    again, _ = await second.call(loop_and_tasks)
    assert again is loop
    assert not task.done()
    loop.call_soon_threadsafe(blocks.wait)
    second.close(keep_loop=True)
    third = new_host()
    assert (await third.call(loop_and_tasks))[0] is not loop
    blocks.set()
    await until_async(lambda: not second._thread.is_alive())


async def test_cancelling_the_caller_cancels_the_call_and_others_go_on() -> None:
    host, began, ended = new_host(), threading.Event(), threading.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(host.call(endless))
    await until_async(began.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await host.call(thread_name) == "environments"
    await until_async(ended.is_set)


async def test_a_blocked_thread_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_backend, "PROBE_S", 0.05)
    release = threading.Event()

    async def blocks() -> None:
        release.wait(LIMIT_S)

    host, threads = new_host(), threading.active_count()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.call(blocks), 0.05)
    behind = asyncio.create_task(host.call(thread_name))  # another episode's
    await until_async(lambda: threading.active_count() > threads, "a new thread")
    assert await host.call(thread_name) == "environments"
    release.set()
    with refused(RuntimeError, "thread was given up"):
        await behind


async def test_a_slow_call_on_a_healthy_thread_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_backend, "PROBE_S", 0.5)

    async def identity() -> int:
        return threading.get_ident()

    host = new_host()
    before = await host.call(identity)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(host.call(lambda: asyncio.sleep(60)), 0.05)
    await asyncio.sleep(0.6)
    assert await host.call(identity) == before
