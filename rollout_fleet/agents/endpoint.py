"""An OpenAI-compatible endpoint on the node, for agents: loopback only, a key per episode.

    agent --HTTP, messages--> endpoint --tokens--> engine        Conversation keeps what was sampled, exactly

Served: POST /v1/chat/completions (tools, streams), POST /v1/completions, GET /v1/models. The sampling distribution is
the job's: what a request asks for and would not get is refused by name (api.py).
"""

import asyncio
import json
import logging
import secrets
from functools import partial
from typing import Any

from aiohttp import web

from common.errors import SlipstreamError
from rollout_fleet.agents import api
from rollout_fleet.agents.conversation import Conversation
from rollout_fleet.episode.driver import EpisodeFailed

logger = logging.getLogger(__name__)

BODY_BYTES = 32 << 20


class Session:
    """One episode's access: `api_key` is valid until it is closed."""

    def __init__(self, endpoint: "Endpoint", conversation: Conversation) -> None:
        self._sessions = endpoint.sessions
        self.conversation = conversation
        self.base_url = endpoint.base_url
        self.api_key = secrets.token_urlsafe(32)
        self.broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()  # the engine's failure
        self._asking: set[asyncio.Task[api.Answer]] = set()
        self._sessions[self.api_key] = self

    async def answer(self, asked: api.AnyRequest) -> api.Answer:
        """The policy's answer, as from Conversation.answer; cancelled when the episode ends meanwhile."""
        asking = asyncio.create_task(self.conversation.answer(asked))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return await asking

    def close(self) -> None:
        """The key is void from now on; requests that the agent left behind are given up."""
        self._sessions.pop(self.api_key, None)
        for asking in self._asking:
            asking.cancel()


class Endpoint:
    """The server; it starts with the first session. Belongs to one event loop."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}  # by key
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.base_url = ""

    async def open(self, conversation: Conversation) -> Session:
        async with self._starting:
            if self._runner is None:
                await self._start()
        return Session(self, conversation)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post("/v1/chat/completions", partial(self._serve, kind=api.ChatRequest))
        app.router.add_post("/v1/completions", partial(self._serve, kind=api.CompletionRequest))
        app.router.add_get("/v1/models", self._models)
        # a request is cancelled when its agent disconnects or its episode ends
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        logger.info("agents find the policy at %s", self.base_url)

    async def _models(self, request: web.Request) -> web.Response:
        if self._session(request) is None:
            return _denied()
        return web.json_response({"object": "list", "data": [{"id": api.MODEL, "object": "model", "owned_by": "job"}]})

    async def _serve(self, request: web.Request, kind: type[Any]) -> web.StreamResponse:
        session = self._session(request)
        if session is None:
            return _denied()
        try:
            asked = api.read(json.loads(await request.read()), kind, session.conversation.job)
            if self._session(request) is None:  # the episode has ended meanwhile
                return _denied()
            answer = await session.answer(asked)
        except asyncio.CancelledError:
            if self._session(request) is None:
                return _denied()
            raise
        except api.BadRequest as error:
            return _error(str(error), error.code, error.status, error.parameter)
        except (ValueError, RecursionError) as error:
            return _error(f"the body is not JSON: {error}", "invalid_request_error", 400)
        except (EpisodeFailed, SlipstreamError) as error:
            if not session.broken.done():
                session.broken.set_result(error)
            return _error(str(error), "server_error", 500)
        body = api.answer_body(answer, asked, f"turn-{len(session.conversation.turns)}")
        if not asked.stream:
            return web.json_response(body)
        return await _streamed(request, api.chunks(body, asked))

    def _session(self, request: web.Request) -> Session | None:
        return self.sessions.get(request.headers.get("Authorization", "").removeprefix("Bearer "))


async def _streamed(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _error(message: str, code: str, status: int, parameter: str = "") -> web.Response:
    kind = code if status in (401, 500) else api.CODE
    error = {"message": message, "type": kind, "param": parameter or None, "code": code}
    return web.json_response({"error": error}, status=status)


def _denied() -> web.Response:
    return _error("no episode has this key; it is void when the episode ends", "invalid_api_key", 401)
