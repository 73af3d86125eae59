"""A scorer's server on a loopback port: it answers as it is told, and notes what it saw."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Act = Callable[["JudgeServer", dict[str, Any]], Awaitable[web.StreamResponse]]


def completion(text: str | None, **choice: Any) -> web.Response:
    """A chat completion, by a model of version 2."""
    message = {"message": {"role": "assistant", "content": text}, **choice}
    return web.json_response({"model": "judge-v2", "choices": [message]})


async def by_length(server: "JudgeServer", body: dict[str, Any]) -> web.StreamResponse:
    """The verdict is the number of characters behind 'Answer: '."""
    return completion(f"Score: {len(body['messages'][-1]['content'].partition('Answer: ')[2])}")


async def hang(server: "JudgeServer", body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def close(server: "JudgeServer", body: dict[str, Any]) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert server.request is not None and server.request.transport is not None
    server.request.transport.abort()
    return web.Response()


def status(code: int, text: str = "", **headers: str) -> Act:
    async def act(server: "JudgeServer", body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return act


def text(answer: str) -> Act:
    return status(200, answer)


def says(answer: str | None, **choice: Any) -> Act:
    async def act(server: "JudgeServer", body: dict[str, Any]) -> web.StreamResponse:
        return completion(answer, **choice)

    return act


class JudgeServer:
    """Each request gets the next of `acts`, then `act`."""

    def __init__(self) -> None:
        self.act: Act = by_length
        self.acts: list[Act] = []
        self.served: list[str] | int = ["judge"]  # answer of /v1/models, or its status
        self.facts: dict[str, Any] = {}  # more fields of each model in it
        self.redirect = ""  # where /v1/models sends to
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str] = []
        self.times: list[float] = []
        self.now = self.most_at_once = 0
        self.full = asyncio.Event()  # set when `wanted` requests are there at once
        self.wanted = 0
        self.request: web.Request | None = None
        self.url = ""
        self._connections: set[asyncio.BaseTransport] = set()

    async def together(self, server: "JudgeServer", body: dict[str, Any]) -> web.StreamResponse:
        """Answer when `wanted` requests are there at once."""
        await self.full.wait()
        return await by_length(server, body)

    async def _judge(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization", ""))
        self.times.append(time.monotonic())
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        if self.now == self.wanted:
            self.full.set()
        self.request = request
        try:
            return await (self.acts.pop(0) if self.acts else self.act)(self, body)
        finally:
            self.now -= 1

    def _note(self, request: web.Request) -> None:
        if request.transport is not None:
            self._connections.add(request.transport)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        self.keys.append(request.headers.get("Authorization", ""))
        if self.redirect:
            return web.Response(status=302, headers={"Location": self.redirect})
        if isinstance(self.served, int):
            return web.Response(status=self.served)
        return web.json_response({"data": [{"id": name, **self.facts} for name in self.served]})

    async def run(self, ready: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/chat/completions", "/classify", "/v1/completions", "/tokenize"):
            app.router.add_post(path, self._judge)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)  # 0 is no limit
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await stop.wait()
        await runner.cleanup()
        for connection in self._connections:
            connection.abort()  # type: ignore[attr-defined]
        await asyncio.sleep(0)  # in the next round of the loop their sockets are closed
        await asyncio.sleep(0)


@contextmanager
def serving() -> Iterator[JudgeServer]:
    """A server on a thread of its own."""
    server = JudgeServer()
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.run(ready, stop),), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
