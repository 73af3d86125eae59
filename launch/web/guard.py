"""Who may read: the check of every request before anything is looked up, and the headers of every answer."""

import hashlib
import hmac
import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

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


class Guard:
    """Refuses what may not be answered; `token` is None on loopback without one, which takes a local Host header."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token
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
