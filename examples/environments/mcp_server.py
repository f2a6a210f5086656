"""An MCP server with one tool, which says where a thing is.

posttrain tool try "mcp:python examples/environments/mcp_server.py" '{"thing": "hat"}'

It keeps no state, so any session can answer any call. Things are moved all the time: a model that remembers where they
were is wrong.
"""

from __future__ import annotations

import random

try:  # pip install "posttrain[mcp]"
    from mcp.server import MCPServer  # 2.x
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer  # 1.x

THINGS = ("hat", "coat", "globe", "candle", "lantern", "umbrella")
PLACES = ("den", "barn", "attic", "cellar", "kitchen", "workshop")
server = MCPServer("house")


@server.tool()
def where(thing: str) -> str:
    """Says where a thing is."""
    if thing not in THINGS:
        raise ValueError(f"no such thing: {thing}")
    return random.choice(PLACES)


if __name__ == "__main__":
    server.run("stdio")
