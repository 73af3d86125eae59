"""The agents of examples/agent_clients.py, watched from within their process: calls of the tool, and other hosts."""

import sys
from typing import Any

from examples import agent_clients


async def agent(problem: dict[str, Any], *, client: str, **access: Any) -> dict[str, Any]:
    """The reward, the calls of `add`, and how often something else than loopback was looked up or connected to."""
    called: list[tuple[int, int]] = []
    elsewhere: list[Any] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        host = arguments[0] if event == "socket.getaddrinfo" else arguments[1] if event == "socket.connect" else None
        host = host[0] if isinstance(host, tuple) else host
        if host not in (None, "127.0.0.1", "localhost") and not isinstance(host, bytes):
            elsewhere.append(host)

    def add(a: int, b: int) -> int:
        called.append((a, b))
        return a + b + 1000

    add.__doc__ = agent_clients.add.__doc__
    if client != "smolagents":  # it reads the source of its tools
        agent_clients.add = add  # type: ignore[assignment]
    sys.addaudithook(hook)
    reward = await getattr(agent_clients, client)(problem, **access)
    return {"reward": reward, "metrics": {"called": float(len(called)), "elsewhere": float(len(elsewhere))}}
