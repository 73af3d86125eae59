"""Tools of an MCP server that a command starts, one server for each episode, over stdio.

    tasks:
      environment: mcp
      options: {command: "python -m my_server", reward: exact_match}
      dataset: questions.jsonl            # rows with `question` and what the reward reads

The server's own answer to a wrong call is shown to the policy. A server that hangs, dies or answers nonsense fails the
sample. It has the limits of the episode's process, and ends with it.
"""

import asyncio
import contextlib
import functools
import json
import os
import shlex
from typing import Any

from rollout_fleet.environments.builtin.reward_function import RewardFunction
from rollout_fleet.environments.protocol import Action, Chat, Limits
from rollout_fleet.environments.tools import Tool, ToolEnvironment, ToolServerFailed, check_depth

CLOSE_S = 8.0


class ToolFailed(Exception):
    """The server says that a call failed; the message is its own."""


class McpTools(ToolEnvironment):
    """Multi turn. Problem: a row with the columns that prompt and reward name.

    Options:
        command: starts the server, without a shell. The job's folder is on PYTHONPATH and not the current one.
        prompt: template of the question, with {column}.
        reward: of the final answer, as `tasks.reward`: a built-in name or module:function.
        reward_options: its keyword arguments, as a JSON object.
        start_s, call_s: seconds for starting it and listing its tools, and for each call.
    """

    NEEDS = ("mcp",)
    PRELOAD = NEEDS
    LIMITS = Limits(process=True, memory_mib=16384)  # address space; servers bring runtimes that reserve much

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        command: str,
        prompt: str = "{question}",
        reward: str = "exact_match",
        reward_options: str = "{}",
        start_s: float = 60.0,
        call_s: float = 30.0,
    ) -> None:
        super().__init__()
        options = json.loads(reward_options)
        self._question = RewardFunction(
            problem, seed=seed, reward=reward, options=options, prompt=prompt, chat_template_kwargs={}
        )
        self._command = shlex.split(command)
        self._start_s = start_s
        self._call_s = call_s
        self._over = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._client: Any = None

    async def reset(self) -> Chat:
        self.messages = (await self._question.reset()).messages
        with _blamed(self._command[0]):
            async with asyncio.timeout(self._start_s):
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._running = asyncio.create_task(self._run_server(ready))
                self._client = await ready
                page = await self._client.list_tools()
                found = list(page.tools)
                while page.next_cursor is not None:
                    page = await self._client.list_tools(cursor=page.next_cursor)
                    found += page.tools
        names = [tool.name for tool in found]
        if not names or len(set(names)) < len(names):
            raise ToolServerFailed(f"{self._command[0]} offers the tools {names}, expected names that differ")
        self.tools = tuple(
            Tool(tool.name, tool.description or "", tool.input_schema, functools.partial(self._call, tool.name))
            for tool in found
        )
        return await super().reset()

    async def judge(self, answer: str) -> float:
        return (await self._question.step(Action(answer, (), ended=True))).reward

    async def close(self) -> None:
        self._over.set()
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=CLOSE_S)
            self._running.cancel()

    async def _run_server(self, ready: "asyncio.Future[Any]") -> None:
        """From the server's start to its end, in one task, as anyio wants it."""
        from mcp import Client, StdioServerParameters, stdio_client  # pyright: ignore[reportMissingImports]

        paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        server = StdioServerParameters(command=self._command[0], args=self._command[1:], env=paths)
        try:
            with open(os.devnull, "w") as nowhere:
                async with Client(stdio_client(server, errlog=nowhere)) as client:
                    ready.set_result(client)
                    await self._over.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        from mcp import MCPError  # pyright: ignore[reportMissingImports]
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT  # pyright: ignore[reportMissingImports]

        check_depth(arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # half a character is the policy's fault, and would end mcp
        with _blamed(self._command[0]):
            async with asyncio.timeout(self._call_s):
                try:
                    result = await self._client.call_tool(tool, arguments)
                except MCPError as error:
                    if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                        raise
                    result = error
        if isinstance(result, MCPError):
            raise ToolFailed(result.message)
        blocks = [getattr(block, "text", f"({block.type})") for block in result.content]
        if result.is_error:
            raise ToolFailed("\n".join(blocks))
        return "\n".join(blocks)


@contextlib.contextmanager
def _blamed(name: str) -> Any:
    """Raise ToolServerFailed for every exception within."""
    try:
        yield
    except TimeoutError as error:
        raise ToolServerFailed(f"the MCP server {name} did not answer in time") from error
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise ToolServerFailed(f"the MCP server {name} failed: {type(first).__name__}: {first}"[:1000]) from error
