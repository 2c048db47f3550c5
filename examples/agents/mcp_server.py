"""A small MCP server with one tool: `python mcp_server.py` speaks over stdio, `python mcp_server.py 8000` over HTTP."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def multiply(a: int, b: int) -> str:
    """Multiply two whole numbers."""
    return str(a * b)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
