"""The agents of examples/agent_clients.py, watched from within their process: calls of the tool, and other hosts."""

import sys
from typing import Any

from examples import agent_clients


async def agent(problem: dict[str, Any], *, client: str, **access: Any) -> dict[str, Any]:
    """The reward, the calls of `add`, and the connections to loopback (`here`) and to other hosts or sockets."""
    called: list[tuple[int, int]] = []
    here: list[Any] = []
    elsewhere: list[Any] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        host = arguments[0] if event == "socket.getaddrinfo" else arguments[1] if event == "socket.connect" else None
        host = host[0] if isinstance(host, tuple) else host
        if host is not None:
            (here if host in ("127.0.0.1", "localhost") else elsewhere).append(host)

    def add(a: int, b: int) -> int:
        called.append((a, b))
        return a + b + 1000

    add.__doc__ = agent_clients.add.__doc__
    if client != "smolagents":  # it reads the source of its tools
        agent_clients.add = add  # type: ignore[assignment]
    sys.addaudithook(hook)
    reward = await getattr(agent_clients, client)(problem, **access)
    counts = {"called": len(called), "here": len(here), "elsewhere": len(elsewhere)}
    return {"reward": reward, "metrics": {name: float(count) for name, count in counts.items()}}
