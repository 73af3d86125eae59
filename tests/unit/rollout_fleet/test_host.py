"""The environments' thread: results, cancellation, and being replaced when it is blocked."""

import asyncio
import threading
import time

import pytest
from fleet_fakes import new_host, run

from rollout_fleet.environments.isolation import thread_host as host_module
from tests.waiting import until_async


async def thread_name() -> str:
    return threading.current_thread().name


def test_calls_run_on_the_environments_thread() -> None:
    async def once() -> None:
        host = new_host()
        assert await host.call(thread_name) == "environments"

    run(once())


def test_cancelling_the_caller_cancels_the_call() -> None:
    ended = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def once() -> None:
        host = new_host()
        call = asyncio.create_task(host.call(waits))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_async(ended.is_set)

    run(once())


def test_a_blocked_thread_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "PROBE_S", 0.05)
    release = threading.Event()

    async def blocks() -> None:
        release.wait(30)

    async def once() -> None:
        host = new_host()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.call(blocks), 0.05)
        await asyncio.sleep(0.2)
        started = time.monotonic()
        assert await asyncio.wait_for(host.call(thread_name), 5) == "environments"
        assert time.monotonic() - started < 2
        release.set()

    run(once())


def test_a_slow_call_on_a_healthy_thread_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "PROBE_S", 0.05)

    async def identity() -> int:
        return threading.get_ident()

    async def once() -> None:
        host = new_host()
        before = await host.call(identity)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(host.call(lambda: asyncio.sleep(60)), 0.05)
        await asyncio.sleep(0.2)
        assert await host.call(identity) == before

    run(once())
