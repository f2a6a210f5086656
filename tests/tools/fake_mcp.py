"""The client of the package mcp that tests put on PYTHONPATH in its place; each adds its own tools."""

SESSION = """
class ClientSession:
    def __init__(self, read, write):
        self.server = read

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def initialize(self):
        if "broken" in self.server:
            raise ConnectionError("nobody is there")
"""
