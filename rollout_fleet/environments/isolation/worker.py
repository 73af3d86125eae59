"""Inside an episode's own process: serves the node's requests one at a time. Standard library only."""

import asyncio
import importlib
import inspect
import socket
import sys
from typing import Any

from rollout_fleet.environments.isolation import ipc_frames

REQUEST_BYTES = 1 << 30
MOST_IMPORTS = 8192  # names of modules that are told to the node


def serve(connection: socket.socket) -> None:
    """Answer until the node closes the connection."""
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    world = _World()
    while True:
        try:
            request = await ipc_frames.read(reader, REQUEST_BYTES)
        except ipc_frames.EnvironmentDied:
            return  # the node has closed its end
        try:
            answer = ipc_frames.pack({"answer": await world.do(request)})
        except (KeyboardInterrupt, SystemExit) as error:
            answer = ipc_frames.pack({"error": f"raised {type(error).__name__}"})
        except Exception as error:
            answer = ipc_frames.pack({"error": f"raised {type(error).__name__}: {error}"[:2000]})
        limit = request["limit_bytes"]
        if len(answer) > limit + ipc_frames.HEAD_BYTES:
            answer = ipc_frames.pack({"flood": f"an answer of {len(answer)} bytes, the limit is {limit}"})
        writer.write(answer)
        await writer.drain()


class _World:
    """The environment of this process, if it has one."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._before = set(sys.modules)

    async def do(self, request: dict[str, Any]) -> Any:
        operation = request["do"]
        if operation == "reset":
            build = load(request["path"])
            self._environment = build(request["problem"], **request["keywords"])
            return ipc_frames.observation_json(await self._environment.reset())
        if operation == "step":
            return ipc_frames.result_json(await self._environment.step(ipc_frames.action_of(request["action"])))
        if operation == "close":
            close = getattr(self._environment, "close", None)
            ended = close() if close is not None else None
            return await ended if inspect.isawaitable(ended) else None
        if operation == "call":
            result = load(request["path"])(**request["keywords"])
            return await result if inspect.isawaitable(result) else result
        if operation == "imports":
            return self._imports()
        raise ValueError(f"unknown request {operation!r}")

    def _imports(self) -> list[str]:
        """Modules that are here since this process began, without those of the standard library, in order."""
        new = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None]
        own = [name for name in new if name.partition(".")[0] not in sys.stdlib_module_names]
        return [name for name in own if name not in self._before][:MOST_IMPORTS]


def load(path: str) -> Any:
    """The object that 'module:name' names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
