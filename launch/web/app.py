"""The routes of the page, and the loops that read the runs while a browser looks at them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from common.errors import SlipstreamError
from launch.web import tables
from launch.web.guard import Guard
from launch.web.run_view import Cursor, RunView

logger = logging.getLogger(__name__)
READ_S, OBSERVE_S, IDLE_S, ALIVE_S = 0.25, 2.0, 10.0, 15.0  # pauses; without a browser; between signs of life
FOLDER = Path(__file__).parent / "static"
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
Task = Callable[[], object]


class Hub:
    """Reads the runs in threads, and tells the browsers' streams when something is new."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self.views, self.watchers = views, 0
        self._changed, self._wanted = asyncio.Event(), asyncio.Event()
        self._told = set[str]()

    @contextlib.asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        """Read until the server ends."""
        loops = [
            asyncio.create_task(self._repeat(work, view, pause_s))
            for view in self.views
            for work, pause_s in ((self._read, READ_S), (self._observe, OBSERVE_S))
        ]
        yield
        for loop in loops:
            loop.cancel()

    async def _repeat(self, work: Callable[[RunView], bool], view: RunView, pause_s: float) -> None:
        while True:
            more = False
            try:
                more = await asyncio.to_thread(work, view)
            except Exception as error:  # a page that lacks something is better than none
                if str(error) not in self._told and len(self._told) < 100:
                    self._told.add(str(error))
                    logger.warning("%s cannot be read: %s", view.run.path, error, exc_info=error)
            if more:
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            if not more or work is not self._read:
                if self._wanted.is_set():
                    await asyncio.sleep(pause_s)
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wanted.wait(), IDLE_S)

    @staticmethod
    def _read(view: RunView) -> bool:
        return view.read()

    @staticmethod
    def _observe(view: RunView) -> bool:
        try:
            view.observe()
            view.read_lanes()
        finally:
            view.describe()
        return True

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: what a browser lacks of each run, first all of it, then what is added."""
        cursors = [Cursor() for _ in self.views]
        self.watchers += 1
        self._wanted.set()
        try:
            while True:
                changed = self._changed
                for index, (view, cursor) in enumerate(zip(self.views, cursors, strict=True)):
                    if (new := await asyncio.to_thread(view.news, cursor)) is not None:
                        yield b"data: " + msgspec.json.encode({"run": index, **new}) + b"\n\n"
                try:
                    await asyncio.wait_for(changed.wait(), ALIVE_S)
                except TimeoutError:
                    yield b": alive\n\n"
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._wanted.clear()


def make_app(views: Sequence[RunView], token: str | None) -> Starlette:
    """The page of these runs; every route only reads."""
    hub = Hub(views)
    index = (FOLDER / "index.html").read_text()
    files = {path.name: path for path in FOLDER.iterdir() if path.suffix in KINDS}

    async def page(request: Request) -> Response:
        return HTMLResponse(index.replace("<!-- plain -->", "".join(map(plain, views))))

    async def static(request: Request) -> Response:
        path = files.get(request.path_params["name"])
        return Response(path.read_bytes(), media_type=KINDS[path.suffix]) if path else _error(404, "no such file")

    async def events(request: Request) -> Response:
        return StreamingResponse(hub.stream(), media_type="text/event-stream")

    async def table(request: Request) -> Response:
        number, name = request.path_params["run"], request.path_params["name"]
        if number >= len(views) or name not in TABLES:
            return _error(404, "no such run or table")
        try:
            answer = await asyncio.to_thread(TABLES[name], views[number], _Query(request))
        except ValueError as error:
            return _error(400, str(error))
        except SlipstreamError as error:
            return _error(404, str(error))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/api/events", events),
        Route("/api/runs/{run:int}/{name}", table),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)], lifespan=hub.running)


class _Query:
    """The words after the question mark."""

    def __init__(self, request: Request) -> None:
        self._words = request.query_params
        self.text, self.state = self._words.get("filter", "")[:200], self._words.get("state", "")
        self.offset, self.limit = self.number("offset", 0), min(self.number("limit", 50), tables.ROWS)

    def number(self, name: str, default: int = 0) -> int:
        """A number of at least 0; raises ValueError for anything else."""
        word = self._words.get(name, str(default))
        if not (word.isdecimal() and len(word) < 16):
            raise ValueError(f"{name}: expected a number of at least 0, found {word[:40]!r}")
        return int(word)

    def optional(self, name: str) -> int | None:
        """As `number`; None when it is not given."""
        return self.number(name) if name in self._words else None


TABLES: dict[str, Callable[[RunView, _Query], dict[str, Any]]] = {
    "nodes": lambda view, q: tables.nodes(view, q.text, q.offset, q.limit),
    "lanes": lambda view, q: view.lanes.page(q.text, q.offset, q.limit, q.number("seconds", 600)),
    "tasks": lambda view, q: tables.tasks(view, q.text, q.state, q.offset, q.limit),
    "transcripts": lambda view, q: tables.transcripts(view, q.optional("step"), q.optional("task"), q.limit),
    "transcript": lambda view, q: tables.transcript(
        view, q.number("task", 0), q.number("sample", 0), q.optional("step")
    ),
}


def plain(view: RunView) -> str:
    """The newest figures as HTML without a script."""
    state = view.state
    rows = {"steps": f"{state.get('steps', 0)} of {state.get('wanted')}", **state.get("figures", {})}
    rows |= {"who waits": "; ".join(stall["text"] for stall in state.get("stalls", []))}
    rows |= {"note": state.get("note", "")}
    cells = "".join(f"<tr><th scope=row>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows.items() if v)
    return f"<table><caption>{escape(state['name'])}</caption>{cells}</table>"


def _error(code: int, text: str) -> Response:
    return Response(msgspec.json.encode({"refused": text}), code, media_type="application/json")
