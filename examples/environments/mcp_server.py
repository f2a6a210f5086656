"""An MCP server with one tool: posttrain train ... actor_rollout_ref.rollout.tools='["mcp:python mcp_server.py"]'"""

from __future__ import annotations

try:  # pip install "posttrain[mcp]"
    from mcp.server import MCPServer  # 2.x
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer  # 1.x

server = MCPServer("places")
PLACES = {"hat": "attic", "key": "drawer"}


@server.tool()
def where(thing: str) -> str:
    """Says where a thing is."""
    if thing not in PLACES:
        raise ValueError(f"no such thing: {thing}")
    return PLACES[thing]


if __name__ == "__main__":
    server.run("stdio")
