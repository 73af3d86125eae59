"""slipstream web RUN [RUN ...]: a page that shows runs while they are trained. It only reads.

The tables and the routes of the page, the loops that read the runs, and who may read: the check of every request.
"""

import argparse
import asyncio
import contextlib
import errno
import hashlib
import hmac
import logging
import math
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import SlipstreamError, UsageError
from common.metrics import AGE_CLASSES, AGE_NAMES, PANELS
from common.process.logs import log_end
from common.transcripts import Transcript
from launch.observe.transcripts import read
from launch.resolve_target import find_run
from launch.web.run_view import FILES, BrowserCopy, RunView

# ---------------------------------------------------------------- tables
# They are filtered and cut into pages here, and a transcript has a bounded size.


ROWS = 200  # A page has at most so many.
SEARCHED = 2000  # newest transcripts, when a word is to be found in them
TOKENS = 20_000  # A transcript is cut to so many.
PREVIEW = 240  # characters of a prompt and of an answer in the list
PER_TOKEN = ("tokens", "pieces", "logprobs", "ratios", "trained")
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Query(msgspec.Struct, frozen=True):
    filter: str = ""
    state: str = ""
    offset: Number = 0
    limit: Number = 50
    seconds: Number = 600
    step: Number | None = None
    task: Number | None = None
    sample: Number = 0
    # bounds of the reward
    least: float = -math.inf
    most: float = math.inf

    @property
    def page(self) -> slice:
        return slice(self.offset, self.offset + min(self.limit, ROWS))


def nodes(view: RunView, query: Query) -> dict[str, Any]:
    """Nodes whose id, host, state or reason contains the filter."""
    keys = ("id", "host", "state", "waiting_on")
    found = [node for node in view.nodes if any(query.filter in str(node[key]) for key in keys)]
    return {"total": len(found), "rows": found[query.page]}


def lanes(view: RunView, query: Query) -> dict[str, Any]:
    return view.lanes.page(query.filter, query.page, query.seconds)


def tasks(view: RunView, query: Query) -> dict[str, Any]:
    """Tasks of the ledger, the newest first: of this serial, or whose nodes or reason contain the filter; `step:N`."""
    entries = view.ledger()
    text = query.filter
    state = query.state
    if state:
        entries = [e for e in entries if e.state == state or (state == "filtered" and e.filtered)]
    if text.startswith("step:"):
        entries = [e for e in entries if str(e.step) == text[5:]]
    elif text.isdecimal():
        entries = [e for e in entries if str(e.serial) == text]
    elif text:
        entries = [e for e in entries if text in e.reason or any(text in node for node in e.nodes)]
    return {"total": len(entries), "rows": entries[::-1][query.page]}


def transcripts(view: RunView, query: Query) -> dict[str, Any]:
    """One line for each transcript, the newest first, and whether there are `more`; `filter` is a reason to keep it."""
    found = read(view.run, query.step, query.task)
    if query.filter or math.isfinite(query.least) or math.isfinite(query.most):
        found = (
            transcript
            for transcript in islice(found, SEARCHED)
            if query.filter in " ".join(transcript.why) and query.least <= transcript.reward <= query.most
        )
    shown = query.page
    lines = [preview(transcript) for transcript in islice(found, shown.start, shown.stop + 1)]
    rows = lines[: shown.stop - shown.start]
    return {"total": shown.start + len(rows), "more": len(lines) > len(rows), "rows": rows}


def preview(found: Transcript) -> dict[str, Any]:
    """A transcript without its turns: the end of the prompt and the end of the last answer stand for them."""
    ends = dict[str, str]()
    for turn in found.turns:
        if turn.author != "environment":
            text = turn.text or "".join(turn.pieces)
            ends[turn.author] = " ".join(text[-4 * PREVIEW :].split())[-PREVIEW:]
    about = msgspec.to_builtins(msgspec.structs.replace(found, turns=[]))
    return about | {"prompt": ends.get("prompt", ""), "answer": ends.get("policy", "")}


def transcript(view: RunView, query: Query) -> dict[str, Any]:
    """The newest transcript of an episode, cut to a size that a browser shows; `cut` says how much is left out."""
    for found in islice(read(view.run, query.step, query.task), ROWS):
        if found.sample == query.sample:
            return bounded(found)
    raise SlipstreamError(f"no transcript of task {query.task}, sample {query.sample} is kept")


def bounded(found: Transcript) -> dict[str, Any]:
    """A transcript with its first TOKENS tokens."""
    room = TOKENS
    cut = found.cut_tokens
    turns = list[dict[str, Any]]()
    for turn in found.turns:
        kept = {name: getattr(turn, name)[:room] for name in PER_TOKEN}
        turns.append(msgspec.to_builtins(turn) | kept | {"text": "" if turn.pieces else turn.text})
        cut += max(0, len(turn.tokens) - room)
        room = max(0, room - len(turn.tokens))
    return msgspec.to_builtins(found) | {"turns": turns, "cut": cut}


def config(view: RunView, query: Query) -> dict[str, Any]:
    """The resolved config as it is written in the run's folder."""
    return {"text": view.run.config.read_text()}


def logs(view: RunView, query: Query) -> dict[str, Any]:
    """The names of the logs, the newest first, and the end of the one that is `filter`, by default the newest."""
    view.check_inside(view.run.logs, *view.run.logs.glob("*"))
    files = sorted(view.run.logs.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    shown = next((path for path in files if path.name == query.filter), files[0] if files else None)
    text = log_end(shown) if shown else ""
    return {"names": [path.name for path in files], "shown": shown.name if shown else "", "text": text}


def check_shared(view: RunView) -> None:
    """Raise SlipstreamError when RUN or a folder above it is closed to other users, who all reach the page."""
    run = view.run.path.resolve()
    if run.stat().st_mode & 0o005 != 0o005 or not all(folder.stat().st_mode & 0o001 for folder in run.parents):
        why = "other users may not read the run's folder, but may open this page"
        raise SlipstreamError(f"not shown: {why}; `slipstream web {view.run.path} --token-file FILE` shows it")


TABLES = {table.__name__: table for table in (nodes, lanes, tasks, transcripts, transcript, config, logs)}
PRIVATE = ("config", "logs")  # They may contain secrets.


# ---------------------------------------------------------------- routes

logger = logging.getLogger(__name__)
# Pauses between two looks.
TOLD_S = 0.1
READ_S = 0.25
OBSERVE_S = 2.0
IDLE_S = 10.0  # without a browser
FOLDER = Path(__file__).parent / "static"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Hub:
    """Reads the runs in threads, and tells the browsers' streams what is new."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self.views = views
        self.watchers = 0

    @contextlib.asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
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
        copies = [BrowserCopy() for _ in self.views]
        self.watchers += 1
        try:
            while True:
                for index, (view, copy) in enumerate(zip(self.views, copies, strict=True)):
                    if (new := await asyncio.to_thread(view.news, copy)) is not None:
                        yield b"data: " + msgspec.json.encode({"run": index, **new}) + b"\n\n"
                await asyncio.sleep(TOLD_S)
        finally:
            self.watchers -= 1


def make_app(views: Sequence[RunView], token: str | None) -> Starlette:
    """The page of these runs; every route only reads."""
    hub = Hub(views)
    by_number = {str(number): view for number, view in enumerate(views)}
    index = (FOLDER / "index.html").read_text()
    ages = [{"least": least, "name": name} for least, name in zip(AGE_CLASSES, AGE_NAMES, strict=True)]
    drawn = msgspec.json.encode({"panels": [panel for panel in PANELS if panel.live], "ages": ages})

    async def page(request: Request) -> Response:
        return HTMLResponse(index.replace("<!-- plain -->", "".join(map(plain, views))))

    async def events(request: Request) -> Response:
        return StreamingResponse(hub.stream(), media_type="text/event-stream")

    async def table(request: Request) -> Response:
        view = by_number.get(request.path_params["run"])
        name = request.path_params["name"]
        if view is None or name not in TABLES:
            return JSONResponse({"refused": "no such run or table"}, 404)
        try:
            query = msgspec.convert(dict(request.query_params), Query, strict=False)
            await asyncio.to_thread(view.check_inside)
            if token is None and name in PRIVATE:
                check_shared(view)
            answer = await asyncio.to_thread(TABLES[name], view, query)
        except (msgspec.ValidationError, SlipstreamError, OSError) as error:
            return JSONResponse({"refused": str(error)}, 400 if isinstance(error, msgspec.ValidationError) else 404)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def file(request: Request) -> Response:
        view = by_number.get(request.path_params["run"])
        name = request.path_params["name"]
        if view is None or name not in view.state.get("files", ()):
            return JSONResponse({"refused": "no such run or file"}, 404)
        path = view.run.path / FILES[name]
        try:
            view.check_inside(path)
        except SlipstreamError as error:
            return JSONResponse({"refused": str(error)}, 404)
        return FileResponse(path, filename=f"{view.run.path.resolve().name}-{name}")

    async def panels(request: Request) -> Response:
        return Response(drawn, media_type="application/json")

    static = Mount("/static", StaticFiles(directory=FOLDER))
    routes = [Route("/", page), static, Route("/api/panels", panels), Route("/api/events", events)]
    routes += [Route("/api/runs/{run}/{name}", table), Route("/api/runs/{run}/files/{name}", file)]
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


class Guard:
    """Refuses what may not be answered; `token` is None on loopback without one, which takes a local Host header."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token
        self._cookie = hashlib.sha256(b"cookie " + (token or "").encode()).hexdigest()
        self._name = f"slipstream-{self._cookie[:8]}"  # browsers share cookies between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not be served, or to a login; None for one that is served."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("the page is read-only", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            local = LOCAL.fullmatch(request.headers.get("host", ""))
            return None if local else PlainTextResponse("unknown Host header", 421)
        words = parse_qs(request.scope["query_string"].decode("latin-1")).get("token")
        if words and _same(words[0], self._token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._name, self._cookie, httponly=True, samesite="lax")
            return answer
        kind, _, found = request.headers.get("authorization", "").partition(" ")
        bearer = kind.lower() == "bearer" and _same(found.strip(), self._token)
        if bearer or (not words and _same(request.cookies.get(self._name, ""), self._cookie)):
            return None
        why = "this page needs the token of --token-file: open it once with ?token=TOKEN, or send Authorization: Bearer"
        return PlainTextResponse(why, 401, {"WWW-Authenticate": "Bearer"})


def _same(found: str, wanted: str) -> bool:
    return hmac.compare_digest(found.encode(), wanted.encode())


# ---------------------------------------------------------------- command

SHORTEST = 16  # characters of a token
PORT = 8642


def command(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="slipstream web: %(message)s")
    token = read_token(Path(args.token_file)) if args.token_file else None
    if token is None and args.host not in LOOPBACK:
        raise UsageError(f"--host {args.host}: beyond this machine the page needs --token-file FILE; docs/web.md")
    for word in args.runs:
        if "://" in word:
            raise UsageError(f"{word}: the page reads the files of a run; give the run's folder, not an address")
    app = make_app([RunView(find_run(word)) for word in args.runs], token)
    listener = listen(args.host, args.port)
    shown = f"[{args.host}]" if ":" in args.host else args.host
    print(f"the page is at http://{shown}:{listener.getsockname()[1]}/{'?token=TOKEN' if token else ''}", flush=True)
    options = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, ws="none"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn raises a signal again after it has shut down
    uvicorn.Server(options).run(sockets=[listener])
    return 0


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket; None stands for PORT, or any port if that is taken. Raises UsageError."""
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"--port: expected 0 to 65535, found {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, PORT if port is None else port), family=family)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return listen(host, 0)
        where = f"--host {host} --port {PORT if port is None else port}"
        raise UsageError(f"{where}: cannot listen there: {error}; --port 0 takes any free port") from None


def read_token(file: Path) -> str:
    """The token in a file; raises UsageError when it is of no use."""
    try:
        token = file.read_text().strip()
        mode = file.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file: {file} cannot be read: {error}") from None
    if len(token) < SHORTEST or not token.isascii() or len(token.split()) != 1:
        raise UsageError(f"--token-file: {file}: expected at least {SHORTEST} ASCII characters without a space")
    if mode & 0o077:
        raise UsageError(f"--token-file: {file} can be read by others than its owner (mode {mode:o}); chmod 600 it")
    return token
