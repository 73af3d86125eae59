"""Inside an episode's own process: serves the node's requests one at a time. Standard library only."""

import asyncio
import importlib
import socket
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from rollout_fleet.environments.isolation import ipc_frames
from rollout_fleet.environments.isolation.placement import EnvironmentDied, World, awaited

REQUEST_BYTES = 1 << 30
MOST_IMPORTS = 8192  # names of modules that are told to the node


def serve(connection: socket.socket) -> None:
    """Answer until the node closes the connection."""
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    world, before = World(), set(sys.modules)
    while True:
        try:
            request = await ipc_frames.read(reader, REQUEST_BYTES)
        except EnvironmentDied:
            return  # the node has closed its end
        try:
            answer = ipc_frames.pack({"answer": await _answer(world, before, **request)})
        except (KeyboardInterrupt, SystemExit) as error:
            answer = ipc_frames.pack({"error": f"raised {type(error).__name__}"})
        except Exception as error:
            answer = ipc_frames.pack({"error": f"raised {type(error).__name__}: {error}"[:2000]})
        writer.write(answer)
        await writer.drain()


async def _answer(world: World, before: set[str], do: str, path: str = "", action: Any = None, **given: Any) -> Any:
    """The answer to a request; `before` are the modules that were imported when this process began."""
    if do == "reset":
        return await world.reset(partial(load(path), given["problem"], **given["keywords"]))
    if do == "step":
        result = await world.step(ipc_frames.action_of(action))
        return replace(result, observation="") if result.done else result  # no code reads it
    if do == "close":
        return await world.close()
    if do == "call":
        return await awaited(load(path)(**given["keywords"]))
    return _imports(before)


def _imports(before: set[str]) -> list[str]:
    """Modules that are here since this process began, without those of the standard library, in order."""
    new = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None]
    own = [name for name in new if name.partition(".")[0] not in sys.stdlib_module_names]
    return [name for name in own if name not in before][:MOST_IMPORTS]


def load(path: str) -> Any:
    """The object that 'module:name' names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
