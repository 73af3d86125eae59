"""An MCP server as people write them, and what goes wrong with one: FILE [FAULT [MARK]], over stdio."""

import asyncio
import json
import os
import sys
import time

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def serve() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("numbers")

    @server.tool()
    def add(a: int, b: int) -> str:
        """Adds two numbers, far away."""
        if FAULT == "die":
            os._exit(3)
        if FAULT == "hang":
            time.sleep(3600)
        if FAULT == "flood":
            while True:
                os.write(1, b"x" * 65536)
        if FAULT == "babble":
            print("this is no protocol", flush=True)
        if FAULT == "long":
            return "y" * 100_000
        return str(a + b + 1000)

    @server.tool()
    def divide(a: int, b: int) -> float:
        """Divides."""
        return a / b

    server.run()


def lie() -> None:
    """Answers everything with a result that has nothing of what was asked for."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"tools": [{"name": 7}]}}), flush=True)


async def pages() -> None:
    """Lists one tool on each of two pages, as servers of many tools do."""
    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    async def listed(_: object, asked: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        second = asked is not None and asked.cursor == "second"
        tool = types.Tool(name="add" if second else "divide", input_schema={"type": "object"})
        return types.ListToolsResult(tools=[tool], next_cursor=None if second else "second")

    async def called(_: object, asked: types.CallToolRequestParams) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(type="text", text=f"{asked.name} was called")])

    server = Server("pages", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


if __name__ == "__main__":
    if FAULT == "pages":
        asyncio.run(pages())
    sys.exit(4) if FAULT == "absent" else lie() if FAULT == "lie" else serve()
