"""Code for the process of vLLM's server: the guard that asks for the scorer's key, and the server on a CPU.

`python -m rollout_fleet.scorers.vllm_server --model MODEL ...`: the engine and its worker are forks. vLLM itself starts
both anew, with all of their imports.
"""

import hmac
import os
import runpy
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rollout_fleet.vllm_patches.engine_start import import_ahead

SERVER = "vllm.entrypoints.openai.api_server"
KEY = "VLLM_API_KEY"  # variable of the server's process; vLLM reads it too
OPEN = "/health"  # the role polls it without the key


class KeyGuard:
    """ASGI middleware: every request but `GET /health` needs the key in KEY as a bearer token, websockets too.

    vLLM itself asks for the key on few paths, and not on /classify, /invocations or /metrics. Raises KeyError when KEY
    is not set.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._key = os.environ[KEY].encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Callable[..., Awaitable[None]]) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP 403
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _is_open(self, scope: dict[str, Any]) -> bool:
        return scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == OPEN

    def _has_key(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if given else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)


if __name__ == "__main__":
    import_ahead(Path(sys.argv[sys.argv.index("--model") + 1]), has_workers=True)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
