"""Inside an episode's own process: serves the node's requests one at a time. Standard library only."""

import asyncio
import contextlib
import importlib
import inspect
import socket
import sys
from dataclasses import replace
from typing import Any

from rollout_fleet.environments.isolation import ipc_frames
from rollout_fleet.environments.isolation.placement import EnvironmentDied, closed

REQUEST_BYTES = 1 << 30
MOST_IMPORTS = 8192  # names of modules that are told to the node


async def serve(connection: socket.socket) -> None:
    """Answer until the node closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    episode = _Episode()
    with contextlib.suppress(EnvironmentDied):  # the node has closed its end
        while True:
            request = await ipc_frames.read(reader, REQUEST_BYTES)
            try:
                answer = ipc_frames.pack({"answer": await episode.answer(**request)})
            except (KeyboardInterrupt, SystemExit) as error:
                answer = ipc_frames.pack({"error": f"raised {type(error).__name__}"})
            except Exception as error:
                answer = ipc_frames.pack({"error": f"raised {type(error).__name__}: {error}"[:2000]})
            writer.write(answer)
            await writer.drain()


class _Episode:
    def __init__(self) -> None:
        self._environment: Any = None
        self._imported_before = set(sys.modules)

    async def answer(self, do: str, path: str = "", action: Any = None, **given: Any) -> Any:
        """The answer to a request; `path` is 'module:name'."""
        if do == "step":
            result = await self._environment.step(ipc_frames.action_of(action))
            return replace(result, observation="") if result.done else result  # no code reads it
        if do == "close":
            return await closed(self._environment)
        if do == "imports":  # modules that are here since this process began, without the standard library's, in order
            new = [name for name in list(sys.modules) if name not in self._imported_before]
            own = [name for name in new if name.partition(".")[0] not in sys.stdlib_module_names]
            return [name for name in own if getattr(sys.modules.get(name), "__spec__", None) is not None][:MOST_IMPORTS]
        module, _, name = path.partition(":")
        found = getattr(importlib.import_module(module), name)
        if do == "call":
            result = found(**given["keywords"])
            return await result if inspect.isawaitable(result) else result
        self._environment = found(given["problem"], **given["keywords"])
        return await self._environment.reset()
