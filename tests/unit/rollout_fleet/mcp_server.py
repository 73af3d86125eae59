"""An MCP server as people write them, and what goes wrong with one: FILE [FAULT [MARK]], over stdio."""

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


if __name__ == "__main__":
    sys.exit(4) if FAULT == "absent" else lie() if FAULT == "lie" else serve()
