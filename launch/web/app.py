"""The routes of the page, and the loops that read the runs."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from html import escape
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from common.errors import SlipstreamError
from launch.web.guard import Guard
from launch.web.run_view import Cursor, RunView
from launch.web.tables import TABLES, Query

logger = logging.getLogger(__name__)
TOLD_S, READ_S, OBSERVE_S, IDLE_S = 0.1, 0.25, 2.0, 10.0  # pauses between two looks; the last without a browser
FOLDER = Path(__file__).parent / "static"


class Hub:
    """Reads the runs in threads, and tells the browsers' streams what is new."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self.views, self.watchers = views, 0

    @contextlib.asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        """Read until the server ends."""
        works = [pair for view in self.views for pair in ((view.read, READ_S), (view.observe, OBSERVE_S))]
        loops = [asyncio.create_task(self._repeat(work, pause_s)) for work, pause_s in works]
        yield
        for loop in loops:
            loop.cancel()

    async def _repeat(self, work: Callable[[], bool | None], pause_s: float) -> None:
        told = ""
        while True:
            more = False
            try:
                more = await asyncio.to_thread(work)
            except Exception as error:  # a page that lacks something is better than none
                if str(error) != told:
                    logger.warning("a run cannot be read: %s", error)
                told = str(error)
            waited_s = 0.0
            while not more and waited_s < (pause_s if self.watchers else IDLE_S):
                await asyncio.sleep(READ_S)
                waited_s += READ_S

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: what a browser lacks of each run, first all of it, then what is added."""
        cursors = [Cursor() for _ in self.views]
        self.watchers += 1
        try:
            while True:
                for index, (view, cursor) in enumerate(zip(self.views, cursors, strict=True)):
                    if (new := await asyncio.to_thread(view.news, cursor)) is not None:
                        yield b"data: " + msgspec.json.encode({"run": index, **new}) + b"\n\n"
                await asyncio.sleep(TOLD_S)
        finally:
            self.watchers -= 1


def make_app(views: Sequence[RunView], token: str | None) -> Starlette:
    """The page of these runs; every route only reads."""
    hub, by_number = Hub(views), {str(number): view for number, view in enumerate(views)}
    index = (FOLDER / "index.html").read_text()

    async def page(request: Request) -> Response:
        return HTMLResponse(index.replace("<!-- plain -->", "".join(map(plain, views))))

    async def events(request: Request) -> Response:
        return StreamingResponse(hub.stream(), media_type="text/event-stream")

    async def table(request: Request) -> Response:
        view, name = by_number.get(request.path_params["run"]), request.path_params["name"]
        if view is None or name not in TABLES:
            return JSONResponse({"refused": "no such run or table"}, 404)
        try:
            query = msgspec.convert(dict(request.query_params), Query, strict=False)
            await asyncio.to_thread(view.check_inside)
            answer = await asyncio.to_thread(TABLES[name], view, query)
        except (msgspec.ValidationError, SlipstreamError) as error:
            return JSONResponse({"refused": str(error)}, 404 if isinstance(error, SlipstreamError) else 400)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    static = Mount("/static", StaticFiles(directory=FOLDER))
    routes = [Route("/", page), static, Route("/api/events", events), Route("/api/runs/{run}/{name}", table)]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)], lifespan=hub.running)


def plain(view: RunView) -> str:
    """The newest figures as HTML without a script."""
    state = view.state
    rows = {"steps": f"{state.get('steps', 0)} of {state.get('wanted')}", **state.get("figures", {})}
    rows |= {"watch rules": "; ".join((state.get("learner") or {}).get("alarms", []))}
    if finished := state.get("finished"):
        rows |= {"steps": f"finished: {finished['steps']} of {finished['of']}{finished['words']}"}
    else:
        waits = "; ".join(stall["text"] for stall in state.get("stalls", []))
        rows |= {"who waits": waits, "note": state.get("note", "")}
    cells = "".join(f"<tr><th scope=row>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in rows.items() if v)
    return f"<table><caption>{escape(state['name'])}</caption>{cells}</table>"
