"""An OpenAI-compatible endpoint on the node, for agents: loopback only, a key per episode.

    agent --HTTP, messages--> endpoint --tokens--> engine        Conversation keeps what was sampled, exactly

Served: POST /v1/chat/completions (tools, streams), /v1/completions, /v1/responses, Anthropic's /v1/messages, and GET
/v1/models. A request for anything that it would not get is refused by name (api.py).
"""

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from common.errors import SlipstreamError
from rollout_fleet.agents import api
from rollout_fleet.agents.conversation import Conversation
from rollout_fleet.agents.messages import Messages
from rollout_fleet.agents.responses import Responses
from rollout_fleet.episode.driver import EpisodeFailed
from rollout_fleet.episode.rendering import Message

logger = logging.getLogger(__name__)

BODY_BYTES = 32 << 20
HOST = "127.0.0.1"
Said = dict[str, list[Message]]  # an episode's conversations by the id of the response that ended them


class Dialect(Protocol):
    """One request in the words of an API, and its answer."""

    def read(self, body: Any, terms: api.Terms, said: Said) -> api.AnyRequest: ...

    def body(self, answer: api.Answer, request: Any, number: int) -> dict[str, Any]: ...

    def events(self, body: dict[str, Any], request: Any) -> Iterable[tuple[str, dict[str, Any]]]: ...

    def error(self, message: str, code: str, status: int, parameter: str = "") -> dict[str, Any]: ...


class _Chats:
    kind: type[api.AnyRequest] = api.ChatRequest

    def read(self, body: Any, terms: api.Terms, said: Said) -> api.AnyRequest:
        return api.read(body, self.kind, terms)

    def body(self, answer: api.Answer, request: api.AnyRequest, number: int) -> dict[str, Any]:
        return api.answer_body(answer, request, f"turn-{number}")

    def events(self, body: dict[str, Any], request: api.AnyRequest) -> Iterable[tuple[str, dict[str, Any]]]:
        return (("", chunk) for chunk in api.chunks(body, request))

    error = staticmethod(api.error_body)


class _Completions(_Chats):
    kind = api.CompletionRequest


class Session:
    """One episode's access: `api_key` is valid until it is closed."""

    def __init__(self, endpoint: "Endpoint", conversation: Conversation) -> None:
        self._sessions = endpoint.sessions
        self.conversation = conversation
        self.base_url = endpoint.base_url
        self.api_key = secrets.token_urlsafe(32)
        self.broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()  # the engine's failure
        self.said: Said = {}
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
        _bypass_proxies()  # now: the client of an agent reads the variables when it is made

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
        app.router.add_post("/v1/chat/completions", partial(self._serve, kind=_Chats))
        app.router.add_post("/v1/completions", partial(self._serve, kind=_Completions))
        app.router.add_post("/v1/responses", partial(self._serve, kind=Responses))
        for path in ("/v1/messages", "/v1/v1/messages"):  # Anthropic's client adds /v1 to the base_url
            app.router.add_post(path, partial(self._serve, kind=Messages))
        app.router.add_get("/v1/models", self._models)
        # a request is cancelled when its agent disconnects or its episode ends
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.base_url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"
        logger.info("agents find the policy at %s", self.base_url)

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if session is None:
            return _denied(_Chats())
        names = [api.MODEL, *(f"{api.MODEL}/{name}" for name in session.conversation.terms.agents)]
        data = [{"id": name, "object": "model", "owned_by": "job"} for name in names]
        return web.json_response({"object": "list", "data": data})

    async def _serve(self, request: web.Request, kind: type[Any]) -> web.StreamResponse:
        session = self._session(request)
        dialect: Dialect = kind()
        if session is None:
            return _denied(dialect)
        try:
            asked = dialect.read(json.loads(await request.read()), session.conversation.terms, session.said)
            if self._session(request) is None:  # the episode has ended meanwhile
                return _denied(dialect)
            answer = await session.answer(asked)
        except asyncio.CancelledError:
            if self._session(request) is None:
                return _denied(dialect)
            raise
        except api.BadRequest as error:
            return _error(dialect, str(error), error.code, error.status, error.parameter)
        except (ValueError, RecursionError) as error:
            return _error(dialect, f"the body is not JSON: {error}", api.CODE, 400)
        except (EpisodeFailed, SlipstreamError) as error:
            if not session.broken.done():
                session.broken.set_result(error)
            return _error(dialect, str(error), "server_error", 500)
        body = dialect.body(answer, asked, len(session.conversation.turns))
        if not asked.stream:
            return web.json_response(body)
        return await _streamed(request, dialect.events(body, asked))

    def _session(self, request: web.Request) -> Session | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.sessions.get(given or request.headers.get("x-api-key", ""))


def _bypass_proxies() -> None:
    """Let HTTP clients here and in children connect to HOST directly: a proxy would get prompts and keys."""
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        known = [word.strip() for word in os.environ.get(name, os.environ.get(other, "")).split(",")]
        words = ["*"] if "*" in known else [*filter(None, known), HOST, "localhost"]  # "*" counts only when it is alone
        os.environ[name] = ",".join(dict.fromkeys(words))


async def _streamed(request: web.Request, events: Iterable[tuple[str, dict[str, Any]]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    name = ""
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())
    if not name:  # events without names have a last word
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _error(dialect: Dialect, message: str, code: str, status: int, parameter: str = "") -> web.Response:
    return web.json_response(dialect.error(message, code, status, parameter), status=status)


def _denied(dialect: Dialect) -> web.Response:
    return _error(dialect, "no episode has this key; it is void when the episode ends", "invalid_api_key", 401)
